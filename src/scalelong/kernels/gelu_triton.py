"""GELU with the bias before it, as Triton kernels: each tensor is read once and written once.

Φ is Abramowitz and Stegun 7.1.26, to 1.5e-7 and without cancellation on the left: far below bf16's rounding, and
cheap enough that memory is the limit, which the library's erf is not.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _cumulative_and_density(x):
    """Φ(x), and φ(x)·√(2π)."""
    t = 1.0 / (1.0 + 0.23164190 * tl.abs(x))  # p/√2
    bell = tl.exp2(x * x * -0.72134752)  # e^(-x²/2)
    tail = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))))
    tail = tail * bell
    return tl.where(x < 0, tail, 1.0 - tail), bell


@triton.jit
def bias_gelu_forward(hidden, bias, out, size, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """out = gelu(hidden + bias), both [R, COLUMNS] of `size` numbers."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = i < size
    x = tl.load(hidden + i, mask=here, other=0.0).to(tl.float32) + tl.load(bias + i % COLUMNS).to(tl.float32)
    cumulative, _ = _cumulative_and_density(x)
    tl.store(out + i, (x * cumulative).to(out.dtype.element_ty), mask=here)


@triton.jit
def bias_gelu_backward(
    hidden,
    bias,
    grad,
    d_hidden,
    partial,
    rows,
    COLUMNS: tl.constexpr,
    BC: tl.constexpr,
    BR: tl.constexpr,
    REPEAT: tl.constexpr,
):
    """d_hidden = grad · gelu'(hidden + bias), and its sum over this program's BR·REPEAT rows into `partial`."""
    columns = tl.program_id(1) * BC + tl.arange(0, BC)
    first = tl.program_id(0) * (BR * REPEAT)
    offset = tl.load(bias + columns).to(tl.float32)
    total = tl.zeros([BC], tl.float32)
    for step in tl.static_range(REPEAT):  # unrolled: several loads are under way at once
        r = first + step * BR + tl.arange(0, BR)
        where = r[:, None].to(tl.int64) * COLUMNS + columns[None, :]
        here = r[:, None] < rows
        x = tl.load(hidden + where, mask=here, other=0.0).to(tl.float32) + offset[None, :]
        cumulative, bell = _cumulative_and_density(x)
        slope = cumulative + x * bell * 0.39894228
        d = tl.load(grad + where, mask=here, other=0.0).to(tl.float32) * slope
        tl.store(d_hidden + where, d.to(d_hidden.dtype.element_ty), mask=here)
        total += tl.sum(d, 0)
    tl.store(partial + tl.program_id(0) * COLUMNS + columns, total)
