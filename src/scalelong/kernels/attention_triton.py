"""Attention over 2^k tokens and a few more, as Triton kernels.

U-ViT has 256 patches and, before them, one or two extra tokens. Kernels that walk over tiles of 128 keys spend a
third of their work on padding there. Here tiles hold patches alone, and the extra tokens are a tile of 16 rows, the
least that the matrix units take, of which EXTRA count (the others are the first patches, masked).
Forward, one program has all keys of a head at hand. Backward, one kernel makes the patches' queries' gradients and
one those of their keys and values: that is seven products in place of five, but with programs so small that a
multiprocessor runs three or four at once, and works for one while another waits. What patches give to the extra
tokens' gradients is left by both for a third kernel, which adds it up. Softmax is in base 2, like the hardware's
exponential. Tensors are packed as the linear layer before left them: [B, N, 3, H, D].
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE = tl.constexpr(16)


@triton.jit
def attention_forward(
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
    """One program: one head. Writes out [B, N, H, D] and log2 Σ 2^s, [B, H, N]."""
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
    o_extra, norm_extra = _attend(tl.load(q_base + first), k, v, k_extra, v_extra, extra, scale_log2)
    tl.store(o_base + x[:, None] * (H * D) + d[None, :], o_extra.to(v.dtype), mask=extra[:, None])
    tl.store(lse_base + x, norm_extra, mask=extra)
    for start in tl.range(EXTRA, N, BQ, num_stages=STAGES):
        rows = start + tl.arange(0, BQ)
        q = tl.load(q_base + rows[:, None] * ROW + d[None, :])  # [BQ, D]
        o, norm = _attend(q, k, v, k_extra, v_extra, extra, scale_log2)
        tl.store(o_base + rows[:, None] * (H * D) + d[None, :], o.to(v.dtype))
        tl.store(lse_base + rows, norm)


@triton.jit
def _attend(q, k, v, k_extra, v_extra, extra, scale_log2):
    """softmax(q kᵀ) v over patches and extra tokens, and log2 Σ 2^s."""
    s = tl.dot(q, tl.trans(k))
    s_extra = tl.where(extra[None, :], tl.dot(q, tl.trans(k_extra)), float("-inf"))
    top = tl.maximum(tl.max(s, 1), tl.max(s_extra, 1)) * scale_log2
    p, p_extra = tl.exp2(s * scale_log2 - top[:, None]), tl.exp2(s_extra * scale_log2 - top[:, None])
    total = tl.sum(p, 1) + tl.sum(p_extra, 1)
    o = tl.dot(p_extra.to(v.dtype), v_extra, tl.dot(p.to(v.dtype), v))
    return o * (1 / total)[:, None], top + tl.log2(total)


@triton.jit
def attention_backward_queries(
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
    # With extra tokens as columns, dot(trans(q), ds_extra), Triton 3.6 makes a kernel that leaves garbage here.
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
def attention_backward_keys(
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
def attention_backward_extras(
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
    q_base, do_base = qkv + b * N * ROW + h * D, grad + b * N * H * D + h * D
    k_base, v_base = q_base + H * D, q_base + 2 * H * D
    dq_base = dqkv + b * N * ROW + h * D
    lse_base, delta_base = lse + head * N, delta + head * N
    d = tl.arange(0, D)
    by_queries = query_sums + (head * QUERY_PARTS + tl.arange(0, QUERY_PARTS))[:, None] * (EXTRA * D) + d[None, :]
    by_keys = key_sums + (head * KEY_PARTS + tl.arange(0, KEY_PARTS))[:, None] * (EXTRA * D) + d[None, :]
    for x in tl.static_range(EXTRA):
        q_x = tl.load(q_base + x * ROW + d).to(tl.float32)
        k_x = tl.load(k_base + x * ROW + d).to(tl.float32)
        v_x = tl.load(v_base + x * ROW + d).to(tl.float32)
        do_x = tl.load(do_base + x * H * D + d).to(tl.float32)
        norm_x, delta_x = tl.load(lse_base + x), tl.load(delta_base + x)
        dq = tl.sum(tl.load(by_keys + x * D), 0)  # [D]
        dk = tl.sum(tl.load(by_queries + x * D), 0)
        dv = tl.sum(tl.load(by_queries + (heads * QUERY_PARTS * EXTRA + x) * D), 0)
        for y in tl.static_range(EXTRA):  # the other as a key, and as a query
            k_y = tl.load(k_base + y * ROW + d).to(tl.float32)
            v_y = tl.load(v_base + y * ROW + d).to(tl.float32)
            p = tl.exp2(tl.sum(q_x * k_y, 0) * scale_log2 - norm_x)
            dq += p * (tl.sum(do_x * v_y, 0) - delta_x) * k_y
            q_y = tl.load(q_base + y * ROW + d).to(tl.float32)
            do_y = tl.load(do_base + y * H * D + d).to(tl.float32)
            p = tl.exp2(tl.sum(q_y * k_x, 0) * scale_log2 - tl.load(lse_base + y))
            dk += p * (tl.sum(do_y * v_x, 0) - tl.load(delta_base + y)) * q_y
            dv += p * do_y
        tl.store(dq_base + x * ROW + d, (dq * scale).to(qkv.dtype.element_ty))
        tl.store(dq_base + x * ROW + H * D + d, (dk * scale).to(qkv.dtype.element_ty))
        tl.store(dq_base + x * ROW + 2 * H * D + d, dv.to(qkv.dtype.element_ty))
