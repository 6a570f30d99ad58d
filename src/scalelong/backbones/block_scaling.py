"""Scaling of block outputs, the alternatives of Table 3: options of U-ViT's blocks, not skip scalings.

| spec | residual branch f of a block |
|---|---|
| `none` | x + f(x) |
| `stable:T` | x + T · f(x), T constant (stable ResNet; the paper tries 0.1 and 0.3) |
| `rezero` | x + α · f(x), α learned, 0 at the start, one per block |
"""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor, nn


class BranchScale(nn.Module):
    """What multiplies both residual branches of one block."""

    def __init__(self, constant: float | None) -> None:
        super().__init__()
        self.constant = constant
        if constant is None:
            self.alpha = nn.Parameter(torch.zeros(1))  # [1], not 0-d, which FSDP does not shard

    def forward(self, branch: Tensor) -> Tensor:
        """The scaled branch; a constant of exactly 1 costs nothing."""
        if self.constant is None:
            return branch * self.alpha.to(branch.dtype)
        return branch if self.constant == 1 else branch * self.constant


def branch_scale(spec: str | None) -> BranchScale:
    """Build the module that a spec names.

    >>> branch_scale("stable:0.1").constant
    0.1
    """
    if spec in ("none", None):  # `none` as a setting's value is no text
        return BranchScale(1.0)
    if spec == "rezero":
        return BranchScale(None)
    match = re.fullmatch(r"stable:(\d*\.?\d+)", str(spec), re.ASCII)
    if match and 0 < (value := float(match[1])) <= 1 and math.isfinite(value):
        return BranchScale(value)
    raise ValueError(
        f"block_scaling is 'none', 'rezero' or 'stable:T' with T in (0, 1], got {spec!r}; try 'stable:0.1'."
    )
