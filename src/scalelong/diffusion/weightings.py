"""How much an error counts at each noise level: a weight on the squared error of x_0, by SNR = α²/σ².

| weighting | on x_0 | on ε | on v (α² + σ² = 1) | |
|---|---|---|---|---|
| `plain` | – | – | – | 1 on the trained target: the paper's |
| `min-snr:5` | min(SNR, γ) | min(SNR, γ)/SNR | min(SNR, γ)/(SNR + 1) | Hang et al. 2023 |
| `p2:1` | SNR/(1 + SNR)^γ | 1/(1 + SNR)^γ | SNR/(1 + SNR)^(γ+1) | Choi et al. 2022, k = 1 |
| `edm` | SNR + 1/σ_d² | 1 + 1/(σ_d² SNR) | (SNR + 1/σ_d²)/(SNR + 1) | Karras et al. 2022, Table 1 |
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from scalelong.diffusion.targets import SIGMA_DATA, determinant

WEIGHTINGS = ("plain", "min-snr", "p2", "edm")
_DEFAULT_GAMMA = {"min-snr": 5.0, "p2": 1.0}
_LEAST = 1e-6  # of α and σ: keeps the SNR finite at the ends, where the ratios below have finite limits


@dataclass(frozen=True)
class Weighting:
    """A weighting by name; `gamma` stays 0 for those that have none."""

    name: str = "plain"
    gamma: float = 0.0

    def __str__(self) -> str:
        return f"{self.name}:{self.gamma:g}" if self.gamma else self.name


def parse_weighting(text: str) -> Weighting:
    """`plain`, `edm`, `min-snr`, `min-snr:5`, `p2`, `p2:0.5`."""
    name, colon, number = text.partition(":")
    if name not in WEIGHTINGS:
        raise ValueError(f"unknown weighting {text!r}; the known ones are plain, min-snr:5, p2:1 and edm.")
    default = _DEFAULT_GAMMA.get(name, 0.0)
    if not colon:
        return Weighting(name, default)
    if not default:
        raise ValueError(f"the weighting {name!r} takes no number, got {text!r}; leave it out.")
    try:
        gamma = float(number)
    except ValueError:
        gamma = math.nan
    if not 0 < gamma < math.inf:
        raise ValueError(f"the number of {name!r} is positive, such as {name}:{default:g}; got {text!r}.")
    return Weighting(name, gamma)


def weight_on_images(weighting: Weighting, snr: Tensor) -> Tensor:
    """The weight on ‖x̂_0 - x_0‖²: the second column of the table."""
    if weighting.name == "min-snr":
        return snr.clamp(max=weighting.gamma)
    if weighting.name == "p2":
        return snr / (1 + snr) ** weighting.gamma
    if weighting.name == "edm":
        return snr + 1 / SIGMA_DATA**2
    raise ValueError(f"the weighting {str(weighting)!r} is a weight on the trained target, not on x_0.")


def weight_on_target(weighting: Weighting, target: str, alpha: Tensor, sigma: Tensor) -> Tensor | None:
    """The weight on ‖ŷ - y‖² that amounts to the same, as ŷ - y = (pσ - qα)/σ · (x̂_0 - x_0). None: 1 everywhere."""
    if weighting.name == "plain":
        return None
    alpha, sigma = alpha.clamp(min=_LEAST), sigma.clamp(min=_LEAST)
    ratio = sigma / determinant(target, alpha, sigma)
    return weight_on_images(weighting, (alpha / sigma) ** 2) * ratio**2
