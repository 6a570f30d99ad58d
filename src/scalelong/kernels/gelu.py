"""gelu(x + bias), with the bias' gradient taken in the same pass backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalelong.kernels.support import is_plain_linear, kernels_run_on


def linear_gelu(x: Tensor, layer: nn.Module) -> Tensor:
    """gelu(layer(x)). A plain linear layer's bias is added together with the activation."""
    if not is_plain_linear(layer):
        return F.gelu(layer(x))
    if not kernels_run_on(x) and not (x.is_cuda and torch.is_autocast_enabled("cuda")):
        return F.gelu(layer(x))
    return bias_gelu(F.linear(x, layer.weight), layer.bias)


def bias_gelu(hidden: Tensor, bias: Tensor) -> Tensor:
    """[…, C] and [C] -> […, C]."""
    if kernels_run_on(hidden) and hidden.shape[-1] % 256 == 0:
        return _activate(hidden, bias)
    return F.gelu(hidden + bias.to(hidden.dtype))


@torch.library.custom_op("scalelong::bias_gelu", mutates_args=(), schema="(Tensor hidden, Tensor bias) -> Tensor")
def _activate(hidden: Tensor, bias: Tensor) -> Tensor:
    from scalelong.kernels import gelu_triton

    hidden = hidden.contiguous()
    out = torch.empty_like(hidden)
    block = 2048
    gelu_triton.bias_gelu_forward[(-(-hidden.numel() // block),)](
        hidden, bias, out, hidden.numel(), COLUMNS=hidden.shape[-1], BLOCK=block
    )
    return out


@_activate.register_fake
def _(hidden: Tensor, bias: Tensor) -> Tensor:
    return hidden.new_empty(hidden.shape)


@torch.library.custom_op(
    "scalelong::bias_gelu_backward",
    mutates_args=(),
    schema="(Tensor hidden, Tensor bias, Tensor grad) -> (Tensor, Tensor)",
)
def _activate_backward(hidden: Tensor, bias: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    from scalelong.kernels import gelu_triton

    hidden = hidden.contiguous()
    columns = hidden.shape[-1]
    rows = hidden.numel() // columns
    d_hidden = torch.empty_like(hidden)
    block_rows, repeat, block_columns = 64, 2, 64
    programs = -(-rows // (block_rows * repeat))
    partial = torch.empty((programs, columns), dtype=torch.float32, device=hidden.device)
    gelu_triton.bias_gelu_backward[(programs, columns // block_columns)](
        hidden, bias, grad.contiguous(), d_hidden, partial, rows,
        COLUMNS=columns, BC=block_columns, BR=block_rows, REPEAT=repeat,
    )  # fmt: skip
    return d_hidden, partial.sum(0).to(bias.dtype)


@_activate_backward.register_fake
def _(hidden: Tensor, bias: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(hidden.shape), torch.empty_like(bias)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, grad):  # type: ignore[no-untyped-def]
    return _activate_backward(*ctx.saved_tensors, grad)


torch.library.register_autograd("scalelong::bias_gelu", _differentiate, setup_context=_save)
