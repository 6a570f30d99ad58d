"""Where our kernels can run."""

from __future__ import annotations

import importlib.util
from typing import TypeGuard

import torch
from torch import Tensor, nn


def kernels_run_on(tensor: Tensor) -> bool:
    """On an NVIDIA GPU of Ampere or newer with Triton installed, in half precision."""
    return tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16) and _machine_has_kernels()


def is_plain_linear(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a layer does nothing but weight·x + bias: nobody wraps, hooks or replaces its call."""
    if type(layer) is not nn.Linear or layer.bias is None or "forward" in vars(layer):
        return False
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return not any(hooks)


@torch.compiler.assume_constant_result  # as below
def has_large_shared_memory() -> bool:
    """Room for a whole head's keys and values: 160 KiB and more on A100, H100 and B200; others have 99."""
    return torch.cuda.get_device_capability() in ((8, 0), (9, 0), (10, 0), (10, 3))


@torch.compiler.assume_constant_result  # the compiler cannot look into it, and need not
def _machine_has_kernels() -> bool:
    if importlib.util.find_spec("triton") is None or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability() >= (8, 0)
