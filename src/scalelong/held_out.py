"""The loss on images that a run was not trained on: the same images, times and noise whenever it is asked.

Two models, or one at two moments, then differ by what they have learned and not by the luck of the draw. Each image
is noised several times, once in each equal stretch of the process, as losses differ most by the noise.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from scalelong.config import RunConfig
from scalelong.data.contexts import check_same_encoder, info_of, text_of
from scalelong.data.loader import Batch
from scalelong.data.random import Stream
from scalelong.data.store import IMAGES, LATENTS, Store
from scalelong.experiment import fitted_to, loader_for, process_of

DRAWS = 8
_RESIDENT = 1 << 30  # bytes that may lie on the device beside a training
_READ_AT_MOST = 1 << 30  # bytes of images, for one that is on both sides
_OF_THE_DATA = ("sample_size", "in_channels", "num_class_embeds")
_BELOW_ONE = 1 - 2**-24
Progress = Callable[[Iterable[int], int], Iterable[int]]


@dataclass(frozen=True, kw_only=True)
class HeldOutLoss:
    """The mean over images, its standard error, and the mean in each stretch of the process, least noise first."""

    loss: float
    standard_error: float
    by_noise: list[float]
    images: int
    draws: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class HeldOut:
    """Images of a store, `num` of them in an order of its own, and how they are noised.

    Nothing is flipped or dropped. The seed is not the run's: runs of all seeds are asked the same. The
    answer is that of any device, but with `bf16`, which on a GPU is several times faster.
    """

    def __init__(
        self,
        config: RunConfig,
        store: Store,
        *,
        device: str = "cpu",
        num: int | None = None,
        draws: int = DRAWS,
        batch: int = 250,
        seed: int = 0,
        bf16: bool = False,
    ) -> None:
        self.images = min(len(store), len(store) if num is None else num)
        if self.images < 2 or draws < 1:
            raise ValueError(
                f"a held-out loss takes 2 images or more and draws from 1 up, got {self.images} of {store.folder} "
                f"and {draws=}."
            )
        plain = replace(config.data, flip=False, label_dropout=0.0)
        config = replace(config, data=plain, train=replace(config.train, seed=seed))
        self.loader = loader_for(config, store, device, resident_bytes=_RESIDENT)
        self.process = process_of(config).to(self.loader.device)
        self.draws, self.size = draws, batch
        self.bf16 = bf16
        self.noise, self.times = Stream(seed, "held-out noise"), Stream(seed, "held-out times")

    def batches(self, progress: Progress = lambda starts, count: starts) -> Iterator[Batch]:
        """Each image once."""
        starts = range(0, self.images, self.size)
        for start in progress(starts, len(starts)):
            yield self.loader.batch(start, min(self.size, self.images - start))

    @torch.no_grad()
    def losses(self, model: nn.Module, batch: Batch, condition: Tensor | None) -> Tensor:
        """[draws, B] in float64: each image's loss in each stretch under a condition, weighted as in training."""
        given = {} if condition is None else {self.loader.argument: condition}
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # the same on every device
            each = [self._losses(model, batch, draw, given) for draw in range(self.draws)]
        return torch.stack(each).double().cpu()

    def _losses(self, model: nn.Module, batch: Batch, draw: int, given: dict[str, Tensor]) -> Tensor:
        counters = batch.indices * self.draws + draw
        noise = self.noise.normal(counters, tuple(batch.images.shape[1:]))
        uniforms = (self.times.uniform(counters) + draw) / self.draws
        timesteps = self.process.timesteps(uniforms.clamp(max=_BELOW_ONE))  # rounded up to 1, one in a million
        example = self.process.example(batch.images, noise, timesteps)
        with torch.autocast(batch.images.device.type, torch.bfloat16, enabled=self.bf16):
            prediction = model(example.inputs, timesteps, return_dict=False, **given)[0].float()
        each = (prediction - example.target).square().mean(dim=(1, 2, 3))
        return each if example.weights is None else each * example.weights

    def measure(self, model: nn.Module, progress: Progress = lambda starts, count: starts) -> HeldOutLoss:
        """The model's loss; it is left as it was."""
        training = model.training
        model.eval()
        try:
            parts = [self.losses(model, batch, batch.condition) for batch in self.batches(progress)]
        finally:
            model.train(training)
        table = torch.cat(parts, dim=1)  # [draws, images]
        return HeldOutLoss(
            loss=table.mean().item(),
            standard_error=table.mean(0).std().item() / self.images**0.5,
            by_noise=table.mean(1).tolist(),
            images=self.images,
            draws=self.draws,
        )


def check_fits(config: RunConfig, store: Store) -> None:
    """Refuse images about which a run, fitted to its own data, cannot be asked."""
    sizes = {name: value for name, value in config.model.changes.items() if name not in _OF_THE_DATA}
    unfitted = replace(config, model=replace(config.model, changes=sizes))
    ours, theirs = _prepared(config), _prepared(fitted_to(unfitted, store))
    for name, value in ours.items():
        if value != theirs[name]:
            raise ValueError(
                f"held-out images are prepared like those of the training: {name} is {value} there, got "
                f"{theirs[name]} in {store.folder}."
            )


def check_like(config: RunConfig, store: Store, held_out: Store) -> None:
    """Refuse held-out images that are those of the training, `store`, or were not prepared as they were."""
    check_fits(config, held_out)
    shared = len(held_out) if _image_files(store) & _image_files(held_out) else _in_both(store, held_out)
    if shared == len(held_out):
        raise ValueError(
            f"held-out images are ones not seen in training: {held_out.folder} holds images of "
            f"{store.folder}; prepare a folder of others."
        )
    if shared:
        warnings.warn(
            f"{shared:,} of the {len(held_out):,} held-out images in {held_out.folder} are among those of the "
            f"training, {store.folder}: the loss on them says nothing of images not seen.",
            stacklevel=1,
        )
    if config.data.condition == "class" and store.manifest.classes != held_out.manifest.classes:
        raise ValueError(
            f"held-out images have the classes of the training, {_few(store)}, got {_few(held_out)} in "
            f"{held_out.folder}."
        )
    if config.data.condition == "text":
        check_same_encoder(text_of(held_out).null, info_of(store), text_of(store).null, str(held_out.folder))


def _prepared(config: RunConfig) -> dict[str, Any]:
    """What a fitted config knows of how its images were prepared."""
    found = {name: config.model.changes.get(name) for name in _OF_THE_DATA}
    if config.latents is not None:
        latents = asdict(config.latents)
        found |= {f"latents.{name}": latents[name] for name in ("weights", "scaling_factor", "shift_factor")}
    return found


def _in_both(store: Store, held_out: Store) -> int:
    """How many held-out images the training has too, to the bit; 0 for data too large to be read for that."""
    ours, theirs = store.images, held_out.images
    if not isinstance(ours, np.ndarray) or not isinstance(theirs, np.ndarray):
        return 0
    if ours.nbytes + theirs.nbytes > _READ_AT_MOST:
        return 0
    seen = {hash(image.tobytes()) for image in ours}
    return sum(hash(image.tobytes()) in seen for image in theirs)


def _image_files(store: Store) -> set[str]:
    """Checksums of the files that hold the images themselves; labels may be the same for other images."""
    names = {IMAGES, LATENTS, *(store.manifest.shards or ())}
    return {checksum for name, checksum in store.manifest.sha256.items() if name in names}


def _few(store: Store) -> str:
    names = store.manifest.classes or []
    return ", ".join(names[:5]) + (" …" if len(names) > 5 else "")
