"""Exponential moving averages of the weights, several rates at once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from scalelong.config import TrainConfig

_MUCH = 0.05  # of an average


class EMA:
    """θ̄ ← rate · θ̄ + (1 - rate) · θ after each update; starts at the first weights, as the paper's does."""

    def __init__(self, model: nn.Module, rate: float, *, warmup: bool = False) -> None:
        self.rate = rate
        self.warmup = warmup
        self.weights = {name: p.detach().clone().float() for name, p in model.named_parameters()}

    @property
    def name(self) -> str:
        """In checkpoints."""
        return f"ema-{self.rate}"

    def weight(self, step: Tensor, keep: Tensor) -> Tensor:
        """How far update number `step` moves the average to the weights: 1 - rate, times `keep`, 1 or 0.

        With warm-up the rate starts at 1/10 and grows as (1 + step)/(10 + step).
        """
        if not self.warmup:
            return keep * (1 - self.rate)
        return keep * torch.clamp(9 / (10 + step), min=1 - self.rate)

    @contextmanager
    def applied_to(self, model: nn.Module) -> Iterator[nn.Module]:
        """The model with these weights, for as long as the block lasts."""
        with torch.no_grad():
            live = {name: p.detach().clone() for name, p in model.named_parameters()}
            try:
                for name, p in model.named_parameters():
                    p.copy_(self.weights[name])
                yield model
            finally:
                for name, p in model.named_parameters():
                    p.copy_(live[name])


def move_averages(averages: list[list[Tensor]], parameters: list[Tensor], weights: list[Tensor]) -> None:
    """θ̄ += weight · (θ - θ̄), all averages of all parameters. A weight of 0 leaves every bit as it was."""
    for average, weight in zip(averages, weights, strict=True):
        change = torch._foreach_sub(parameters, average)
        torch._foreach_mul_(change, weight)
        torch._foreach_add_(average, change)


def share_of_start(rate: float, steps: int, *, warmup: bool = False) -> float:
    """How much of an average its first weights still are after some updates."""
    if not warmup:
        return rate**steps
    # With warm-up the first ten updates leave 1e-5 of them.
    return math.prod(1 - max(9 / (10 + step), 1 - rate) for step in range(min(steps, 10)))


def of_first_weights(train: TrainConfig, rate: float | str | None, step: int) -> str:
    """What is to be said of an average (by default the one that is used) that still is much of them, if it is."""
    if rate is None:
        rate = default_rate(list(train.ema_rates), step)
    if isinstance(rate, str) or (share := share_of_start(rate, step, warmup=train.ema_warmup)) < _MUCH:
        return ""
    return f"still {share:.0%} the first weights"


def default_rate(rates: list[float], step: int) -> float:
    """The slowest average that has forgotten its start: at least 5/(1 - rate) steps; else the fastest."""
    ready = [rate for rate in rates if step >= 5 / (1 - rate)]
    return max(ready) if ready else min(rates)
