"""gelu(x + bias), with the bias' gradient taken in the same pass backward."""

from __future__ import annotations

import math
import operator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalelong.kernels.checking import agrees, largest_error
from scalelong.kernels.support import is_plain, kernels_run_on

# How the kernels are launched: numbers a program; backward, its columns, its rows and how often it takes as many.
FORWARD = {"BLOCK": 1024, "num_warps": 4}
BACKWARD = {"BC": 64, "BR": 64, "REPEAT": 2, "num_warps": 4}
SUMS = {"BC": 16, "BR": 64, "num_warps": 4}


def linear_gelu(x: Tensor, layer: nn.Module) -> Tensor:
    """gelu(layer(x)). A plain linear layer's bias is added together with the activation."""
    if not is_plain(layer, nn.Linear):
        return F.gelu(layer(x))
    if not kernels_run_on(x) and not (x.is_cuda and torch.is_autocast_enabled("cuda")):
        return F.gelu(layer(x))
    return bias_gelu(F.linear(x, layer.weight), layer.bias)


def bias_gelu(hidden: Tensor, bias: Tensor) -> Tensor:
    """[…, C] and [C] -> […, C]."""
    if _kernels_serve(hidden, bias):
        return _activate(hidden, bias)
    return F.gelu(hidden + bias.to(hidden.dtype))


def _kernels_serve(hidden: Tensor, bias: Tensor) -> bool:
    columns = operator.index(bias.shape[0])  # a constant, also for a compiler
    fits = kernels_run_on(hidden) and columns % 256 == 0
    return fits and _agree(columns, hidden.dtype, bias.dtype, str(hidden.device))


@torch.compiler.assume_constant_result  # asked when a graph is made, and no part of it
def _agree(columns: int, dtype: torch.dtype, bias: torch.dtype, device: str) -> bool:
    asked = f"{columns} columns", dtype, f"bias {bias}"
    return agrees("GELU", asked, device, True, lambda _: error_of_kernels(columns, dtype, bias, device), dtype)


def error_of_kernels(columns: int, dtype: torch.dtype, bias_dtype: torch.dtype, device: str) -> float:
    """The largest relative error of outputs, gradients and the bias' gradient, in any row of random numbers."""
    generator = torch.Generator(device).manual_seed(0)
    draw = partial(torch.randn, generator=generator, device=device)
    hidden, grad = draw(300, columns).mul(3).to(dtype), draw(300, columns).to(dtype)
    bias = draw(columns).to(bias_dtype)
    x = hidden.double() + bias.double()
    cumulative = torch.special.ndtr(x)
    slope = grad.double() * (cumulative + x * torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi))
    d_hidden, d_bias = _activate_backward(hidden, bias, grad)
    return largest_error([(_activate(hidden, bias), x * cumulative), (d_hidden, slope), (d_bias, slope.sum(0))])


@torch.library.custom_op("scalelong::bias_gelu", mutates_args=(), schema="(Tensor hidden, Tensor bias) -> Tensor")
def _activate(hidden: Tensor, bias: Tensor) -> Tensor:
    from scalelong.kernels import gelu_triton

    hidden, bias = hidden.contiguous(), bias.contiguous()
    out = torch.empty_like(hidden)
    with torch.cuda.device_of(hidden):  # Triton launches on the current one
        gelu_triton.bias_gelu_forward[(-(-hidden.numel() // FORWARD["BLOCK"]),)](
            hidden, bias, out, hidden.numel(), COLUMNS=hidden.shape[-1], **FORWARD
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

    hidden, bias, grad = hidden.contiguous(), bias.contiguous(), grad.contiguous()
    columns = hidden.shape[-1]
    rows = hidden.numel() // columns
    d_hidden, d_bias = torch.empty_like(hidden), torch.empty_like(bias)
    programs = -(-rows // (BACKWARD["BR"] * BACKWARD["REPEAT"]))
    sums = torch.empty((programs, columns), dtype=torch.float32, device=hidden.device)
    with torch.cuda.device_of(hidden):
        gelu_triton.bias_gelu_backward[(programs, columns // BACKWARD["BC"])](
            hidden, bias, grad, d_hidden, sums, rows, COLUMNS=columns, **BACKWARD
        )
        # torch's sum of these would clear its counters first, in a kernel of its own.
        gelu_triton.column_sums[(columns // SUMS["BC"],)](sums, d_bias, programs, COLUMNS=columns, **SUMS)
    return d_hidden, d_bias


@_activate_backward.register_fake
def _(hidden: Tensor, bias: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(hidden.shape), torch.empty_like(bias)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, grad):  # type: ignore[no-untyped-def]
    return _activate_backward(*ctx.saved_tensors, grad)


torch.library.register_autograd("scalelong::bias_gelu", _differentiate, setup_context=_save)
