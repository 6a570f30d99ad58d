"""Exponential moving averages of the weights, several rates at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class EMA:
    """θ̄ ← rate · θ̄ + (1 - rate) · θ after each update; starts at the first weights, as the paper's does."""

    def __init__(self, model: nn.Module, rate: float) -> None:
        self.rate = rate
        self.weights = {name: p.detach().clone().float() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """One step of the average."""
        names, parameters = zip(*model.named_parameters(), strict=True)
        averages = [self.weights[name] for name in names]
        torch._foreach_lerp_(averages, [p.detach().float() for p in parameters], 1 - self.rate)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from saved averages, matched by name."""
        for name, average in self.weights.items():
            average.copy_(tensors[name])

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


def default_rate(rates: list[float], step: int) -> float:
    """The slowest average that has forgotten its start: at least 5/(1 - rate) steps; else the fastest."""
    ready = [rate for rate in rates if step >= 5 / (1 - rate)]
    return max(ready) if ready else min(rates)
