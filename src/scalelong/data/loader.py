"""Batches as a pure function of (seed, index in the stream): resume and process counts change nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from scalelong.data.random import Stream, permutation
from scalelong.data.store import Store


@dataclass(frozen=True)
class Batch:
    """`indices` are positions in the endless stream; noise and times are drawn by them too."""

    images: Tensor  # [B, C, H, W] in [-1, 1]
    labels: Tensor | None  # [B]; the class, or num_classes for a dropped label
    indices: Tensor  # [B]


class Loader:
    """The endless, reshuffled stream of a store's images, flips included.

    A store of up to `resident_bytes` lives on the device; a larger one is read through its memory map.
    """

    def __init__(
        self,
        store: Store,
        *,
        seed: int,
        device: torch.device | str = "cpu",
        flip: bool = False,
        label_dropout: float | None = None,
        resident_bytes: int = 8 << 30,
    ) -> None:
        if label_dropout is not None and store.labels is None:
            raise ValueError(
                f"class labels were asked for and {store.folder} has none; prepare it from class subfolders, "
                "or train without data.condition=class."
            )
        self.store = store
        self.seed = seed
        self.device = torch.device(device)
        self.label_dropout = label_dropout
        self.flips = Stream(seed, "flip") if flip else None
        self.drops = Stream(seed, "label dropout") if label_dropout else None
        self.resident = None
        if store.images.nbytes <= resident_bytes:
            self.resident = torch.from_numpy(np.array(store.images)).to(self.device)
        self.labels = None if store.labels is None else torch.from_numpy(store.labels).to(self.device)
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def batch(self, start: int, size: int) -> Batch:
        """Images `start` … `start + size - 1` of the stream."""
        indices = torch.arange(start, start + size)
        rows = self._rows(indices)
        indices = indices.to(self.device)
        pixels = self._pixels(rows).permute(0, 3, 1, 2).to(torch.float32) / 127.5 - 1
        if self.flips is not None:
            flipped = (self.flips.bits(indices, 1)[:, 0] & 1).bool()
            pixels = torch.where(flipped[:, None, None, None], pixels.flip(3), pixels)
        return Batch(pixels.contiguous(), self._labels(rows, indices), indices)

    def _rows(self, indices: Tensor) -> Tensor:
        """Which images of the store these are: each epoch has its own order, and a batch may span two."""
        epochs, positions = indices // len(self.store), indices % len(self.store)
        parts = [self._order(int(epoch))[positions[epochs == epoch]] for epoch in epochs.unique()]
        return torch.cat(parts)

    def _shuffled(self, epoch: int) -> Tensor:
        return permutation(self.seed, "order", epoch, len(self.store))

    def _pixels(self, rows: Tensor) -> Tensor:
        if self.resident is not None:
            return self.resident[rows.to(self.device)]
        return torch.from_numpy(self.store.images[rows.numpy()]).to(self.device)

    def _labels(self, rows: Tensor, indices: Tensor) -> Tensor | None:
        if self.label_dropout is None or self.labels is None:
            return None
        labels = self.labels[rows.to(self.device)]
        if self.drops is None:
            return labels
        dropped = self.drops.uniform(indices) < self.label_dropout
        return torch.where(dropped, self.store.num_classes, labels)
