"""The loss by noise level: per-image losses, gathered in ten equal ranges of time on the device."""

from __future__ import annotations

import torch
from torch import Tensor

LEVELS = 10
NO_TIME = "a time that is no number"


class NoiseLevels:
    """Means of the losses since the last look, per range of timesteps between `low` and `high`."""

    def __init__(self, low: float, high: float) -> None:
        if not high > low:
            raise ValueError(
                f"timestep_range is (lowest, highest), got {(low, high)}; for diffusers' schedulers (0, 1000)."
            )
        self.low, self.high = low, high
        width = (high - low) / LEVELS
        self.names = [f"{low + i * width:g} to {low + (i + 1) * width:g}" for i in range(LEVELS)] + [NO_TIME]
        self.sums: Tensor | None = None

    @torch.no_grad()
    def add(self, timesteps: Tensor, losses: Tensor) -> None:
        """A batch: [B] timesteps, and losses [B] or [B, ...], which are averaged per image."""
        losses = losses.detach().float()
        if not losses.dim() or losses.shape[:1] != timesteps.shape:
            got = [" × ".join(map(str, each.shape)) or "a single number" for each in (losses, timesteps)]
            raise ValueError(
                f"losses and timesteps [B] are of the same images, got {got[0]} and {got[1]}; "
                "take the loss with reduction='none'."
            )
        each = losses.flatten(1).mean(1) if losses.dim() > 1 else losses
        share = (timesteps.float() - self.low) / (self.high - self.low) * LEVELS
        place = torch.where(share.isfinite(), share.long().clamp(0, LEVELS - 1), LEVELS)
        if self.sums is None:
            self.sums = torch.zeros(2, len(self.names), device=each.device)
        self.sums.index_add_(1, place.to(each.device), torch.stack([each, torch.ones_like(each)]))

    def take(self) -> dict[str, float]:
        """The means of the ranges that had images; starts anew."""
        if self.sums is None:
            return {}
        totals, counts = self.sums.tolist()
        self.sums = None
        rows = zip(self.names, totals, counts, strict=True)
        return {name: total / count for name, total, count in rows if count}
