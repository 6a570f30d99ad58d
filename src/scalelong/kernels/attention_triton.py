"""Attention over 2^k tokens and a few more, as Triton kernels.

U-ViT has 256 patches and, before them, one or two extra tokens. Kernels that walk over tiles of 128 keys spend a
third of their work on padding there. Here tiles hold patches alone, and the extra tokens are sums over vectors.
Forward, one program has all keys of a head at hand. Backward, one kernel makes the queries' gradients and one those
of keys and values: that is seven products in place of five, but with programs so small that a multiprocessor runs
three or four at once, and works for one while another waits. Softmax is in base 2, like the hardware's exponential.
Tensors are packed as the linear layer before left them: [B, N, 3, H, D].
"""

from __future__ import annotations

import triton
import triton.language as tl


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
    o_base = out + b * N * H * D + h * D
    lse_base = lse + head * N
    d = tl.arange(0, D)
    main = EXTRA + tl.arange(0, MAIN)
    k = tl.load(k_base + main[:, None] * ROW + d[None, :])  # [MAIN, D]
    v = tl.load(v_base + main[:, None] * ROW + d[None, :])

    for i in tl.static_range(EXTRA):  # an extra token as a query
        q_i = tl.load(q_base + i * ROW + d).to(tl.float32)
        s_i = tl.sum(k * q_i[None, :], 1) * scale_log2  # [MAIN]
        top_i = tl.max(s_i, 0)
        for e in tl.static_range(EXTRA):
            top_i = tl.maximum(top_i, tl.sum(tl.load(k_base + e * ROW + d) * q_i, 0) * scale_log2)
        p_i = tl.exp2(s_i - top_i)
        total_i = tl.sum(p_i, 0)
        o_i = tl.sum(p_i[:, None] * v, 0)  # [D]
        for e in tl.static_range(EXTRA):
            p_ie = tl.exp2(tl.sum(tl.load(k_base + e * ROW + d) * q_i, 0) * scale_log2 - top_i)
            total_i += p_ie
            o_i += p_ie * tl.load(v_base + e * ROW + d)
        tl.store(o_base + i * H * D + d, (o_i / total_i).to(v.dtype))
        tl.store(lse_base + i, top_i + tl.log2(total_i))

    for start in tl.range(EXTRA, N, BQ, num_stages=STAGES):
        rows = start + tl.arange(0, BQ)
        q = tl.load(q_base + rows[:, None] * ROW + d[None, :])  # [BQ, D]
        s = tl.dot(q, tl.trans(k)) * scale_log2  # [BQ, MAIN]
        top = tl.max(s, 1)
        for e in tl.static_range(EXTRA):
            s_e = tl.sum(q * tl.load(k_base + e * ROW + d).to(tl.float32)[None, :], 1) * scale_log2
            top = tl.maximum(top, s_e)
        p = tl.exp2(s - top[:, None])
        total = tl.sum(p, 1)
        o = tl.dot(p.to(v.dtype), v)  # [BQ, D]
        for e in tl.static_range(EXTRA):
            s_e = tl.sum(q * tl.load(k_base + e * ROW + d).to(tl.float32)[None, :], 1) * scale_log2
            p_e = tl.exp2(s_e - top)
            total += p_e
            o += p_e[:, None] * tl.load(v_base + e * ROW + d).to(tl.float32)[None, :]
        tl.store(o_base + rows[:, None] * (H * D) + d[None, :], (o / total[:, None]).to(v.dtype))
        tl.store(lse_base + rows, top + tl.log2(total))


@triton.jit
def attention_backward_queries(
    qkv,
    out,
    grad,
    lse,
    delta,
    dqkv,
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
    """One program: BQ queries of one head, or its extra ones, and all keys. Writes their dq, and delta = Σ do·out
    for the other kernel. p are probabilities, ds = p (dp - delta) the scores' gradients."""
    N: tl.constexpr = EXTRA + MAIN
    ROW: tl.constexpr = 3 * H * D
    PARTS: tl.constexpr = MAIN // BQ
    head, part = tl.program_id(0) // (PARTS + 1), tl.program_id(0) % (PARTS + 1)
    b, h = (head // H).to(tl.int64), head % H
    q_base, dq_base = qkv + b * N * ROW + h * D, dqkv + b * N * ROW + h * D
    k_base, v_base = q_base + H * D, q_base + 2 * H * D
    o_base, do_base = out + b * N * H * D + h * D, grad + b * N * H * D + h * D
    lse_base, delta_base = lse + head * N, delta + head * N
    d, keys = tl.arange(0, D), tl.arange(0, BK)
    if part < PARTS:
        rows = EXTRA + part * BQ + tl.arange(0, BQ)
        q = tl.load(q_base + rows[:, None] * ROW + d[None, :])  # [BQ, D]
        do = tl.load(do_base + rows[:, None] * (H * D) + d[None, :])
        o = tl.load(o_base + rows[:, None] * (H * D) + d[None, :])
        norm = tl.load(lse_base + rows)
        delta_q = tl.sum(do.to(tl.float32) * o, 1)
        tl.store(delta_base + rows, delta_q)
        dq = tl.zeros([BQ, D], tl.float32)
        for e in tl.static_range(EXTRA):
            k_e = tl.load(k_base + e * ROW + d).to(tl.float32)
            v_e = tl.load(v_base + e * ROW + d).to(tl.float32)
            p_e = tl.exp2(tl.sum(q * k_e[None, :], 1) * scale_log2 - norm)
            dq += (p_e * (tl.sum(do * v_e[None, :], 1) - delta_q))[:, None] * k_e[None, :]
        for first in tl.range(EXTRA, N, BK, num_stages=STAGES):
            at = (first + keys)[:, None] * ROW + d[None, :]
            k, v = tl.load(k_base + at), tl.load(v_base + at)  # [BK, D]
            p = tl.exp2(tl.dot(q, tl.trans(k)) * scale_log2 - norm[:, None])  # [BQ, BK]
            ds = p * (tl.dot(do, tl.trans(v)) - delta_q[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq)
        tl.store(dq_base + rows[:, None] * ROW + d[None, :], (dq * scale).to(q.dtype))
    else:
        for i in tl.static_range(EXTRA):
            q_i = tl.load(q_base + i * ROW + d).to(tl.float32)
            do_i = tl.load(do_base + i * H * D + d).to(tl.float32)
            norm_i = tl.load(lse_base + i)
            delta_i = tl.sum(do_i * tl.load(o_base + i * H * D + d), 0)
            tl.store(delta_base + i, delta_i)
            dq_i = tl.zeros([D], tl.float32)
            for e in tl.static_range(EXTRA):
                k_e = tl.load(k_base + e * ROW + d).to(tl.float32)
                p_ie = tl.exp2(tl.sum(k_e * q_i, 0) * scale_log2 - norm_i)
                dq_i += p_ie * (tl.sum(do_i * tl.load(v_base + e * ROW + d), 0) - delta_i) * k_e
            for first in tl.range(EXTRA, N, BK):
                at = (first + keys)[:, None] * ROW + d[None, :]
                k, v = tl.load(k_base + at).to(tl.float32), tl.load(v_base + at)
                p_i = tl.exp2(tl.sum(k * q_i[None, :], 1) * scale_log2 - norm_i)  # [BK]
                dq_i += tl.sum((p_i * (tl.sum(v * do_i[None, :], 1) - delta_i))[:, None] * k, 0)
            tl.store(dq_base + i * ROW + d, (dq_i * scale).to(qkv.dtype.element_ty))


@triton.jit
def attention_backward_keys(
    qkv,
    grad,
    lse,
    delta,
    dqkv,
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
    """One program: BK keys of one head, or its extra ones, and all queries. Writes their dk and dv. Scores are held
    transposed, [keys, queries], so that the keys are the rows of every product."""
    N: tl.constexpr = EXTRA + MAIN
    ROW: tl.constexpr = 3 * H * D
    PARTS: tl.constexpr = MAIN // BK
    head, part = tl.program_id(0) // (PARTS + 1), tl.program_id(0) % (PARTS + 1)
    b, h = (head // H).to(tl.int64), head % H
    q_base, do_base = qkv + b * N * ROW + h * D, grad + b * N * H * D + h * D
    k_base, v_base = q_base + H * D, q_base + 2 * H * D
    dk_base = dqkv + b * N * ROW + h * D + H * D
    dv_base = dk_base + H * D
    lse_base, delta_base = lse + head * N, delta + head * N
    d = tl.arange(0, D)
    if part < PARTS:
        at = (EXTRA + part * BK + tl.arange(0, BK))[:, None] * ROW + d[None, :]
        k, v = tl.load(k_base + at), tl.load(v_base + at)  # [BK, D]
        dk = tl.zeros([BK, D], tl.float32)
        dv = tl.zeros([BK, D], tl.float32)
        for i in tl.static_range(EXTRA):  # an extra token as a query
            q_i = tl.load(q_base + i * ROW + d).to(tl.float32)
            do_i = tl.load(do_base + i * H * D + d).to(tl.float32)
            p_i = tl.exp2(tl.sum(k * q_i[None, :], 1) * scale_log2 - tl.load(lse_base + i))  # [BK]
            ds_i = p_i * (tl.sum(v * do_i[None, :], 1) - tl.load(delta_base + i))
            dv += p_i[:, None] * do_i[None, :]
            dk += ds_i[:, None] * q_i[None, :]
        for start in tl.range(EXTRA, N, BQ, num_stages=STAGES):
            rows = start + tl.arange(0, BQ)
            q = tl.load(q_base + rows[:, None] * ROW + d[None, :])  # [BQ, D]
            do = tl.load(do_base + rows[:, None] * (H * D) + d[None, :])
            p = tl.exp2(tl.dot(k, tl.trans(q)) * scale_log2 - tl.load(lse_base + rows)[None, :])  # [BK, BQ]
            ds = p * (tl.dot(v, tl.trans(do)) - tl.load(delta_base + rows)[None, :])
            dv = tl.dot(p.to(k.dtype), do, dv)
            dk = tl.dot(ds.to(k.dtype), q, dk)
        tl.store(dk_base + at, (dk * scale).to(k.dtype))
        tl.store(dv_base + at, dv.to(k.dtype))
    else:
        for e in tl.static_range(EXTRA):
            k_e = tl.load(k_base + e * ROW + d).to(tl.float32)
            v_e = tl.load(v_base + e * ROW + d).to(tl.float32)
            dk_e = tl.zeros([D], tl.float32)
            dv_e = tl.zeros([D], tl.float32)
            for i in tl.static_range(EXTRA):
                q_i = tl.load(q_base + i * ROW + d).to(tl.float32)
                do_i = tl.load(do_base + i * H * D + d).to(tl.float32)
                p_ie = tl.exp2(tl.sum(k_e * q_i, 0) * scale_log2 - tl.load(lse_base + i))
                dk_e += p_ie * (tl.sum(do_i * v_e, 0) - tl.load(delta_base + i)) * q_i
                dv_e += p_ie * do_i
            for start in tl.range(EXTRA, N, BQ):
                rows = start + tl.arange(0, BQ)
                q = tl.load(q_base + rows[:, None] * ROW + d[None, :]).to(tl.float32)  # [BQ, D]
                do = tl.load(do_base + rows[:, None] * (H * D) + d[None, :]).to(tl.float32)
                p_e = tl.exp2(tl.sum(q * k_e[None, :], 1) * scale_log2 - tl.load(lse_base + rows))
                ds_e = p_e * (tl.sum(do * v_e[None, :], 1) - tl.load(delta_base + rows))
                dk_e += tl.sum(ds_e[:, None] * q, 0)
                dv_e += tl.sum(p_e[:, None] * do, 0)
            tl.store(dk_base + e * ROW + d, (dk_e * scale).to(qkv.dtype.element_ty))
            tl.store(dv_base + e * ROW + d, dv_e.to(qkv.dtype.element_ty))
