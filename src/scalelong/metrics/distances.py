"""Distances between two sets of feature vectors: FID, KID, and improved precision and recall."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """Mean [D] and covariance [D, D] of features, in float64, with how many they were taken from."""

    count: int
    mean: Tensor
    covariance: Tensor

    @classmethod
    def of(cls, features: Tensor) -> Moments:
        """Of one set [N, D]; N - 1 in the denominator, as everybody's FID has it."""
        features = features.double()
        mean = features.mean(0)
        centred = features - mean
        return cls(len(features), mean, centred.T @ centred / max(1, len(features) - 1))

    def to(self, device: torch.device) -> Moments:
        """The same on another device."""
        return Moments(self.count, self.mean.to(device), self.covariance.to(device))

    def __add__(self, other: Moments) -> Moments:
        """Of both sets together (Chan et al.): a stream of any length in batches."""
        count = self.count + other.count
        shift = other.mean - self.mean
        scatter = (
            self.covariance * (self.count - 1)
            + other.covariance * (other.count - 1)
            + torch.outer(shift, shift) * self.count * other.count / count
        )
        return Moments(count, self.mean + shift * other.count / count, scatter / (count - 1))


def frechet_distance(a: Moments, b: Moments, of_b: Tensor | None = None) -> float:
    """‖μ_a - μ_b‖² + tr(C_a + C_b - 2 (C_a C_b)^½): FID on Inception features.

    tr (C_a C_b)^½ is the sum of the square roots of the eigenvalues of A^½ B A^½, which is symmetric. `of_b` [N, D]
    is what `b` was taken from, if at hand: where N < D, they are, but for zeros, those of an N×N matrix.
    """
    if of_b is not None and len(of_b) < b.mean.numel():
        centred = of_b.double() - b.mean
        product = centred @ a.covariance @ centred.T / max(1, len(of_b) - 1)
    else:
        root = _square_root(a.covariance)
        product = root @ b.covariance @ root
    eigenvalues = torch.linalg.eigvalsh(product).clamp(min=0)
    mean = (a.mean - b.mean).square().sum()
    return float(mean + a.covariance.trace() + b.covariance.trace() - 2 * eigenvalues.sqrt().sum())


def _square_root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.clamp(min=0).sqrt() @ vectors.T


def kernel_distance(
    a: Tensor, b: Tensor, *, subsets: int = 100, size: int = 1000, seed: int = 0
) -> tuple[float, float | None]:
    """KID (Bińkowski et al. 2018): unbiased MMD² with the kernel (x·y/D + 1)³, mean and deviation over subsets.

    Where a subset would be all there is, they do not differ: one is taken, and there is no deviation.
    """
    size = min(size, len(a), len(b))
    if size == len(a) == len(b):
        return _mmd2(a.double(), b.double()).item(), None
    generator = torch.Generator().manual_seed(seed)
    values = []
    for _ in range(subsets):
        x = a[torch.randperm(len(a), generator=generator)[:size]].double()
        y = b[torch.randperm(len(b), generator=generator)[:size]].double()
        values.append(_mmd2(x, y))
    result = torch.stack(values)
    return result.mean().item(), result.std(correction=0).item()


def _mmd2(x: Tensor, y: Tensor) -> Tensor:
    n, dim = x.shape

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b.T / dim + 1) ** 3

    xx, yy, xy = kernel(x, x), kernel(y, y), kernel(x, y)
    within = (xx.sum() - xx.trace() + yy.sum() - yy.trace()) / (n * (n - 1))
    return within - 2 * xy.mean()


def precision_recall(real: Tensor, fake: Tensor, *, k: int = 3, chunk: int = 2048) -> tuple[float, float]:
    """The share of fakes inside the real manifold, and of reals inside the fakes' (Kynkäänniemi et al. 2019).

    A manifold is the union of balls around its points, each reaching to the k-th neighbour.
    """
    return _covered(fake, real, k, chunk), _covered(real, fake, k, chunk)


def _covered(points: Tensor, manifold: Tensor, k: int, chunk: int) -> float:
    radii = torch.cat([torch.cdist(part, manifold).kthvalue(k + 1).values for part in manifold.split(chunk)])
    inside = [(torch.cdist(part, manifold) <= radii).any(1) for part in points.split(chunk)]
    return torch.cat(inside).double().mean().item()
