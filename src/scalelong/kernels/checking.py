"""Kernels are compared with their definition where they run, before their first use: a compiler's fault shows in no
loss. With one of Triton 3.6 all was right but the gradients of attention's first token."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

# Rounding alone makes up to 0.0072 of a row in bfloat16, 0.0011 in float16 (attention's, emulated).
_TOLERANCES = {torch.bfloat16: 0.02, torch.float16: 0.004, torch.float32: 1e-4}
_verdicts: dict[tuple[object, ...], bool] = {}


def agrees(
    what: str,
    asked: tuple[object, ...],
    device: str,
    backward: bool,
    error: Callable[[bool], float],
    dtype: torch.dtype,
) -> bool:
    """Whether the kernels for `what` compute it on this device with this Triton; where they do not, it is told.

    `error(backward)` is their largest relative error, that of gradients too if asked; it is worked out once. What
    is wrong on the way back is not used on the way there either.
    """
    for both in (True, backward):
        if (verdict := _verdicts.get((what, *asked, device, both))) is not None:
            return verdict
    if device.startswith("cuda") and torch.cuda.is_current_stream_capturing():
        return False  # there nothing can be looked at: a graph that is captured unasked has torch's operators
    # Nothing of this is seen by whoever traces, counts or saves for the way back what the model does.
    try:
        with _disable_current_modes(), torch.no_grad(), torch.autocast(device.partition(":")[0], enabled=False):
            found = _fault(error, backward, _TOLERANCES[dtype])
    except torch.OutOfMemoryError:  # a compiler that asks would make it an error of its own
        warnings.warn(
            f"scalelong's kernels for {what} could not be compared with their definition on {device}, which has no "
            "memory left: torch's run in their place for now, which is slower.",
            stacklevel=2,
        )
        return False
    if found:
        import triton

        warnings.warn(
            f"scalelong's kernels for {what} {found} on {device} ({', '.join(map(str, asked))}; Triton "
            f"{triton.__version__}): torch's run in their place, which is slower. Another version of Triton may "
            "help; please report it.",
            stacklevel=2,
        )
    _verdicts[what, *asked, device, backward] = not found
    return not found


def _fault(error: Callable[[bool], float], backward: bool, tolerance: float) -> str:
    try:
        size = error(backward)
    except torch.OutOfMemoryError:
        raise
    except Exception as refused:  # whatever a compiler or a driver says
        return f"cannot be run ({type(refused).__name__}: {str(refused).partition(chr(10))[0]})"
    return "" if size < tolerance else f"are off by {size:.2g}"


def largest_error(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """Of rows, the last dimension, relative to the exact row beside it: one that is wrong by itself would hardly
    show in a norm of all. NaN where there is one."""
    errors = [(found.double() - exact).norm(dim=-1) / exact.norm(dim=-1) for found, exact in pairs]
    return float(torch.stack([each.max() for each in errors]).max())
