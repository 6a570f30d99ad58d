"""What a network may learn to predict: y = p x_0 + q ε. With x_t = α x_0 + σ ε each target gives all others.

| target | p | q | pσ - qα |
|---|---|---|---|
| `epsilon` | 0 | 1 | -α |
| `x0` | 1 | 0 | σ |
| `v` | -σ | α | -(α² + σ²) |
| `velocity` | -1 | 1 | -(α + σ) |
| `edm` | σ/(σ_d r) | -α σ_d/r | r/σ_d, where r² = σ² + α² σ_d² |

The last column is the determinant of (y, x_t) as functions of (x_0, ε). Where it vanishes (`epsilon` at α = 0,
`x0` at σ = 0) the prediction says nothing about the other part, which is then taken as 0, the mean of noise and the
middle of the images' range.
"""

from __future__ import annotations

import torch
from torch import Tensor

TARGETS = ("epsilon", "x0", "v", "velocity", "edm")
SIGMA_DATA = 0.5  # the spread of pixels in [-1, 1] that EDM assumes
_SINGULAR = 1e-9


def coefficients(target: str, alpha: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """p and q of the table above.

    `edm` is the F of x_0 = c_skip x + c_out F with x = x_t/α and EDM's c_skip = σ_d²/(ρ² + σ_d²),
    c_out = ρ σ_d/√(ρ² + σ_d²) at ρ = σ/α (Karras et al. 2022, Table 1).
    """
    zero, one = torch.zeros_like(alpha), torch.ones_like(alpha)
    if target == "epsilon":
        return zero, one
    if target == "x0":
        return one, zero
    if target == "v":
        return -sigma, alpha
    if target == "velocity":
        return -one, one
    if target == "edm":
        r = (sigma**2 + (alpha * SIGMA_DATA) ** 2).sqrt()
        return sigma / (SIGMA_DATA * r), -alpha * SIGMA_DATA / r
    raise ValueError(f"unknown target {target!r}; the known ones are {', '.join(TARGETS)}.")


def determinant(target: str, alpha: Tensor, sigma: Tensor) -> Tensor:
    """pσ - qα. At a fixed x_t an error of x_0 becomes one of the target, (pσ - qα)/σ times as large."""
    p, q = coefficients(target, alpha, sigma)
    return p * sigma - q * alpha


def target_from(target: str, images: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
    """y = p x_0 + q ε. Here and below α and σ are one number each, or one per image: [B]."""
    if target == "epsilon":
        return noise
    if target == "x0":
        return images
    p, q = (per_image(c, images) for c in coefficients(target, alpha, sigma))
    return p * images + q * noise


def images_from(target: str, prediction: Tensor, noised: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
    """x_0 = (σ y - q x_t)/(pσ - qα)."""
    if target == "x0":
        return prediction
    _, q = coefficients(target, alpha, sigma)
    return _combined(sigma, prediction, -q, noised, determinant(target, alpha, sigma))


def noise_from(target: str, prediction: Tensor, noised: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
    """ε = (p x_t - α y)/(pσ - qα)."""
    if target == "epsilon":
        return prediction
    p, _ = coefficients(target, alpha, sigma)
    return _combined(p, noised, -alpha, prediction, determinant(target, alpha, sigma))


def converted(prediction: Tensor, target: str, to: str, noised: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
    """The prediction of one target as one of another."""
    images = images_from(target, prediction, noised, alpha, sigma)
    noise = noise_from(target, prediction, noised, alpha, sigma)
    return target_from(to, images, noise, alpha, sigma)


def _combined(a: Tensor, x: Tensor, b: Tensor, y: Tensor, divisor: Tensor) -> Tensor:
    """(a x + b y)/divisor, and 0 where the divisor vanishes."""
    determined = divisor.abs() > _SINGULAR
    inverse = torch.where(determined, 1 / torch.where(determined, divisor, 1), 0)
    return per_image(a * inverse, x) * x + per_image(b * inverse, y) * y


def per_image(coefficient: Tensor, images: Tensor) -> Tensor:
    """A number, or [B] -> [B, 1, 1, 1], to multiply images with, in their precision."""
    return coefficient.to(images.dtype).reshape(-1, *[1] * (images.ndim - 1))
