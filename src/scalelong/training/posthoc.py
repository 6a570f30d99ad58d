"""Averages chosen after training (Karras et al. 2024, §3): two power-function profiles are tracked and kept now and
then, and an average of any width is a weighted sum of what was kept.

After update t the average is θ̄ ← β θ̄ + (1 - β) θ with β = (1 - 1/t)^(γ+1): the weight of update τ is
p(τ) = (γ+1) τ^γ / t^(γ+1). Its width relative to t is σ_rel; larger averages over more of the training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from scalelong.training import checkpoint
from scalelong.training.ema import EMA

PROFILES = (0.05, 0.10)  # the widths that are tracked
SNAPSHOTS = "posthoc"
_MOST_MISSED = 0.1


def gamma_of(sigma_rel: float) -> float:
    """γ from σ_rel² = (γ+1) / ((γ+2)² (γ+3)), the largest real root of the cubic."""
    if not 0 < sigma_rel < 0.28:  # γ = 0, the plain mean of all updates, has 12^-½
        raise ValueError(f"the width of a post-hoc average lies between 0 and 0.28, got {sigma_rel}.")
    s = sigma_rel**-2
    roots = np.roots([1, 7, 16 - s, 12 - s])
    return float(roots.real[np.abs(roots.imag) < 1e-9].max())


class PowerEMA(EMA):
    """The average of width σ_rel of the training so far."""

    def __init__(self, model: nn.Module, sigma_rel: float) -> None:
        super().__init__(model, rate=sigma_rel)
        self.gamma = gamma_of(sigma_rel)

    @property
    def name(self) -> str:
        """In checkpoints."""
        return f"ema-power-{self.rate}"

    def weight(self, step: Tensor, keep: Tensor) -> Tensor:
        """1 - β, for update number `step` counted from 0; the first one replaces the initial weights.

        Late in training β is so near 1 that float32 would lose a percent of the difference.
        """
        beta_less_one = torch.expm1((self.gamma + 1) * torch.log1p(-1 / (step.double() + 1)))
        return keep * -beta_less_one.to(keep.dtype)


@dataclass(frozen=True)
class Profile:
    """An average as weights on the updates: of width γ, taken after update t."""

    t: float
    gamma: float

    def dot(self, other: Profile) -> float:
        """∫ p_a p_b (eq. 126 there), of profiles that end at different updates."""
        a, b = self.gamma, other.gamma
        earlier = min(self.t, other.t)
        shape = (a + 1) * (b + 1) / (a + b + 1)
        return float(shape / earlier * (earlier / self.t) ** (a + 1) * (earlier / other.t) ** (b + 1))


def combination(kept: Sequence[Profile], wanted: Profile) -> np.ndarray:
    """The weights of the kept averages whose sum is nearest to the wanted one, in the sense of ∫ (p - q)²."""
    products = np.array([[a.dot(b) for b in kept] for a in kept])
    target = np.array([a.dot(wanted) for a in kept])
    scale = np.sqrt(np.diag(products))  # late and early profiles differ by orders of magnitude
    scaled = products / scale[:, None] / scale[None, :]
    return np.linalg.lstsq(scaled, target / scale, rcond=1e-12)[0] / scale


def missed(kept: Sequence[Profile], weights: np.ndarray, wanted: Profile) -> float:
    """∫ (p - q)² / ∫ p²: how far the weighted sum q of what was kept is from the wanted profile p."""
    products = np.array([[a.dot(b) for b in kept] for a in kept])
    target = np.array([a.dot(wanted) for a in kept])
    return float(1 + (weights @ products @ weights - 2 * weights @ target) / wanted.dot(wanted))


def reconstruct(run: Path, sigma_rel: float) -> tuple[dict[str, Tensor], int]:
    """The average of width `sigma_rel` at the newest snapshot of a run, and that snapshot's step."""
    gamma_of(sigma_rel)
    folders = sorted((run / SNAPSHOTS).glob("step-*"))
    if not folders:
        raise ValueError(
            f"{run} kept no snapshots for post-hoc averages; train with --set train.posthoc_every=1000."
        )
    snapshots = [checkpoint.load(folder) for folder in folders]
    kept = [Profile(s.step, gamma_of(width)) for s in snapshots for width in PROFILES]
    wanted = Profile(snapshots[-1].step, gamma_of(sigma_rel))
    found = combination(kept, wanted)
    if (share := missed(kept, found, wanted)) > _MOST_MISSED:
        raise ValueError(
            f"the {len(snapshots)} snapshots of {run} do not make an average of width {sigma_rel}: {share:.0%} of "
            f"it would be missed. Take a width nearer to {PROFILES[0]} … {PROFILES[1]}, or train with a smaller "
            "train.posthoc_every."
        )
    weights = iter(found)
    total: dict[str, Tensor] = {}
    for snapshot in snapshots:
        for width in PROFILES:
            weight = float(next(weights))
            for name, tensor in snapshot.tensors(f"ema-power-{width}").items():
                term = tensor.to(torch.float64) * weight
                total[name] = total[name] + term if name in total else term
    return {name: tensor.float() for name, tensor in total.items()}, snapshots[-1].step
