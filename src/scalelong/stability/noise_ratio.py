"""‖ε‖²/‖x_t‖² of real images under a noise process (§4.1, Fig. 3b), and the κ it implies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from scalelong.data.loader import Loader
from scalelong.data.random import Stream
from scalelong.data.store import Store
from scalelong.diffusion.process import Process
from scalelong.stability.kappa import PAPER_RANGE, PAPER_SUMS, Bound, bound_for

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.97, 0.99)
UPPER_QUANTILE = 0.97  # of the ratio: what the paper's "rough upper bound 5" is on CIFAR-10
_BATCH = 500


@dataclass(frozen=True)
class Norms:
    """‖ε‖²/m and ‖x_t‖²/m of many images; x_t as the network sees it."""

    noise: Tensor
    noised: Tensor
    images: int | None = None  # how many different ones, where they are fewer than the draws

    @property
    def ratio(self) -> Tensor:
        """‖ε‖²/‖x_t‖²."""
        return self.noise / self.noised


def measure_norms(images: Iterator[Tensor], process: Process, count: int, seed: int = 0) -> Norms:
    """Noise each image once; the `count` times are spread evenly over the process's own distribution."""
    noises = Stream(seed, "noise ratio")
    found: list[tuple[Tensor, Tensor]] = []
    start = 0
    while start < count:
        batch = next(images)[: count - start].float()
        indices = torch.arange(start, start + len(batch))
        k = process.timesteps((indices + 0.5).double() / count)
        noise = noises.normal(indices, tuple(batch.shape[1:]))
        noised = process.scaled(process.noised(batch, noise, k), k)
        found.append((_mean_square(noise), _mean_square(noised)))
        start += len(batch)
    noise_squares, noised_squares = (torch.cat(parts) for parts in zip(*found, strict=True))
    return Norms(noise_squares, noised_squares)


def store_images(store: Store, seed: int = 0) -> Iterator[Tensor]:
    """A store's images in random order, again and again: the order says nothing about the times they get."""
    loader, start = Loader(store, seed=seed), 0
    while True:
        yield loader.batch(start, _BATCH).images
        start += _BATCH


def uniform_images(shape: tuple[int, ...], seed: int = 0) -> Iterator[Tensor]:
    """x_0 ~ U[-1, 1], the paper's stand-in for data."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield 2 * torch.rand(_BATCH, *shape, generator=generator) - 1


@dataclass(frozen=True, kw_only=True)
class RatioAdvice:
    """The distribution of the ratio, and the κ that it implies for N skips, the paper's range beside it."""

    process: str
    draws: int
    images: int  # different ones among the draws
    num_skips: int
    mean_square_norm: float  # E‖x_t‖²/m
    mean: float
    ratio_of_means: float
    share_below_5: float
    quantiles: dict[str, float]
    low: Bound
    high: Bound
    paper_low: Bound
    paper_high: Bound
    paper_range: tuple[float, float] = PAPER_RANGE

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def advise_from(norms: Norms, process: str, num_skips: int) -> RatioAdvice:
    """From the ratio of means (low) to the 97 % quantile (high), as the paper does with 1.22 and 5."""
    ratio = norms.ratio.double()
    if bad := int((~ratio.isfinite()).sum()):
        raise ValueError(f"{bad:,} of {len(ratio):,} noised images have norms that are not finite: look at them.")
    quantiles = dict(
        zip(map(str, QUANTILES), torch.quantile(ratio, torch.tensor(QUANTILES).double()).tolist(), strict=True)
    )
    ratio_of_means = (norms.noise.double().mean() / norms.noised.double().mean()).item()
    return RatioAdvice(
        process=process,
        draws=len(ratio),
        images=norms.images or len(ratio),
        num_skips=num_skips,
        mean_square_norm=norms.noised.double().mean().item(),
        mean=ratio.mean().item(),
        ratio_of_means=ratio_of_means,
        share_below_5=(ratio < 5).double().mean().item(),
        quantiles=quantiles,
        low=bound_for(ratio_of_means, num_skips),
        high=bound_for(quantiles[str(UPPER_QUANTILE)], num_skips),
        paper_low=bound_for(PAPER_SUMS[0], num_skips),
        paper_high=bound_for(PAPER_SUMS[1], num_skips),
    )


def measured(
    store: Store, process: Process, count: int, seed: int = 0, watch: Callable[[int], None] = lambda done: None
) -> Norms:
    """Over `count` draws from a store, its images again and again; `watch` is told how many are done."""

    def images() -> Iterator[Tensor]:
        for number, batch in enumerate(store_images(store, seed)):
            watch(min(count, number * _BATCH))
            yield batch

    return replace(measure_norms(images(), process, count, seed), images=min(count, len(store)))


def _mean_square(x: Tensor) -> Tensor:
    return x.double().square().flatten(1).mean(1)
