"""Randomness as a function of (seed, stream name, index): nothing to save, nothing to restore.

A draw is a hash of a key and counters, in integer tensor operations, so that it is the same on every
device, in any batch and in any number of processes. The hash is the finaliser of splitmix64 (Steele et
al. 2014), applied once per counter.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_GOLDEN_INVERSE = pow(_GOLDEN, -1, 1 << 64)
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)


class Stream:
    """A named stream of random numbers: `Stream(seed, "noise").normal(indices, (3, 32, 32))`.

    `indices` [B] say which elements of the stream; each gets as many numbers as `shape` holds.
    """

    def __init__(self, seed: int, name: str) -> None:
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        self.key = int.from_bytes(digest, "little")

    def bits(self, indices: Tensor, count: int) -> Tensor:
        """[B] -> [B, count] of 64 random bits each, as int64."""
        row = _hash(indices.to(torch.int64) * _signed(_GOLDEN) + _signed(self.key))
        column = torch.arange(1, count + 1, device=indices.device)
        # row + column·GOLDEN, but the compiler takes column·GOLDEN alone for an index and refuses its size.
        return _hash((row[:, None] * _signed(_GOLDEN_INVERSE) + column) * _signed(_GOLDEN))

    def uniform(self, indices: Tensor, shape: tuple[int, ...] = ()) -> Tensor:
        """[B] -> [B, *shape] in [0, 1), float32, a multiple of 2^-24 each."""
        high = _logical_shift(self.bits(indices, math.prod(shape)), 40)
        return (high.to(torch.float32) * 2.0**-24).view(-1, *shape)

    def integers(self, indices: Tensor, bound: int | Tensor) -> Tensor:
        """[B] -> [B] in 0 … bound - 1, int64, for one bound or one each. The bias of at most bound / 2^53 is
        beyond notice.
        """
        high = _logical_shift(self.bits(indices, 1)[:, 0], 11)
        return (high.to(torch.float64) * 2.0**-53 * bound).to(torch.int64)

    def normal(self, indices: Tensor, shape: tuple[int, ...]) -> Tensor:
        """[B] -> [B, *shape] standard normal, float32, by Box and Muller: two from each 64 bits."""
        count = math.prod(shape)
        bits = self.bits(indices, -(-count // 2))
        radius = (-2 * ((_logical_shift(bits, 32).to(torch.float32) + 0.5) * 2.0**-32).log()).sqrt()
        angle = (bits & 0xFFFFFFFF).to(torch.float32) * (2 * math.pi * 2.0**-32)
        pairs = torch.cat([radius * angle.cos(), radius * angle.sin()], dim=1)
        return pairs[:, :count].reshape(-1, *shape)


def permutation(seed: int, name: str, epoch: int, size: int) -> Tensor:
    """The order of `size` elements in an epoch: [size], int64. Sorting random bits makes it uniform."""
    bits = Stream(seed, f"{name}/epoch {epoch}").bits(torch.arange(size), 1)[:, 0]
    return bits.argsort(stable=True)


def _hash(x: Tensor) -> Tensor:
    x = (x ^ _logical_shift(x, _SHIFTS[0])) * _signed(_MULTIPLIERS[0])
    x = (x ^ _logical_shift(x, _SHIFTS[1])) * _signed(_MULTIPLIERS[1])
    return x ^ _logical_shift(x, _SHIFTS[2])


def _logical_shift(x: Tensor, bits: int) -> Tensor:
    """torch has no unsigned shift: drop the copies of the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    """A 64-bit pattern as the int64 with the same bits."""
    x &= _MASK
    return x - (1 << 64) if x >> 63 else x
