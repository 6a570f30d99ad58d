"""The network of Eq. 3, in plain torch: what the theorems of §3 speak about.

    f_i(x) = b_(i+1) · [ κ_(i+1) · a_(i+1) x + f_(i+1)(a_(i+1) x) ],   UNet = f_0,   f_N the middle block

A block is W_l φ( … φ(W_1 x)) with φ = ReLU and Kaiming's N(0, 2/m). As no ReLU stands before W_1, such a block
doubles the mean square; `block_gain` is that factor: W_1 ~ N(0, block_gain/m). 2 is Eq. 3 as written, 1 keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

AS_WRITTEN, NORM_PRESERVING = 2.0, 1.0


class LongSkipNet(nn.Module):
    """Vectors of width m through N encoder blocks, a middle and N decoder blocks. Skip 0 is the outermost."""

    def __init__(
        self,
        num_skips: int = 6,
        *,
        width: int = 256,
        layers: int = 2,
        block_gain: float = AS_WRITTEN,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def block() -> Block:
            return Block(width, layers, block_gain, generator, dtype)

        self.encoder = nn.ModuleList(block() for _ in range(num_skips))
        self.middle = block()
        self.decoder = nn.ModuleList(block() for _ in range(num_skips))

    def forward(self, x: Tensor, kappas: Sequence[float]) -> Tensor:
        """[B, m] -> [B, m], with one coefficient per skip."""
        return self.hidden(x, kappas)[0]

    def hidden(self, x: Tensor, kappas: Sequence[float]) -> list[Tensor]:
        """The output of every decoder block: entry i is h_i of Thm 3.1, which reads the skips j ≥ i."""
        skips = []
        for encode in self.encoder:
            x = encode(x)
            skips.append(x)
        h = self.middle(x)
        found = []
        for skip, kappa, decode in list(zip(skips, kappas, self.decoder, strict=True))[::-1]:
            h = decode(kappa * skip + h)
            found.append(h)
        return found[::-1]


class Block(nn.Sequential):
    """W_l φ( … φ(W_1 x)); ‖output‖² is block_gain · ‖x‖² in expectation, for any x."""

    def __init__(
        self, width: int, layers: int, block_gain: float, generator: torch.Generator, dtype: torch.dtype
    ) -> None:
        parts: list[nn.Module] = []
        for layer in range(layers):
            linear = nn.Linear(width, width, bias=False, dtype=dtype)
            variance = (2 if layer else block_gain) / width
            nn.init.normal_(linear.weight, std=variance**0.5, generator=generator)
            parts += [linear] if layer == 0 else [nn.ReLU(), linear]
        super().__init__(*parts)
