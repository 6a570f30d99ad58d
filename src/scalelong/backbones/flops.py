"""How much arithmetic a network does, counted by torch on a model without memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def forward_flops(build: Any, inputs: Any) -> int:
    """Floating-point operations of one call, a multiply-add counted as two.

    `build()` makes the model and `inputs()` its arguments; both are called where tensors take no memory.
    """
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"), torch.no_grad():
        model: nn.Module = build()
        arguments = inputs()
        with FlopCounterMode(display=False) as counter:
            model(*arguments[0], **arguments[1])
    return counter.get_total_flops()


def training_flops_per_image(build: Any, channels: int, size: int | tuple[int, int], **given: Any) -> int:
    """Forward and backward of one image: three times the forward pass, as everybody counts."""
    height, width = (size, size) if isinstance(size, int) else size

    def inputs() -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        return (torch.empty(1, channels, height, width), torch.zeros(1)), {k: make() for k, make in given.items()}

    return 3 * forward_flops(build, inputs)
