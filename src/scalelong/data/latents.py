"""Latents: images as a diffusers autoencoder sees them, encoded once at prepare time and decoded after sampling.

Where an image is encoded to a distribution, its mean and deviation are kept, and training draws from them anew each
time. Both flips are encoded, since the encoding of a flipped image is not the flipped encoding. Moments are kept in
float16: it rounds a value of 1 by at most 2^-11, a sixtieth of the least noise that a latent model is trained on
(σ = 0.029 at k = 0 of `sd`), and saves half of the bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PROBE = 64  # pixels: a multiple of every published downsampling
_PLACES = ("", "vae", "vqvae")  # where an autoencoder lies in its own folder, or in a pipeline's
_WEIGHTS = "diffusion_pytorch_model.safetensors"
_PIXELS_AT_ONCE = 1 << 21  # 32 images of 256×256: what fits any GPU
_SPREAD_IMAGES = 256
_HUB_TIMEOUT_S = 5


class AutoencoderError(ValueError):
    """An autoencoder that cannot be had, or does not fit the images."""


@dataclass(frozen=True, kw_only=True)
class LatentSpace:
    """What a store's latents are: z = (encoded - shift_factor) · scaling_factor, of this shape.

    `autoencoder` is a name on the hub or a folder, and `weights` a checksum of what was found there.
    """

    autoencoder: str
    kind: str
    weights: str
    scaling_factor: float
    shift_factor: float
    channels: int
    height: int
    width: int


@dataclass(frozen=True)
class Autoencoder:
    """A diffusers autoencoder with the scale and shape of its latents."""

    place: str
    network: Any
    scaling_factor: float
    shift_factor: float
    channels: int  # of the latents
    downsampling: int  # how many pixels a side of a latent stands for
    is_random: bool  # whether an image is encoded to a distribution: a deviation is kept for every mean

    @property
    def kind(self) -> str:
        """Its class in diffusers."""
        return type(self.network).__name__

    def space(self, height: int, width: int, channels: int) -> LatentSpace:
        """The latents of images of this size, or a sentence why there are none."""
        self.check(height, width, channels)
        return LatentSpace(
            autoencoder=self.place,
            kind=self.kind,
            weights=fingerprint(self.network),
            scaling_factor=self.scaling_factor,
            shift_factor=self.shift_factor,
            channels=self.channels,
            height=height // self.downsampling,
            width=width // self.downsampling,
        )

    def check(self, height: int, width: int, channels: int) -> None:
        """Refuse images of a size that does not fit."""
        factor, taken = self.downsampling, _image_channels(self.network)
        given = self.network.config.get("out_channels", taken)
        if (channels, channels) != (taken, given):
            raise AutoencoderError(
                f"the autoencoder {self.place} takes {taken} channels and gives {given}, and the "
                f"images have {channels}; take one that was made for them."
            )
        if height % factor or width % factor:
            raise AutoencoderError(
                f"the autoencoder {self.place} makes a latent of each {factor}×{factor} pixels, so that the sides "
                f"of the images are multiples of {factor}, got {width}×{height}; give --size "
                f"{max(factor, round(min(height, width) / factor) * factor)}."
            )

    def check_latents(self, latents: tuple[int, int, int], images: tuple[int, int, int]) -> None:
        """Refuse to decode latents [C', h, w] that are not those of images [H, W, C]."""
        (height, width, _), factor = images, self.downsampling
        made = (self.channels, height // factor, width // factor)
        if made != latents:
            ours, theirs = ("{2}×{1}×{0}".format(*shape) for shape in (made, latents))
            raise AutoencoderError(
                f"the autoencoder {self.place} has latents of {ours} for images of {width}×{height}, and this "
                f"run's are {theirs}: it is another one; give the one that made them, with --autoencoder."
            )

    @torch.no_grad()
    def moments(self, pixels: Tensor) -> Tensor:
        """Pixels [B, H, W, C] of 0 … 255 -> [B, 2, 2 C', h, w]: as they are and flipped, means and deviations.

        Where nothing is random there are no deviations: [B, 2, C', h, w].
        """
        images = pixels.to(self.network.device).permute(0, 3, 1, 2).to(self.network.dtype) / 127.5 - 1
        both = torch.stack([images, images.flip(3)], dim=1).flatten(0, 1)
        return torch.cat(_parts(self.network.encode(both.contiguous())), dim=1).unflatten(0, (-1, 2))

    @torch.no_grad()
    def decoded(self, latents: Tensor) -> Tensor:
        """Scaled latents [B, C', h, w] -> images [B, C, H, W] in [-1, 1], a few at a time."""
        z = (latents / self.scaling_factor + self.shift_factor).to(self.network.dtype)
        at_once = images_at_once(*(side * self.downsampling for side in z.shape[2:]))
        return torch.cat([self.network.decode(part).sample for part in z.split(at_once)]).clamp(-1, 1).float()


def _image_channels(network: Any) -> int:
    return int(network.config.get("in_channels", 3))


def _parts(encoded: Any) -> list[Tensor]:
    """Means and deviations of what an autoencoder returns, or latents alone: diffusers has three names for them."""
    if "latent_dist" in encoded:
        return [encoded.latent_dist.mean, encoded.latent_dist.std]
    return [encoded["latent"] if "latent" in encoded else encoded["latents"]]


def images_at_once(height: int, width: int) -> int:
    """How many images an autoencoder gets in one call."""
    return max(1, _PIXELS_AT_ONCE // (height * width))


def moment_bytes(space: LatentSpace, is_random: bool) -> int:
    """What an image takes in the store: both flips, in float16."""
    return 2 * (1 + is_random) * space.channels * space.height * space.width * 2


def as_float16(moments: Tensor, names: list[str]) -> np.ndarray[Any, np.dtype[np.float16]]:
    """As the store keeps them; what is not finite, or too large for it, names its image."""
    halved = moments.to(torch.float16)
    spoilt = (~halved.isfinite()).flatten(1).any(1).tolist()
    if any(spoilt):
        largest = moments[spoilt.index(True)].abs().max().item()
        raise AutoencoderError(
            f"the autoencoder encodes {names[spoilt.index(True)]} to values of up to {largest:g}; a store keeps "
            "finite ones below 65,504. Its weights are broken, or were made for other images."
        )
    return halved.cpu().numpy()


def spread_of(latents: np.ndarray[Any, np.dtype[np.float16]], space: LatentSpace) -> float:
    """The standard deviation of a store's scaled latents, from some hundreds of images: moments and their noise."""
    some = latents[:: max(1, len(latents) // _SPREAD_IMAGES), 0].astype(np.float32)
    means, deviations = np.split(some, [space.channels], axis=1)
    variance = means.var() + (np.square(deviations).mean() if deviations.size else 0.0)
    return float(space.scaling_factor * np.sqrt(variance))


def fingerprint(network: Any) -> str:
    """A checksum of all weights: whether two autoencoders are the same, wherever they lie."""
    digest = hashlib.sha256()
    for name, tensor in sorted(network.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


# Loading


def load_autoencoder(place: str | Path, *, scale: float | None = None, device: str = "cpu") -> Autoencoder:
    """From a folder, a pipeline's folder, or the hub; `scale` replaces the autoencoder's own scaling factor."""
    if scale is not None and not (math.isfinite(scale) and scale > 0):
        raise AutoencoderError(f"the scale of latents is a positive number, such as 0.18215, got {scale}.")
    folder, place = _folder_of(str(place))
    config = _read_config(folder, place)
    network = _load(folder, config["_class_name"], place).to(device)
    scale = scale or network.config.get("scaling_factor")
    if scale is None:
        raise AutoencoderError(
            f"{place} has no scaling_factor of its own; give the scale of its latents, one over their spread, with "
            "--scale."
        )
    shift = config.get("shift_factor") or 0.0
    return Autoencoder(place, network, float(scale), float(shift), **_probed(network, place))


@torch.no_grad()
def _probed(network: Any, place: str) -> dict[str, Any]:
    """The shape of its latents, by a small grey image: configs name it in as many ways as there are classes."""
    image = torch.zeros(1, _image_channels(network), _PROBE, _PROBE, device=network.device)
    try:
        parts = _parts(network.encode(image))
        back = network.decode(parts[0]).sample
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, TypeError, ValueError, RuntimeError, LookupError) as error:
        raise AutoencoderError(
            f"an autoencoder encodes an image [B, C, H, W] and decodes what comes of it, and {place}, a "
            f"{type(network).__name__}, does not ({str(error).partition(chr(10))[0]}); take one for images."
        ) from error
    if parts[0].ndim != 4 or back.shape[2:] != image.shape[2:]:
        raise AutoencoderError(
            f"an autoencoder gives an image of {_PROBE}×{_PROBE} back at its size, and {place}, a "
            f"{type(network).__name__}, makes {list(parts[0].shape)} and then {list(back.shape)} of it; take "
            "another one."
        )
    return {
        "channels": parts[0].shape[1],
        "downsampling": _PROBE // parts[0].shape[2],
        "is_random": len(parts) == 2,
    }


def _folder_of(place: str) -> tuple[Path, str]:
    """Where the files are, and what to write down: an absolute path, or the name on the hub."""
    folder = Path(place).expanduser()
    if folder.is_dir():
        found, place = folder, str(folder.resolve())
    elif folder.exists() or folder.is_absolute() or place.startswith((".", "~")) or place.count("/") != 1:
        raise AutoencoderError(
            f"there is no folder {place!r}; an autoencoder is a folder that diffusers' save_pretrained wrote, a "
            "pipeline's folder, or a name on the hub such as stabilityai/sd-vae-ft-ema."
        )
    else:
        found = _from_hub(place)
    for part in _PLACES:
        if (found / part / "config.json").is_file():
            return found / part, place
    raise AutoencoderError(
        f"{place} holds no autoencoder: there is no config.json in it, in its vae or in its vqvae; give the folder "
        "that diffusers' save_pretrained wrote."
    )


def _from_hub(name: str) -> Path:
    """The files of the autoencoder alone; from the cache where the hub cannot be reached, told after one look."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    reason = None
    try:
        HfApi().model_info(name, timeout=_HUB_TIMEOUT_S)
    except RepositoryNotFoundError as error:
        raise AutoencoderError(f"there is no folder {name!r}, and the hub has no model of that name.") from error
    except HfHubHTTPError as error:
        raise AutoencoderError(f"the hub gives no {name!r} ({str(error).partition(chr(10))[0]}).") from error
    except Exception as error:  # whatever the client in use raises without a connection
        reason = str(error).partition("\n")[0]
    wanted = [str(Path(part) / file) for part in _PLACES for file in ("config.json", _WEIGHTS)]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted, local_files_only=reason is not None))
    except LocalEntryNotFoundError as error:
        raise AutoencoderError(
            f"{name} is no folder here, is not in the local cache, and the hub cannot be reached ({reason}); "
            "download it where there is a network, and give its folder."
        ) from error


def _read_config(folder: Path, place: str) -> dict[str, Any]:
    try:
        config = dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except ValueError as error:
        raise AutoencoderError(f"{folder / 'config.json'} cannot be read ({error}).") from error
    kind = config.get("_class_name")
    if not _encodes(kind):
        raise AutoencoderError(
            f"an autoencoder is a class of diffusers such as AutoencoderKL or AutoencoderDC, got a {kind!r} in "
            f"{place}."
        )
    if config.get("latents_mean") or config.get("latents_std"):
        raise AutoencoderError(
            f"{place} normalises each channel by its latents_mean and latents_std; latents are scaled here by one "
            "scaling_factor and shift_factor: take an autoencoder that has these."
        )
    return config


def _encodes(kind: Any) -> bool:
    """Whether diffusers has a model of this name that encodes and decodes."""
    import diffusers

    found = getattr(diffusers, str(kind), None)
    return isinstance(found, type) and hasattr(found, "encode") and hasattr(found, "decode")


def _load(folder: Path, kind: str, place: str) -> Any:
    import diffusers

    try:
        network, found = getattr(diffusers, kind).from_pretrained(
            folder, use_safetensors=True, torch_dtype=torch.float32, output_loading_info=True
        )
    except (OSError, ValueError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise AutoencoderError(
            f"the weights of the autoencoder {place} cannot be loaded ({reason}); its folder has a whole "
            f"{_WEIGHTS} that fits its config.json."
        ) from error
    if found["missing_keys"]:
        raise AutoencoderError(
            f"the weights of the autoencoder {place} lack {len(found['missing_keys'])} tensors, the first of them "
            f"{found['missing_keys'][0]}; copy or download it again."
        )
    broken = [name for name, tensor in network.state_dict().items() if not tensor.isfinite().all()]
    if broken:
        raise AutoencoderError(f"the autoencoder {place} has weights that are not finite, in {broken[0]}.")
    return network.eval().requires_grad_(False)
