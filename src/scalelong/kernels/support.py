"""Where our kernels can run."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor


def kernels_run_on(tensor: Tensor) -> bool:
    """On an NVIDIA GPU of Ampere or newer with Triton installed, in half precision."""
    return tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16) and _machine_has_kernels()


@torch.compiler.assume_constant_result  # the compiler cannot look into it, and need not
def _machine_has_kernels() -> bool:
    if importlib.util.find_spec("triton") is None or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability() >= (8, 0)
