"""What a distance between images looks at: Inception's 2048 numbers, or plain pixels for tiny images."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from scalelong.data.files import sha256
from scalelong.metrics.weights import SHA256, find_inception

MOST_PIXELS = 32 * 32 * 3
_AT_ONCE_ON_A_CPU = 8


class Features(Protocol):
    """Images [B, C, H, W] in [-1, 1] to features [B, D]; `name` says which, for the protocol and the cache."""

    name: str

    def __call__(self, images: Tensor) -> Tensor:
        """The features."""
        ...


class PixelFeatures:
    """The pixels themselves. Distances on them compare with nothing in the literature."""

    name = "pixels"

    def __call__(self, images: Tensor) -> Tensor:
        """[B, C·H·W]."""
        check_images(self.name, images.shape[1:].numel())
        return images.flatten(1).double()


class InceptionFeatures:
    """The standard FID network, as TorchScript. Protocol of pytorch-fid: [0, 1], bilinear to 299 without corner
    alignment, then to [-1, 1]."""

    name = "inception-v3 pool3"

    def __init__(self, path: Path | None = None, device: str = "cpu") -> None:
        self.device = device
        self.memory_format = torch.channels_last if device == "cpu" else torch.contiguous_format
        file = find_inception(path)
        self.name = inception_name(file)
        try:
            self.network = torch.jit.load(str(file), map_location=device).eval()
        except RuntimeError as error:  # what torch makes of any other file
            reason = str(error).split(". ")[0]
            raise ValueError(
                f"{file} is no TorchScript file ({reason}); --inception takes that of the FID network, or leave it "
                "out to have the file downloaded."
            ) from error

    def __call__(self, images: Tensor) -> Tensor:
        """[B, 2048]. Samples are rounded to 256 levels first: files of images would be, too."""
        if self.device != "cpu":
            return self._features(images)
        # A CPU is faster by far with few at once: what many need leaves its caches, and is mapped anew each time.
        return torch.cat([self._features(few) for few in images.split(_AT_ONCE_ON_A_CPU)])

    @torch.no_grad()
    def _features(self, images: Tensor) -> Tensor:
        levels = ((images.to(self.device).float() + 1) * 127.5).round().clamp(0, 255) / 255
        if levels.shape[1] == 1:
            levels = levels.expand(-1, 3, -1, -1)
        resized = F.interpolate(levels, (299, 299), mode="bilinear", align_corners=False)
        resized = resized.contiguous(memory_format=self.memory_format)
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # a metric is measured in full precision
            features: Tensor = self.network(resized * 2 - 1)
        return features.flatten(1).double()


def inception_name(file: Path | None) -> str:
    """The standard network's name; another file has its own, so that their features are never compared."""
    if file is None or (checksum := sha256(file)) == SHA256:
        return InceptionFeatures.name
    return f"features of {file.name} ({checksum[:12]})"


def check_kind(kind: str, inception: Path | None) -> None:
    """Refuse what `features_named` cannot give."""
    if kind not in KINDS:
        raise ValueError(f"--features is inception or pixels, got {kind!r}.")
    if kind == "pixels" and inception is not None:
        raise ValueError("--inception is not used with --features pixels; leave one of them out.")


def check_images(kind: str, numbers: int) -> None:
    """Refuse images of so many numbers that a covariance of all of them could not be had in reasonable time."""
    if kind == "pixels" and numbers > MOST_PIXELS:
        raise ValueError(
            f"--features pixels is for tiny images, of at most {MOST_PIXELS:,} numbers (32×32×3), got {numbers:,}; "
            "use --features inception."
        )


def features_named(kind: str, inception: Path | None, device: str) -> Features:
    """The features of a kind; `inception` is the FID network's file, where it is not to be looked for."""
    check_kind(kind, inception)
    return PixelFeatures() if kind == "pixels" else InceptionFeatures(inception, device)


KINDS: dict[str, type[InceptionFeatures] | type[PixelFeatures]] = {
    "inception": InceptionFeatures,
    "pixels": PixelFeatures,
}
