"""Our attention kernels as operators of torch: how they are launched, and what they save for the way back."""

from __future__ import annotations

import math

import torch
from torch import Tensor

MAIN = (64, 128, 256)  # tokens in tiles, and one or two more besides
TOKENS = tuple(main + extra for main in MAIN for extra in (1, 2))
HEAD_DIMS = (32, 64)
# How the kernels are launched: queries and keys at once, stages of loading ahead, warps (`benchmarks.kernels` tries
# others).
FORWARD = {"BQ": 64, "STAGES": 3, "num_warps": 4}
BACKWARD_QUERIES = {"BQ": 64, "BK": 32, "STAGES": 3, "num_warps": 4}
BACKWARD_KEYS = {"BQ": 32, "BK": 64, "STAGES": 3, "num_warps": 4}


@torch.library.custom_op(
    "scalelong::attention", mutates_args=(), schema="(Tensor qkv, int num_heads) -> (Tensor, Tensor)"
)
def attend(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """[B, N, 3·D] -> [B, N, D], and log2 Σ 2^s of each head and query, [B, H, N]."""
    from scalelong.kernels import attention_triton

    qkv = qkv.contiguous()
    _check_blocks(_sizes(qkv, num_heads)["MAIN"], FORWARD["BQ"])
    out, lse = _shapes(qkv, num_heads)
    with torch.cuda.device_of(qkv):  # Triton launches on the current one
        attention_triton.attention_forward[(qkv.shape[0] * num_heads,)](
            qkv, out, lse, _scale(qkv, num_heads) / math.log(2), **_sizes(qkv, num_heads), **FORWARD
        )
    return out, lse


@attend.register_fake
def _shapes(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    batch, tokens, width = qkv.shape
    lse = qkv.new_empty((batch, num_heads, tokens), dtype=torch.float32)
    return qkv.new_empty((batch, tokens, width // 3)), lse


@torch.library.custom_op(
    "scalelong::attention_backward",
    mutates_args=(),
    schema="(Tensor qkv, Tensor out, Tensor lse, Tensor grad, int num_heads) -> Tensor",
)
def attend_backward(qkv: Tensor, out: Tensor, lse: Tensor, grad: Tensor, num_heads: int) -> Tensor:
    """The gradient of `qkv`, [B, N, 3·D], from that of `out`."""
    from scalelong.kernels import attention_triton

    qkv, out, lse, grad = (t.contiguous() for t in (qkv, out, lse, grad))
    d_qkv, delta = torch.empty_like(qkv), torch.empty_like(lse)
    heads, scale, sizes = qkv.shape[0] * num_heads, _scale(qkv, num_heads), _sizes(qkv, num_heads)
    scales = scale, scale / math.log(2)
    _check_blocks(
        sizes["MAIN"], *(launch[block] for launch in (BACKWARD_QUERIES, BACKWARD_KEYS) for block in ("BQ", "BK"))
    )
    query_parts, key_parts = sizes["MAIN"] // BACKWARD_QUERIES["BQ"], sizes["MAIN"] // BACKWARD_KEYS["BK"]
    # What each part of the patches gives to the extra tokens' gradients: queries to dk and dv, keys to dq.
    by_queries, by_keys = (
        qkv.new_empty((gradients, heads, parts, sizes["EXTRA"], sizes["D"]), dtype=torch.float32)
        for gradients, parts in ((2, query_parts), (1, key_parts))
    )
    with torch.cuda.device_of(qkv):
        attention_triton.attention_backward_queries[(heads * query_parts,)](
            qkv, out, grad, lse, delta, d_qkv, by_queries, *scales, **sizes, **BACKWARD_QUERIES
        )
        attention_triton.attention_backward_keys[(heads * key_parts,)](
            qkv, grad, lse, delta, d_qkv, by_keys, *scales, **sizes, **BACKWARD_KEYS
        )
        attention_triton.attention_backward_extras[(heads,)](
            qkv, grad, lse, delta, d_qkv, by_queries, by_keys, *scales, **sizes,
            QUERY_PARTS=query_parts, KEY_PARTS=key_parts, num_warps=1,
        )  # fmt: skip
    return d_qkv


@attend_backward.register_fake
def _(qkv: Tensor, out: Tensor, lse: Tensor, grad: Tensor, num_heads: int) -> Tensor:
    return qkv.new_empty(qkv.shape)  # contiguous, which the likes of a slice are not


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(inputs[0], *output)
    ctx.num_heads = inputs[1]
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx, grad, _):  # type: ignore[no-untyped-def]
    return attend_backward(*ctx.saved_tensors, grad, ctx.num_heads), None


torch.library.register_autograd("scalelong::attention", _differentiate, setup_context=_save)


def _scale(qkv: Tensor, num_heads: int) -> float:
    return (qkv.shape[2] // 3 // num_heads) ** -0.5


def _sizes(qkv: Tensor, num_heads: int) -> dict[str, int]:
    main = max(main for main in MAIN if main < qkv.shape[1])
    return {"H": num_heads, "D": qkv.shape[2] // 3 // num_heads, "EXTRA": qkv.shape[1] - main, "MAIN": main}


def _check_blocks(tokens: int, *blocks: int) -> None:
    """The kernels have no masks: what is left of a block would be read and written beside the tensors."""
    assert all(tokens % block == 0 for block in blocks), f"{tokens} tokens are no number of blocks of {blocks}"
