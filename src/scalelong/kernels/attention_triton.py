"""Attention over 2^k tokens and a few more, as Triton kernels.

U-ViT has 256 patches and, before them, one or two extra tokens. Kernels that walk over tiles of 128 keys spend a
third of their work on padding there. Here a row of scores over the patches is one tile on the matrix units, one
program has all keys of a head at hand, and the extra tokens are sums over vectors. Softmax is in base 2, as the
hardware's exponential is. Tensors are packed as the linear layer before left them: [B, N, 3, H, D].
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
def attention_backward(
    qkv,
    out,
    grad,
    lse,
    dqkv,
    scale,
    scale_log2,
    H: tl.constexpr,
    D: tl.constexpr,
    EXTRA: tl.constexpr,
    MAIN: tl.constexpr,
    BQ: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program: one head. Scores are held transposed, [keys, queries], so that the keys are the rows of every
    product that accumulates. p are probabilities, ds = p (dp - delta) the scores' gradients."""
    N: tl.constexpr = EXTRA + MAIN
    ROW: tl.constexpr = 3 * H * D
    head = tl.program_id(0)
    b, h = (head // H).to(tl.int64), head % H
    q_base, dq_base = qkv + b * N * ROW + h * D, dqkv + b * N * ROW + h * D
    k_base, v_base = q_base + H * D, q_base + 2 * H * D
    dk_base, dv_base = dq_base + H * D, dq_base + 2 * H * D
    o_base, do_base = out + b * N * H * D + h * D, grad + b * N * H * D + h * D
    lse_base = lse + head * N
    d = tl.arange(0, D)
    main = EXTRA + tl.arange(0, MAIN)

    # An extra token as a key. It comes first: later the sums of all other keys fill the registers.
    for e in tl.static_range(EXTRA):
        k_j = tl.load(k_base + e * ROW + d).to(tl.float32)
        v_j = tl.load(v_base + e * ROW + d).to(tl.float32)
        q_all = tl.load(q_base + main[:, None] * ROW + d[None, :]).to(tl.float32)
        do_all = tl.load(do_base + main[:, None] * (H * D) + d[None, :]).to(tl.float32)
        o_all = tl.load(o_base + main[:, None] * (H * D) + d[None, :])
        p_j = tl.exp2(tl.sum(q_all * k_j[None, :], 1) * scale_log2 - tl.load(lse_base + main))  # [MAIN]
        ds_j = p_j * tl.sum(do_all * (v_j[None, :] - o_all), 1)
        dk_j = tl.sum(ds_j[:, None] * q_all, 0)
        dv_j = tl.sum(p_j[:, None] * do_all, 0)
        for i in tl.static_range(EXTRA):
            q_i = tl.load(q_base + i * ROW + d).to(tl.float32)
            do_i = tl.load(do_base + i * H * D + d).to(tl.float32)
            p_ij = tl.exp2(tl.sum(k_j * q_i, 0) * scale_log2 - tl.load(lse_base + i))
            dk_j += p_ij * tl.sum(do_i * (v_j - tl.load(o_base + i * H * D + d)), 0) * q_i
            dv_j += p_ij * do_i
        tl.store(dk_base + e * ROW + d, (dk_j * scale).to(qkv.dtype.element_ty))
        tl.store(dv_base + e * ROW + d, dv_j.to(qkv.dtype.element_ty))

    k = tl.load(k_base + main[:, None] * ROW + d[None, :])  # [MAIN, D]
    v = tl.load(v_base + main[:, None] * ROW + d[None, :])
    dk = tl.zeros([MAIN, D], tl.float32)
    dv = tl.zeros([MAIN, D], tl.float32)
    for i in tl.static_range(EXTRA):  # an extra token as a query
        q_i = tl.load(q_base + i * ROW + d).to(tl.float32)
        do_i = tl.load(do_base + i * H * D + d).to(tl.float32)
        delta_i = tl.sum(do_i * tl.load(o_base + i * H * D + d), 0)
        norm_i = tl.load(lse_base + i)
        p_i = tl.exp2(tl.sum(k * q_i[None, :], 1) * scale_log2 - norm_i)  # [MAIN]
        ds_i = p_i * (tl.sum(v * do_i[None, :], 1) - delta_i)
        dv += p_i[:, None] * do_i[None, :]
        dk += ds_i[:, None] * q_i[None, :]
        dq_i = tl.sum(ds_i[:, None] * k, 0)
        for e in tl.static_range(EXTRA):
            k_i = tl.load(k_base + e * ROW + d).to(tl.float32)
            p_ie = tl.exp2(tl.sum(k_i * q_i, 0) * scale_log2 - norm_i)
            dq_i += p_ie * (tl.sum(do_i * tl.load(v_base + e * ROW + d), 0) - delta_i) * k_i
        tl.store(dq_base + i * ROW + d, (dq_i * scale).to(k.dtype))

    for start in tl.range(EXTRA, N, BQ, num_stages=STAGES):
        rows = start + tl.arange(0, BQ)
        q = tl.load(q_base + rows[:, None] * ROW + d[None, :])  # [BQ, D]
        do = tl.load(do_base + rows[:, None] * (H * D) + d[None, :])
        o = tl.load(o_base + rows[:, None] * (H * D) + d[None, :])
        norm = tl.load(lse_base + rows)
        delta = tl.sum(do.to(tl.float32) * o, 1)  # [BQ]
        p = tl.exp2(tl.dot(k, tl.trans(q)) * scale_log2 - norm[None, :])  # [MAIN, BQ]
        ds = (p * (tl.dot(v, tl.trans(do)) - delta[None, :])).to(k.dtype)
        dv = tl.dot(p.to(k.dtype), do, dv)
        dk = tl.dot(ds, q, dk)
        dq = tl.dot(tl.trans(k), ds)  # [D, BQ]
        dq = tl.trans(dq)
        for e in tl.static_range(EXTRA):
            k_e = tl.load(k_base + e * ROW + d).to(tl.float32)
            v_e = tl.load(v_base + e * ROW + d).to(tl.float32)
            p_e = tl.exp2(tl.sum(q * k_e[None, :], 1) * scale_log2 - norm)
            ds_e = p_e * (tl.sum(do * v_e[None, :], 1) - delta)
            dq += ds_e[:, None] * k_e[None, :]
        tl.store(dq_base + rows[:, None] * ROW + d[None, :], (dq * scale).to(k.dtype))
    tl.store(dk_base + main[:, None] * ROW + d[None, :], (dk * scale).to(k.dtype))
    tl.store(dv_base + main[:, None] * ROW + d[None, :], dv.to(k.dtype))
