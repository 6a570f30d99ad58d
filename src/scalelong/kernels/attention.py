"""Multi-head self-attention on packed queries, keys and values: our kernel where it fits, torch's elsewhere."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from scalelong.kernels.support import has_large_shared_memory, kernels_run_on

_MAX_EXTRA = 2
_MAIN = (64, 128, 256)
_HEAD_DIMS = (32, 64)
# How the kernels are launched: queries and keys at once, stages of loading ahead, warps (`benchmarks.kernels` tries
# others).
FORWARD = {"BQ": 64, "STAGES": 2, "num_warps": 4}
BACKWARD_QUERIES = {"BQ": 64, "BK": 64, "STAGES": 2, "num_warps": 4}
BACKWARD_KEYS = {"BQ": 64, "BK": 64, "STAGES": 2, "num_warps": 4}


def attention(qkv: Tensor, num_heads: int) -> Tensor:
    """[B, N, 3·D] -> [B, N, D]."""
    if fits(qkv, num_heads) and kernels_run_on(qkv) and has_large_shared_memory():
        out, _ = _attend(qkv, num_heads)
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


def fits(qkv: Tensor, num_heads: int) -> bool:
    """Whether the tokens are 64, 128 or 256 and one or two more, and the heads 32 or 64 wide."""
    dim = qkv.shape[2] // 3 // num_heads
    return dim in _HEAD_DIMS and _main(qkv.shape[1]) is not None


def _main(tokens: int) -> int | None:
    for main in _MAIN:
        if main < tokens <= main + _MAX_EXTRA:
            return main
    return None


@torch.library.custom_op(
    "scalelong::attention", mutates_args=(), schema="(Tensor qkv, int num_heads) -> (Tensor, Tensor)"
)
def _attend(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    from scalelong.kernels import attention_triton

    qkv = qkv.contiguous()
    _check_blocks(_sizes(qkv, num_heads)["MAIN"], FORWARD["BQ"])
    out, lse = _attend_shapes(qkv, num_heads)
    attention_triton.attention_forward[(qkv.shape[0] * num_heads,)](
        qkv, out, lse, _scale(qkv, num_heads) / math.log(2), **_sizes(qkv, num_heads), **FORWARD
    )
    return out, lse


@_attend.register_fake
def _attend_shapes(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    batch, tokens, width = qkv.shape
    lse = qkv.new_empty((batch, num_heads, tokens), dtype=torch.float32)
    return qkv.new_empty((batch, tokens, width // 3)), lse


@torch.library.custom_op(
    "scalelong::attention_backward",
    mutates_args=(),
    schema="(Tensor qkv, Tensor out, Tensor lse, Tensor grad, int num_heads) -> Tensor",
)
def _attend_backward(qkv: Tensor, out: Tensor, lse: Tensor, grad: Tensor, num_heads: int) -> Tensor:
    from scalelong.kernels import attention_triton

    qkv, grad = qkv.contiguous(), grad.contiguous()
    d_qkv, delta = torch.empty_like(qkv), torch.empty_like(lse)
    heads, scale, sizes = qkv.shape[0] * num_heads, _scale(qkv, num_heads), _sizes(qkv, num_heads)
    scales = scale, scale / math.log(2)
    _check_blocks(
        sizes["MAIN"], *(launch[block] for launch in (BACKWARD_QUERIES, BACKWARD_KEYS) for block in ("BQ", "BK"))
    )
    # For each head a program per block, and one for the extra tokens.
    attention_triton.attention_backward_queries[(heads * (sizes["MAIN"] // BACKWARD_QUERIES["BQ"] + 1),)](
        qkv, out, grad, lse, delta, d_qkv, *scales, **sizes, **BACKWARD_QUERIES
    )
    attention_triton.attention_backward_keys[(heads * (sizes["MAIN"] // BACKWARD_KEYS["BK"] + 1),)](
        qkv, grad, lse, delta, d_qkv, *scales, **sizes, **BACKWARD_KEYS
    )
    return d_qkv


@_attend_backward.register_fake
def _(qkv: Tensor, out: Tensor, lse: Tensor, grad: Tensor, num_heads: int) -> Tensor:
    return torch.empty_like(qkv)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(inputs[0], *output)
    ctx.num_heads = inputs[1]
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx, grad, _):  # type: ignore[no-untyped-def]
    return _attend_backward(*ctx.saved_tensors, grad, ctx.num_heads), None


torch.library.register_autograd("scalelong::attention", _differentiate, setup_context=_save)


def _scale(qkv: Tensor, num_heads: int) -> float:
    return (qkv.shape[2] // 3 // num_heads) ** -0.5


def _sizes(qkv: Tensor, num_heads: int) -> dict[str, int]:
    main = _main(qkv.shape[1])
    assert main is not None
    return {"H": num_heads, "D": qkv.shape[2] // 3 // num_heads, "EXTRA": qkv.shape[1] - main, "MAIN": main}


def _check_blocks(tokens: int, *blocks: int) -> None:
    """The kernels have no masks: what is left of a block would be read and written beside the tensors."""
    assert all(tokens % block == 0 for block in blocks), f"{tokens} tokens are no number of blocks of {blocks}"
