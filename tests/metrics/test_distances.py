import math

import pytest
import torch

from scalelong.metrics.distances import Moments, frechet_distance, kernel_distance, precision_recall


def features(n, dim, seed, scale=1.0, shift=0.0):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(dim, dim, generator=generator, dtype=torch.float64) / math.sqrt(dim)
    return (torch.randn(n, dim, generator=generator, dtype=torch.float64) @ mix) * scale + shift


@pytest.mark.parametrize(("n", "dim"), [(500, 20), (300, 64), (30, 64)])
def test_the_frechet_distance_is_scipys(n, dim):
    import numpy as np
    from scipy.linalg import sqrtm

    a, b = features(n, dim, 0), features(n, dim, 1, scale=1.3, shift=0.2)
    ca, cb = np.cov(a.numpy().T), np.cov(b.numpy().T)
    if n < dim:  # singular covariances: the usual offset, for scipy's sake
        ca, cb = (c + 1e-9 * np.eye(dim) for c in (ca, cb))
    root = sqrtm(ca @ cb)
    want = ((a.mean(0) - b.mean(0)) ** 2).sum().item() + np.trace(ca + cb - 2 * root.real)
    got = frechet_distance(Moments.of(a), Moments.of(b))
    assert got == pytest.approx(want, rel=1e-6 if n > dim else 1e-3)


def test_normal_laws_have_a_closed_form():
    # Diagonal covariances: Σ (σ_a - σ_b)² + ‖μ_a - μ_b‖².
    sigma_a, sigma_b = torch.tensor([1.0, 2.0, 0.5]).double(), torch.tensor([2.0, 2.0, 0.1]).double()
    a = Moments(10, torch.zeros(3).double(), torch.diag(sigma_a**2))
    b = Moments(10, torch.ones(3).double(), torch.diag(sigma_b**2))
    assert frechet_distance(a, b) == pytest.approx(3 + ((sigma_a - sigma_b) ** 2).sum().item())
    assert abs(frechet_distance(a, a)) < 1e-12


def test_moments_of_a_stream_are_those_of_the_whole():
    x = features(1000, 8, 3, shift=5.0)
    parts = x.split(333)  # the last one is a single vector
    stream = sum((Moments.of(part) for part in parts[1:]), Moments.of(parts[0]))
    whole = Moments.of(x)
    assert stream.count == whole.count
    torch.testing.assert_close(stream.mean, whole.mean)
    torch.testing.assert_close(stream.covariance, whole.covariance)
    torch.testing.assert_close(whole.covariance, torch.cov(x.T))


def test_few_samples_give_the_same_distance_by_a_smaller_matrix():
    generator = torch.Generator().manual_seed(0)
    data, few = (torch.randn(n, 40, generator=generator, dtype=torch.float64) for n in (200, 12))
    a, b = Moments.of(data), Moments.of(1.5 * few + 0.3)
    roots = torch.linalg.eigvals(a.covariance @ b.covariance).real.clamp(min=0).sqrt().sum()
    want = (a.mean - b.mean).square().sum() + a.covariance.trace() + b.covariance.trace() - 2 * roots
    assert frechet_distance(a, b, 1.5 * few + 0.3) == pytest.approx(want.item(), rel=1e-6)
    assert frechet_distance(a, b) == pytest.approx(want.item(), rel=1e-6)


def test_kid_is_unbiased_and_grows_with_distance():
    dim = 16
    generator = torch.Generator().manual_seed(0)
    x, y, far = (torch.randn(3000, dim, generator=generator) + s for s in (0, 0, 0.5))
    same, spread = kernel_distance(x, y, subsets=50)
    assert abs(same) < 3 * spread / math.sqrt(50) + 3e-3
    assert kernel_distance(x, far, subsets=50)[0] > 0.05
    # Against the definition, by hand, on one small set.
    a, b = x[:5].double(), far[:5].double()

    def k(u, v):
        return (float(u @ v) / dim + 1) ** 3

    pairs = [(i, j) for i in range(5) for j in range(5)]
    want = (
        sum(k(a[i], a[j]) + k(b[i], b[j]) for i, j in pairs if i != j) / 20
        - 2 * sum(k(a[i], b[j]) for i, j in pairs) / 25
    )
    assert kernel_distance(x[:5], far[:5], subsets=1, size=5) == (pytest.approx(want), None)


def test_kid_has_no_deviation_where_every_subset_is_all_there_is():
    x, y = torch.randn(2, 40, 8, generator=torch.Generator().manual_seed(0))
    assert kernel_distance(x, y)[1] is None
    assert kernel_distance(x, y[:30])[1] > 0  # of the larger side subsets differ


def test_precision_and_recall_see_lost_modes_and_bad_samples():
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(400, 2, generator=generator), torch.randn(400, 2, generator=generator) + 20
    both = torch.cat([left, right])
    again = torch.cat([torch.randn(400, 2, generator=generator), torch.randn(400, 2, generator=generator) + 20])
    precision, recall = precision_recall(both, again, chunk=123)
    assert min(precision, recall) > 0.9
    precision, recall = precision_recall(both, again[:400])  # a mode is lost
    assert precision > 0.9
    assert 0.4 < recall < 0.6
    bad = torch.cat([again[:400], torch.randn(400, 2, generator=generator) + 100])
    precision, recall = precision_recall(left, bad)
    assert 0.4 < precision < 0.6
    assert recall > 0.9
