import math

import torch

from scalelong.data.random import Stream, permutation


def splitmix64(x: int) -> int:
    """The finaliser in Python integers."""
    mask = (1 << 64) - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def test_bits_are_those_of_python_integers():
    stream = Stream(7, "noise")
    golden, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1
    got = stream.bits(torch.tensor([0, 1, 10**12]), 3)
    for i, index in enumerate((0, 1, 10**12)):
        row = splitmix64((index * golden + stream.key) & mask)
        want = [splitmix64((row + j * golden) & mask) for j in (1, 2, 3)]
        assert [int(b) & mask for b in got[i]] == want


def test_a_draw_depends_on_its_index_alone():
    stream = Stream(0, "noise")
    whole = stream.normal(torch.arange(20), (3, 4, 4))
    assert torch.equal(stream.normal(torch.tensor([13, 2]), (3, 4, 4)), whole[[13, 2]])
    assert not torch.equal(Stream(0, "times").normal(torch.arange(20), (3, 4, 4)), whole)
    assert not torch.equal(Stream(1, "noise").normal(torch.arange(20), (3, 4, 4)), whole)


def test_normals_have_the_moments_and_no_memory():
    x = Stream(3, "noise").normal(torch.arange(2000), (501,)).double()
    n = x.numel()
    assert abs(x.mean()) < 5 / math.sqrt(n)
    assert abs(x.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs((x**3).mean()) < 5 * math.sqrt(15 / n)
    assert abs((x**4).mean() - 3) < 5 * math.sqrt(96 / n)
    for shifted in (x[1:] * x[:-1], x[:, 1:] * x[:, :-1], x[:, 250:500] * x[:, :250]):
        assert abs(shifted.mean()) < 5 / math.sqrt(shifted.numel())
    # Kolmogorov's distance to the normal law.
    flat = x.flatten().sort().values
    cdf = 0.5 * (1 + torch.erf(flat / math.sqrt(2)))
    assert (cdf - torch.arange(1, n + 1) / n).abs().max() < 2 / math.sqrt(n)


def test_uniforms_fill_their_range_evenly():
    u = Stream(1, "times").uniform(torch.arange(100_000))
    assert u.dtype == torch.float32
    assert u.min() >= 0
    assert u.max() < 1
    counts = torch.histc(u, 50, 0, 1)
    assert ((counts - 2000) ** 2 / 2000).sum() < 90  # χ² with 49 degrees: 85 is the 99.9 % point


def test_integers_cover_their_range():
    k = Stream(1, "steps").integers(torch.arange(50_000), 10)
    counts = torch.bincount(k, minlength=10)
    assert len(counts) == 10
    assert ((counts - 5000.0) ** 2 / 5000).sum() < 30


def test_permutations_are_permutations_and_differ_by_epoch():
    first, second = (permutation(0, "order", epoch, 1000) for epoch in (0, 1))
    assert torch.equal(first.sort().values, torch.arange(1000))
    assert not torch.equal(first, second)
    assert torch.equal(first, permutation(0, "order", 0, 1000))
