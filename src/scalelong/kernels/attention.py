"""Multi-head self-attention on packed queries, keys and values: our kernels where they fit, torch's elsewhere."""

from __future__ import annotations

import operator
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from scalelong.kernels.attention_op import HEAD_DIMS, TOKENS, attend, attend_backward
from scalelong.kernels.checking import agrees, largest_error
from scalelong.kernels.support import has_large_shared_memory, kernels_run_on

_REPEAT = 16  # of the two images that the kernels are compared on


def attention(qkv: Tensor, num_heads: int) -> Tensor:
    """[B, N, 3·D] -> [B, N, D]."""
    if _kernels_serve(qkv, num_heads):
        out, _ = attend(qkv, num_heads)
        return out
    q, k, v = qkv.unflatten(2, (3, num_heads, -1)).permute(2, 0, 3, 1, 4)  # each [B, H, N, d]
    attended = _in_float32(q, k, v) if _is_half_on_cpu(q) else F.scaled_dot_product_attention(q, k, v)
    return attended.transpose(1, 2).flatten(2)


def _is_half_on_cpu(q: Tensor) -> bool:
    """Tensors without storage, on which a step's memory is counted, stand for those of a GPU."""
    return q.device.type == "cpu" and q.dtype == torch.bfloat16 and not isinstance(q, FakeTensor)


def _in_float32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """On a CPU torch's fused attention takes longer in bf16, for few tokens many times as long, and errs more."""
    with torch.autocast(q.device.type, enabled=False):
        return F.scaled_dot_product_attention(q.float(), k.float(), v.float()).to(v.dtype)


def shape_of(qkv: Tensor, num_heads: int) -> tuple[int, int] | None:
    """(tokens, numbers per head) where the kernels have such a shape, as constants, whatever a compiler knows of
    the sizes; else None."""
    for tokens, dim in product(TOKENS, HEAD_DIMS):
        if qkv.shape[1] == tokens and qkv.shape[2] == 3 * num_heads * dim:
            return tokens, dim
    return None


def _kernels_serve(qkv: Tensor, num_heads: int) -> bool:
    if not (kernels_run_on(qkv) and has_large_shared_memory(qkv.device.index)):
        return False
    shape = shape_of(qkv, num_heads)
    return shape is not None and _agree(
        *shape, operator.index(num_heads), qkv.dtype, str(qkv.device), torch.is_grad_enabled()
    )


@torch.compiler.assume_constant_result  # asked when a graph is made, and no part of it
def _agree(tokens: int, dim: int, heads: int, dtype: torch.dtype, device: str, backward: bool) -> bool:
    error = partial(error_of_kernels, tokens, dim, heads, dtype, device)
    asked = f"{tokens} tokens", f"{heads} heads of {dim}", dtype
    return agrees("attention", asked, device, backward, error, dtype)


def error_of_kernels(
    tokens: int, dim: int, heads: int, dtype: torch.dtype, device: str, backward: bool = True
) -> float:
    """The largest relative error on random numbers, of outputs and gradients, in any row of any head.

    Two images, often enough that a large GPU is as full as in a training.
    """
    generator = torch.Generator(device).manual_seed(0)
    draw = partial(torch.randn, 2, tokens, generator=generator, device=device)
    qkv, grad = (draw(width * heads * dim).to(dtype) for width in (3, 1))
    exact = by_definition(qkv, grad, heads)
    qkv, grad = (t.repeat(_REPEAT, 1, 1) for t in (qkv, grad))
    out, lse = attend(qkv, heads)
    found = [out]
    if backward:
        found += attend_backward(qkv, out, lse, grad, heads).chunk(3, dim=2)
    rows = [t.unflatten(0, (-1, 2)).unflatten(3, (heads, dim)) for t in found]
    return largest_error([(each, want.unflatten(2, (heads, dim))) for each, want in zip(rows, exact, strict=False)])


def by_definition(qkv: Tensor, grad: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """softmax(q kᵀ/√d) v and the gradients of q, k, v in float64, each [B, N, D], written out."""
    q, k, v = qkv.double().unflatten(2, (3, num_heads, -1)).permute(2, 0, 3, 1, 4)
    d_out = grad.double().unflatten(2, (num_heads, -1)).transpose(1, 2)
    scale = q.shape[-1] ** -0.5
    p = (q @ k.transpose(-1, -2) * scale).softmax(-1)
    d_p = d_out @ v.transpose(-1, -2)
    d_s = p * (d_p - (d_p * p).sum(-1, keepdim=True)) * scale
    each = p @ v, d_s @ k, d_s.transpose(-1, -2) @ q, p.transpose(-1, -2) @ d_out
    out, d_q, d_k, d_v = (t.transpose(1, 2).flatten(2) for t in each)
    return out, d_q, d_k, d_v
