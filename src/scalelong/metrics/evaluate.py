"""Samples against data: FID, KID, precision and recall, with the protocol that they were measured by."""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scalelong.data.random import permutation
from scalelong.data.store import Store
from scalelong.metrics.distances import Moments, frechet_distance, kernel_distance, precision_recall
from scalelong.metrics.features import Features
from scalelong.world import World

NEIGHBOURS = 3
Progress = Callable[[Iterable[Any], int], Iterable[Any]]  # some items and their number, to the same items, watched
_NEIGHBOURS_FROM = 10_000  # precision and recall compare all pairs: enough images, not all


@dataclass(frozen=True)
class Reference:
    """Features of a dataset: moments over all of it, and the features of some of its images."""

    moments: Moments
    features: Tensor

    def to(self, device: torch.device) -> Reference:
        """The same on another device: the distances are worked out where the samples' features are."""
        return Reference(self.moments.to(device), self.features.to(device))


@dataclass(frozen=True)
class Quality:
    """Distances with the protocol beside them."""

    fid: float
    kid: float
    kid_deviation: float | None  # over subsets; None where all of both sides make one
    precision: float
    recall: float
    protocol: str
    caution: str = ""  # what keeps the distance from being quoted, if anything does

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {key: value for key, value in asdict(self).items() if key != "caution" or value}


def reference_of(
    store: Store,
    features: Features,
    cache: Path | None = None,
    batch: int = 250,
    progress: Progress = lambda items, count: items,
) -> Reference:
    """The data's side, computed once per store and kind of features, and kept under the store's checksum."""
    file = cache and reference_file(store, features.name, cache)
    if file is not None and file.is_file() and (kept := _read(file)).moments.covariance.isfinite().all():
        return kept
    starts = range(0, len(store), batch)
    parts = (images_of(store, start, batch) for start in progress(starts, len(starts)))
    reference = _collect((features(images) for images in parts), chosen_of(len(store)))
    if file is not None:
        try:
            _write(file, reference)
        except OSError as error:
            warnings.warn(f"the statistics of the data are not kept for the next time: {error}.", stacklevel=2)
    return reference


def statistics_folder() -> Path:
    """The user's cache of references."""
    return Path("~/.cache/scalelong/statistics").expanduser()


def reference_file(store: Store, features: str, cache: Path) -> Path:
    """Where the reference of this data under features of this name is kept."""
    key = hashlib.sha256(f"{store.checksum}/{features}/chosen at random".encode()).hexdigest()[:32]
    return cache / f"{key}.safetensors"


def chosen_of(images: int) -> Tensor:
    """[images], true for those whose features are kept: at random, as data may be sorted by class."""
    chosen = torch.zeros(images, dtype=torch.bool)
    chosen[permutation(0, "reference", 0, images)[:_NEIGHBOURS_FROM]] = True
    return chosen


def protocol_of(features: str, num_samples: int, num_images: int, how_sampled: str) -> str:
    """What a number has to be quoted with."""
    return (
        f"{features}; {num_samples} samples ({how_sampled}) against all {num_images} images of the data; KID over "
        f"100 subsets of up to 1000; precision and recall with k = {NEIGHBOURS} on up to {_NEIGHBOURS_FROM} of each"
    )


def quality_of(
    samples: Iterable[Tensor],
    reference: Reference,
    features: Features,
    how_sampled: str,
    world: World | None = None,
    watch: Callable[[str], None] = lambda distance: None,
) -> Quality:
    """Compare batches of samples, [B, C, H, W] in [-1, 1], with a reference. `watch` is told the next distance.

    Where several processes each draw their share, one after the other's, all get the figures of the whole.
    """
    fake = _of_all(_collect(features(images) for images in samples), world or World())
    reference = reference.to(fake.features.device)
    for name, side in (("samples", fake), ("images in the data", reference)):
        if len(side.features) <= NEIGHBOURS:
            raise ValueError(f"precision and recall need more than {NEIGHBOURS} {name}, got {len(side.features)}.")
    watch("KID")
    kid, deviation = kernel_distance(reference.features, fake.features)
    watch("precision and recall")
    precision, recall = precision_recall(reference.features, fake.features, k=NEIGHBOURS)
    watch("Fréchet distance")
    of_all = fake.features if len(fake.features) == fake.moments.count else None
    fid = frechet_distance(reference.moments, fake.moments, of_all)
    protocol = protocol_of(features.name, fake.moments.count, reference.moments.count, how_sampled)
    caution = caution_of(fake.moments.count, fake.moments.mean.numel())
    return Quality(fid, kid, deviation, precision, recall, protocol, caution)


def caution_of(num_samples: int, dimension: int) -> str:
    """A covariance of no more samples than it has rows is singular: the distance is then mostly their number's."""
    if num_samples > dimension:
        return ""
    return (
        f"{num_samples:,} samples are few for features of {dimension:,} numbers: the Fréchet distance is biased "
        f"upwards and compares with nothing but the same number of samples; --num above {dimension:,} mends it."
    )


def _of_all(part: Reference, world: World) -> Reference:
    """The parts of all processes together, in their order."""
    counts = world.gather(torch.tensor([part.moments.count], device=part.features.device))
    means, covariances = world.gather(part.moments.mean), world.gather(part.moments.covariance)
    parts = [Moments(int(n), mean, c) for n, mean, c in zip(counts, means, covariances, strict=True)]
    features = torch.cat(world.gather(part.features))[:_NEIGHBOURS_FROM]
    return Reference(functools.reduce(Moments.__add__, parts), features)


def _collect(batches: Iterable[Tensor], chosen: Tensor | None = None) -> Reference:
    """Moments of all, and the features of the `chosen` ones, or of the first."""
    moments, kept, count = None, [], 0
    for features in batches:
        if not features.isfinite().all():  # in a distance one of them would be hidden, or end in linear algebra
            bad = int((~features.isfinite()).any(1).sum())
            raise FloatingPointError(
                f"the features of {bad} of {len(features)} images, from number {count}, are not finite, so that no "
                "distance can be told; look at these images."
            )
        part = Moments.of(features)
        moments = part if moments is None else moments + part
        if chosen is not None:
            kept.append(features[chosen[count : count + len(features)].to(features.device)])
        elif count < _NEIGHBOURS_FROM:
            kept.append(features[: _NEIGHBOURS_FROM - count])
        count += len(features)
    if moments is None:
        raise ValueError("there are no images to compare.")
    return Reference(moments, torch.cat(kept))


def images_of(store: Store, start: int, size: int) -> Tensor:
    """Some of a dataset's images as samples come: [size, C, H, W] in [-1, 1]."""
    pixels = torch.from_numpy(np.array(store.images[start : start + size]))
    return pixels.permute(0, 3, 1, 2).float() / 127.5 - 1


def _write(file: Path, reference: Reference) -> None:
    from safetensors.torch import save_file

    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    tensors = {
        "mean": reference.moments.mean,
        "covariance": reference.moments.covariance,
        "count": torch.tensor(reference.moments.count),
        "features": reference.features,
    }
    try:
        save_file({key: t.cpu().contiguous() for key, t in tensors.items()}, partial)
        partial.rename(file)
    finally:
        partial.unlink(missing_ok=True)


def _read(file: Path) -> Reference:
    from safetensors.torch import load_file

    found = load_file(file)
    return Reference(Moments(int(found["count"]), found["mean"], found["covariance"]), found["features"])
