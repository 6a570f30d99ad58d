"""Attention kernels that may take the place of those in use, raced by `python -m benchmarks.kernels`.

As scalelong/kernels/attention_triton.py, but for the extra tokens. There each is a sum over vectors, and backward
it has programs of its own that walk over the whole head: by the times with one and with two of them, half of the
time (docs/experiment_log.md). Here they are a tile of 16 rows of which EXTRA count, so that the matrix units take
them along, and what the patches give to their gradients is added up by the programs that hold the patches.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from scalelong.kernels import attention as used

TILE = tl.constexpr(16)  # the least that matrix units take: the extra tokens, and the first patches, masked


@triton.jit
def _rows_attend(q, k, v, k_extra, v_extra, extra, scale_log2):
    """softmax(q kᵀ) v over patches and extra tokens, and log2 Σ 2^s."""
    s = tl.dot(q, tl.trans(k)) * scale_log2
    s_extra = tl.where(extra[None, :], tl.dot(q, tl.trans(k_extra)) * scale_log2, float("-inf"))
    top = tl.maximum(tl.max(s, 1), tl.max(s_extra, 1))
    p, p_extra = tl.exp2(s - top[:, None]), tl.exp2(s_extra - top[:, None])
    total = tl.sum(p, 1) + tl.sum(p_extra, 1)
    o = tl.dot(p.to(v.dtype), v)
    o = tl.dot(p_extra.to(v.dtype), v_extra, o)
    return o / total[:, None], top + tl.log2(total)


@triton.jit
def forward(
    qkv,
    out,
    lse,
    scale_log2,
    H: tl.constexpr,
    D: tl.constexpr,
    EXTRA: tl.constexpr,
    MAIN: tl.constexpr,
    BQ: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program: one head."""
    N: tl.constexpr = EXTRA + MAIN
    ROW: tl.constexpr = 3 * H * D
    head = tl.program_id(0)
    b, h = (head // H).to(tl.int64), head % H
    q_base = qkv + b * N * ROW + h * D
    k_base, v_base = q_base + H * D, q_base + 2 * H * D
    o_base, lse_base = out + b * N * H * D + h * D, lse + head * N
    d, x = tl.arange(0, D), tl.arange(0, TILE)
    extra = x < EXTRA
    main = (EXTRA + tl.arange(0, MAIN))[:, None] * ROW + d[None, :]
    first = x[:, None] * ROW + d[None, :]
    k, v = tl.load(k_base + main), tl.load(v_base + main)  # [MAIN, D]
    k_extra, v_extra = tl.load(k_base + first), tl.load(v_base + first)  # [TILE, D]
    o_extra, norm_extra = _rows_attend(tl.load(q_base + first), k, v, k_extra, v_extra, extra, scale_log2)
    tl.store(o_base + x[:, None] * (H * D) + d[None, :], o_extra.to(v.dtype), mask=extra[:, None])
    tl.store(lse_base + x, norm_extra, mask=extra)
    for start in tl.range(EXTRA, N, BQ, num_stages=STAGES):
        rows = start + tl.arange(0, BQ)
        q = tl.load(q_base + rows[:, None] * ROW + d[None, :])  # [BQ, D]
        o, norm = _rows_attend(q, k, v, k_extra, v_extra, extra, scale_log2)
        tl.store(o_base + rows[:, None] * (H * D) + d[None, :], o.to(v.dtype))
        tl.store(lse_base + rows, norm)


@triton.jit
def backward_queries(
    qkv,
    out,
    grad,
    lse,
    delta,
    dqkv,
    sums,
    scale,
    scale_log2,
    H: tl.constexpr,
    D: tl.constexpr,
    EXTRA: tl.constexpr,
    MAIN: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program: BQ queries of one head and all keys. Writes dq, delta, and to `sums` [2, heads, parts, EXTRA, D]
    what these queries give to the extra tokens' dk and dv."""
    N: tl.constexpr = EXTRA + MAIN
    ROW: tl.constexpr = 3 * H * D
    PARTS: tl.constexpr = MAIN // BQ
    program = tl.program_id(0)
    head, part = program // PARTS, program % PARTS
    b, h = (head // H).to(tl.int64), head % H
    q_base = qkv + b * N * ROW + h * D
    k_base, v_base = q_base + H * D, q_base + 2 * H * D
    o_base, do_base = out + b * N * H * D + h * D, grad + b * N * H * D + h * D
    delta_base = delta + head * N
    d, x, keys = tl.arange(0, D), tl.arange(0, TILE), tl.arange(0, BK)
    extra = x < EXTRA
    first = x[:, None] * ROW + d[None, :]
    rows = EXTRA + part * BQ + tl.arange(0, BQ)
    narrow = rows[:, None] * (H * D) + d[None, :]
    q = tl.load(q_base + rows[:, None] * ROW + d[None, :])  # [BQ, D]
    do = tl.load(do_base + narrow)
    norm = tl.load(lse + head * N + rows)
    delta_q = tl.sum(do.to(tl.float32) * tl.load(o_base + narrow), 1)
    tl.store(delta_base + rows, delta_q)
    if part == 0:
        narrow_first = x[:, None] * (H * D) + d[None, :]
        products = tl.load(do_base + narrow_first).to(tl.float32) * tl.load(o_base + narrow_first)
        tl.store(delta_base + x, tl.sum(products, 1), mask=extra)

    k_extra, v_extra = tl.load(k_base + first), tl.load(v_base + first)  # [TILE, D]
    p_extra = tl.exp2(tl.dot(q, tl.trans(k_extra)) * scale_log2 - norm[:, None])
    p_extra = tl.where(extra[None, :], p_extra, 0.0)  # [BQ, TILE]
    ds_extra = (p_extra * (tl.dot(do, tl.trans(v_extra)) - delta_q[:, None])).to(q.dtype)
    dq = tl.dot(ds_extra, k_extra)
    place = sums + (program * EXTRA + x)[:, None] * D + d[None, :]
    later = tl.num_programs(0) * EXTRA * D  # from dk to dv
    tl.store(place, tl.dot(tl.trans(ds_extra), q), mask=extra[:, None])
    tl.store(place + later, tl.dot(tl.trans(p_extra.to(q.dtype)), do), mask=extra[:, None])

    for start in tl.range(EXTRA, N, BK, num_stages=STAGES):
        at = (start + keys)[:, None] * ROW + d[None, :]
        k, v = tl.load(k_base + at), tl.load(v_base + at)  # [BK, D]
        p = tl.exp2(tl.dot(q, tl.trans(k)) * scale_log2 - norm[:, None])  # [BQ, BK]
        ds = p * (tl.dot(do, tl.trans(v)) - delta_q[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    tl.store(dqkv + b * N * ROW + h * D + rows[:, None] * ROW + d[None, :], (dq * scale).to(q.dtype))


@triton.jit
def backward_keys(
    qkv,
    grad,
    lse,
    delta,
    dqkv,
    sums,
    scale,
    scale_log2,
    H: tl.constexpr,
    D: tl.constexpr,
    EXTRA: tl.constexpr,
    MAIN: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program: BK keys of one head and all queries, scores transposed. Writes dk and dv, and to `sums` [heads,
    parts, EXTRA, D] what these keys give to the extra tokens' dq."""
    N: tl.constexpr = EXTRA + MAIN
    ROW: tl.constexpr = 3 * H * D
    PARTS: tl.constexpr = MAIN // BK
    program = tl.program_id(0)
    head, part = program // PARTS, program % PARTS
    b, h = (head // H).to(tl.int64), head % H
    q_base, do_base = qkv + b * N * ROW + h * D, grad + b * N * H * D + h * D
    lse_base, delta_base = lse + head * N, delta + head * N
    d, x = tl.arange(0, D), tl.arange(0, TILE)
    extra = x < EXTRA
    at = (EXTRA + part * BK + tl.arange(0, BK))[:, None] * ROW + d[None, :]
    k, v = tl.load(q_base + H * D + at), tl.load(q_base + 2 * H * D + at)  # [BK, D]

    q_extra = tl.load(q_base + x[:, None] * ROW + d[None, :])  # [TILE, D]
    do_extra = tl.load(do_base + x[:, None] * (H * D) + d[None, :])
    p_extra = tl.exp2(tl.dot(k, tl.trans(q_extra)) * scale_log2 - tl.load(lse_base + x)[None, :])
    p_extra = tl.where(extra[None, :], p_extra, 0.0)  # [BK, TILE]
    ds_extra = (p_extra * (tl.dot(v, tl.trans(do_extra)) - tl.load(delta_base + x)[None, :])).to(k.dtype)
    dv = tl.dot(p_extra.to(k.dtype), do_extra)
    dk = tl.dot(ds_extra, q_extra)
    place = sums + (program * EXTRA + x)[:, None] * D + d[None, :]
    tl.store(place, tl.dot(tl.trans(ds_extra), k), mask=extra[:, None])

    for start in tl.range(EXTRA, N, BQ, num_stages=STAGES):
        rows = start + tl.arange(0, BQ)
        q = tl.load(q_base + rows[:, None] * ROW + d[None, :])  # [BQ, D]
        do = tl.load(do_base + rows[:, None] * (H * D) + d[None, :])
        p = tl.exp2(tl.dot(k, tl.trans(q)) * scale_log2 - tl.load(lse_base + rows)[None, :])  # [BK, BQ]
        ds = p * (tl.dot(v, tl.trans(do)) - tl.load(delta_base + rows)[None, :])
        dv = tl.dot(p.to(k.dtype), do, dv)
        dk = tl.dot(ds.to(k.dtype), q, dk)
    dk_base = dqkv + b * N * ROW + h * D + H * D
    tl.store(dk_base + at, (dk * scale).to(k.dtype))
    tl.store(dk_base + H * D + at, dv.to(k.dtype))


@triton.jit
def backward_extras(
    qkv,
    grad,
    lse,
    delta,
    dqkv,
    query_sums,
    key_sums,
    scale,
    scale_log2,
    H: tl.constexpr,
    D: tl.constexpr,
    EXTRA: tl.constexpr,
    MAIN: tl.constexpr,
    QUERY_PARTS: tl.constexpr,
    KEY_PARTS: tl.constexpr,
):
    """One program: the extra tokens of one head, among themselves and with what the patches have given."""
    N: tl.constexpr = EXTRA + MAIN
    ROW: tl.constexpr = 3 * H * D
    head, heads = tl.program_id(0), tl.num_programs(0)
    b, h = (head // H).to(tl.int64), head % H
    q_base = qkv + b * N * ROW + h * D
    d, x = tl.arange(0, D), tl.arange(0, TILE)
    extra = x < EXTRA
    first = x[:, None] * ROW + d[None, :]
    q, k, v = tl.load(q_base + first), tl.load(q_base + H * D + first), tl.load(q_base + 2 * H * D + first)
    do = tl.load(grad + b * N * H * D + h * D + x[:, None] * (H * D) + d[None, :])
    norm, delta_q = tl.load(lse + head * N + x), tl.load(delta + head * N + x)
    p = tl.exp2(tl.dot(q, tl.trans(k)) * scale_log2 - norm[:, None])
    p = tl.where(extra[:, None] & extra[None, :], p, 0.0)  # [TILE queries, TILE keys]
    ds = (p * (tl.dot(do, tl.trans(v)) - delta_q[:, None])).to(q.dtype)
    dq, dk, dv = tl.dot(ds, k), tl.dot(tl.trans(ds), q), tl.dot(tl.trans(p.to(q.dtype)), do)
    within = x[:, None] * D + d[None, :]
    for part in tl.static_range(KEY_PARTS):
        place = key_sums + (head * KEY_PARTS + part) * EXTRA * D + within
        dq += tl.load(place, mask=extra[:, None], other=0.0)
    for part in tl.static_range(QUERY_PARTS):
        place = query_sums + (head * QUERY_PARTS + part) * EXTRA * D + within
        dk += tl.load(place, mask=extra[:, None], other=0.0)
        dv += tl.load(place + heads * QUERY_PARTS * EXTRA * D, mask=extra[:, None], other=0.0)
    dq_base = dqkv + b * N * ROW + h * D
    tl.store(dq_base + first, (dq * scale).to(q.dtype), mask=extra[:, None])
    tl.store(dq_base + H * D + first, (dk * scale).to(q.dtype), mask=extra[:, None])
    tl.store(dq_base + 2 * H * D + first, dv.to(q.dtype), mask=extra[:, None])


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, num_heads: int) -> Tensor:
        qkv = qkv.contiguous()
        batch, tokens, width = qkv.shape
        out = qkv.new_empty((batch, tokens, width // 3))
        lse = qkv.new_empty((batch, num_heads, tokens), dtype=torch.float32)
        sizes, scale = used._sizes(qkv, num_heads), used._scale(qkv, num_heads)
        used._check_blocks(sizes["MAIN"], used.FORWARD["BQ"])
        forward[(batch * num_heads,)](qkv, out, lse, scale / math.log(2), **sizes, **used.FORWARD)
        ctx.save_for_backward(qkv, out, lse)
        ctx.num_heads = num_heads
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        qkv, out, lse = ctx.saved_tensors
        grad, d_qkv, delta = grad.contiguous(), torch.empty_like(qkv), torch.empty_like(lse)
        sizes, scale = used._sizes(qkv, ctx.num_heads), used._scale(qkv, ctx.num_heads)
        launches = used.BACKWARD_QUERIES, used.BACKWARD_KEYS
        used._check_blocks(sizes["MAIN"], *(launch[block] for launch in launches for block in ("BQ", "BK")))
        heads = qkv.shape[0] * ctx.num_heads
        query_parts = sizes["MAIN"] // used.BACKWARD_QUERIES["BQ"]
        key_parts = sizes["MAIN"] // used.BACKWARD_KEYS["BK"]
        query_sums, key_sums = (
            qkv.new_empty((kinds, heads, parts, sizes["EXTRA"], sizes["D"]), dtype=torch.float32)
            for kinds, parts in ((2, query_parts), (1, key_parts))
        )
        scales = scale, scale / math.log(2)
        backward_queries[(heads * query_parts,)](
            qkv, out, grad, lse, delta, d_qkv, query_sums, *scales, **sizes, **used.BACKWARD_QUERIES
        )
        backward_keys[(heads * key_parts,)](
            qkv, grad, lse, delta, d_qkv, key_sums, *scales, **sizes, **used.BACKWARD_KEYS
        )
        backward_extras[(heads,)](
            qkv, grad, lse, delta, d_qkv, query_sums, key_sums, *scales, **sizes,
            QUERY_PARTS=query_parts, KEY_PARTS=key_parts, num_warps=1,
        )  # fmt: skip
        return d_qkv, None


def with_extras_in_tiles(qkv: Tensor, num_heads: int) -> Tensor:
    """[B, N, 3·D] -> [B, N, D], as `scalelong.kernels.attention.attention` where its kernels fit."""
    out: Tensor = _Attention.apply(qkv, num_heads)  # type: ignore[no-untyped-call]
    return out
