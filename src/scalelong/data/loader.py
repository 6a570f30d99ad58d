"""Batches as a pure function of (seed, index in the stream): resume and process counts change nothing."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scalelong.data.contexts import text_of
from scalelong.data.latents import LatentSpace
from scalelong.data.random import Stream, permutation
from scalelong.data.shards import ShardImages
from scalelong.data.store import NoImages, Store

_RESIDENT_BYTES = 8 << 30  # of a store that lives in a CPU's memory, at most
_RESIDENT_SHARE = 0.25  # of a GPU's


@dataclass(frozen=True)
class Batch:
    """`indices` are positions in the endless stream; noise and times are drawn by them too."""

    images: Tensor  # [B, C, H, W] in [-1, 1], or latents, scaled
    condition: Tensor | None  # classes [B], num_classes for a dropped one; or contexts [B, L, D] of captions
    indices: Tensor  # [B]


class Loader:
    """The endless, reshuffled stream of a store's images, flips included.

    A store of up to `resident_bytes` (a quarter of a GPU's memory) lives on the device; a larger one is read
    through its memory map, and shards are decoded as they are needed: the next batch ahead, while the device is
    busy with this one. With `label_dropout`
    images have labels, with `text_dropout` the context of one of their captions; so many are dropped. With
    `latents` the stream is of these: each is drawn from its moments anew whenever it comes.
    """

    def __init__(
        self,
        store: Store,
        *,
        seed: int,
        device: torch.device | str = "cpu",
        flip: bool = False,
        label_dropout: float | None = None,
        text_dropout: float | None = None,
        latents: bool = False,
        resident_bytes: int | None = None,
    ) -> None:
        if label_dropout is not None and store.labels is None:
            raise ValueError(
                f"class labels were asked for and {store.folder} has none; prepare it from class subfolders, "
                "or train without data.condition=class."
            )
        self.store = store
        self.seed = seed
        self.device = torch.empty(0, device=device).device  # with its index, as tensors there have it
        self.labelled = label_dropout is not None
        self.dropout = label_dropout or text_dropout or 0.0
        self.flips = Stream(seed, "flip") if flip else None
        self.drops = Stream(seed, "label dropout") if self.dropout else None
        self.choices = Stream(seed, "caption")
        self.text = None if text_dropout is None else text_of(store)
        self.space = latent_space(store) if latents else None
        self.posterior = Stream(seed, "posterior")
        source = store.images if self.space is None else _latent_rows(store, flip)
        self.resident: Tensor | None = None
        self.host: ShardImages | _Mapped | None = None
        text_bytes = 0 if self.text is None else self.text.tokens.nbytes
        room = resident_bytes_on(self.device) if resident_bytes is None else resident_bytes
        if isinstance(source, ShardImages):
            self.host = source
        elif source.nbytes + text_bytes <= room:
            self.resident = torch.from_numpy(np.array(source[:])).to(self.device)
        else:
            self.host = _Mapped(source)
        # Where images are read by the host, their order stays there: to ask the device for it would wait for it.
        self._place = self.device if self.resident is not None else torch.device("cpu")
        self.labels = None if store.labels is None else torch.from_numpy(store.labels).to(self._place)
        if self.text is not None:
            self.captions = torch.from_numpy(self.text.index).to(self._place)
            tokens = torch.from_numpy(self.text.tokens)
            self.contexts = tokens.to(self.device) if self.resident is not None else tokens
        # What a dropped condition becomes, and what the network calls a condition.
        self.null: Tensor | int = store.num_classes if self.text is None else self.text.null.to(self.device)
        self.argument = "class_labels" if self.text is None else "encoder_hidden_states"
        self._ahead = _Ahead()
        # Not a method: a cache of one would hold the loader, and the images with it, until the collector comes.
        self._order = lru_cache(maxsize=2)(partial(_shuffled, seed, len(store), self._place))

    def batch(self, start: int, size: int) -> Batch:
        """Images `start` … `start + size - 1` of the stream."""
        return self.finish(*self.fetch(start, size), torch.arange(start, start + size, device=self.device))

    def fetch(self, start: int, size: int) -> tuple[Tensor, Tensor | None]:
        """The same images as the store has them: pixels [B, H, W, C] of 0 … 255, or moments; labels or contexts."""
        rows = self._rows(start, size)
        places = self._places(start, rows)
        if self.resident is not None:
            pixels = self.resident[places]
        else:
            pixels = torch.from_numpy(self._read(start, size, places.numpy()))
            pixels = pixels.pin_memory() if self.device.type == "cuda" else pixels
        return pixels, self._condition(start, rows)

    def finish(self, pixels: Tensor, condition: Tensor | None, indices: Tensor) -> Batch:
        """What is drawn by the position in the stream: flips, dropped conditions. Operations on tensors alone."""
        pixels = pixels.to(self.device)
        images = self._images(pixels, indices) if self.space is None else self._latents(pixels, indices)
        if condition is not None:
            condition = condition.to(self.device, torch.int64 if self.text is None else torch.float32)
            if self.drops is not None:
                dropped = self.drops.uniform(indices) < self.dropout
                dropped = dropped.view(-1, *(1,) * (condition.ndim - 1))
                condition = torch.where(dropped, self.null, condition)
        return Batch(images.contiguous(), condition, indices)

    def _images(self, pixels: Tensor, indices: Tensor) -> Tensor:
        images = pixels.permute(0, 3, 1, 2).to(torch.float32) / 127.5 - 1
        if self.flips is None:
            return images
        flipped = (self.flips.bits(indices, 1)[:, 0] & 1).bool()
        return torch.where(flipped[:, None, None, None], images.flip(3), images)

    def _latents(self, moments: Tensor, indices: Tensor) -> Tensor:
        """mean + deviation · noise, scaled. A fetch has chosen the flip: it reads half of the bytes for that."""
        assert self.space is not None
        means, deviations = moments.to(torch.float32).tensor_split([self.space.channels], dim=1)
        if deviations.shape[1]:  # else nothing is random in the encoding
            means = means + deviations * self.posterior.normal(indices, tuple(means.shape[1:]))
        return (means - self.space.shift_factor) * self.space.scaling_factor

    def _places(self, start: int, rows: Tensor) -> Tensor:
        """Where these images lie in the source: of latents, an image's two flips are neighbours."""
        if self.space is None or self.flips is None:
            return rows
        indices = torch.arange(start, start + len(rows), device=rows.device)
        return 2 * rows + (self.flips.bits(indices, 1)[:, 0] & 1)

    def buffers(self, size: int) -> tuple[Tensor, Tensor | None]:
        """Empty tensors on the device that a fetch of `size` images fits into."""
        pixels, condition = self.fetch(0, 1)
        room = torch.empty((size, *pixels.shape[1:]), dtype=pixels.dtype, device=self.device)
        if condition is None:
            return room, None
        return room, condition.new_empty((size, *condition.shape[1:]), device=self.device)

    def _condition(self, start: int, rows: Tensor) -> Tensor | None:
        """The labels of these images, or the context of one caption each, chosen by the position in the stream."""
        if self.labelled and self.labels is not None:
            return self.labels[rows]
        if self.text is None:
            return None
        first, count = self.captions[rows].unbind(1)
        indices = torch.arange(start, start + len(rows), device=rows.device)
        contexts = self.contexts[first + self.choices.integers(indices, count)]
        return contexts.pin_memory() if self.device.type == "cuda" and not contexts.is_cuda else contexts

    def _read(self, start: int, size: int, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        assert self.host is not None
        requested = self._ahead.take(start, size)
        if requested is None:
            requested = self.host.request(rows)
        coming = self._ahead.guess(start, size)
        next_places = self._places(coming, self._rows(coming, size))
        self._ahead.put(coming, size, self.host.request(next_places.numpy()))
        return self.host.gather(requested)

    def _rows(self, start: int, size: int) -> Tensor:
        """Which images of the store these are: each epoch has its own order, and a batch may span some."""
        parts = []
        while size:
            epoch, position = divmod(start, len(self.store))
            part = self._order(epoch)[position : position + size]
            parts.append(part)
            start, size = start + len(part), size - len(part)
        return torch.cat(parts) if len(parts) > 1 else parts[0]


def _shuffled(seed: int, count: int, place: torch.device, epoch: int) -> Tensor:
    return permutation(seed, "order", epoch, count).to(place)


def latent_space(store: Store) -> LatentSpace:
    """That of a store, or a sentence where it has none."""
    if store.manifest.latents is None:
        raise ValueError(
            f"{store.folder} has no latents, and data.space=latents asks for them; prepare it with scalelong "
            "prepare SOURCE --autoencoder NAME_OR_FOLDER, or train with data.space=pixels."
        )
    return store.manifest.latents


def _latent_rows(store: Store, flip: bool) -> np.ndarray[Any, np.dtype[np.float16]]:
    """[N, …] of the images as they are, or [2 N, …] with each followed by its flip."""
    assert store.latents is not None
    return store.latents.reshape(-1, *store.latents.shape[2:]) if flip else store.latents[:, 0]


def resident_bytes_on(device: torch.device) -> int:
    """How large a store may be that lives on a device."""
    if device.type != "cuda":
        return _RESIDENT_BYTES
    return int(_RESIDENT_SHARE * torch.cuda.get_device_properties(device).total_memory)


class _Mapped:
    """Rows of a memory-mapped array, read on a thread of its own; asked as `ShardImages` is."""

    def __init__(self, array: np.ndarray[Any, Any] | NoImages) -> None:
        self.array = array
        self._pool = ThreadPoolExecutor(1, "rows")

    def request(self, rows: np.ndarray[Any, Any]) -> list[Future[Any]]:
        """Begin to read."""
        return [self._pool.submit(self.array.__getitem__, rows)]

    def gather(self, requested: list[Future[Any]]) -> np.ndarray[Any, Any]:
        """Wait for what `request` began."""
        return requested[0].result()


class _Ahead:
    """The batch that will be asked for next, if the steps go on as they went. A wrong guess costs time alone."""

    def __init__(self) -> None:
        self.last: tuple[int, int] | None = None
        self.key: tuple[int, int] | None = None
        self.requested: list[Future[Any]] = []

    def take(self, start: int, size: int) -> list[Future[Any]] | None:
        """What was begun for this batch; anything else that was begun is given up."""
        if self.key == (start, size):
            return self.requested
        for future in self.requested:
            future.cancel()
        return None

    def guess(self, start: int, size: int) -> int:
        """As far on as the last step went: with several processes, each leaves out the others' images."""
        stride = start - self.last[0] if self.last is not None and self.last[1] == size else size
        self.last = start, size
        return start + (stride if stride > 0 else size)

    def put(self, start: int, size: int, requested: list[Future[Any]]) -> None:
        """Remember what was begun."""
        self.key, self.requested = (start, size), requested
