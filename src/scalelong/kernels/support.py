"""Where our kernels can run."""

from __future__ import annotations

import importlib.util
from typing import TypeGuard, TypeVar

import torch
from torch import Tensor, nn

_Layer = TypeVar("_Layer", nn.Linear, nn.Conv2d)


def kernels_run_on(tensor: Tensor) -> bool:
    """On an NVIDIA GPU of Ampere or newer with Triton installed, in half precision, for a plain backward pass.

    A tensor of another kind (a part of one, or one without storage) is torch's matter.
    """
    half = tensor.dtype in (torch.bfloat16, torch.float16)
    return (
        type(tensor) is Tensor
        and tensor.is_cuda
        and half
        and _machine_has_kernels(tensor.device.index)
        and _first_derivatives_suffice()
    )


def is_plain(layer: nn.Module, kind: type[_Layer]) -> TypeGuard[_Layer]:
    """Whether a linear layer or convolution does nothing but weight·x + bias: nobody wraps, hooks or replaces its
    call."""
    if type(layer) is not kind or layer.bias is None or "forward" in layer.__dict__:
        return False
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return not any(hooks)


@torch.compiler.assume_constant_result  # as below
def has_large_shared_memory(device: int) -> bool:
    """Room for a whole head's keys and values: 160 KiB and more on A100, H100 and B200; others have 99."""
    return torch.cuda.get_device_capability(device) in ((8, 0), (9, 0), (10, 0), (10, 3))


@torch.compiler.assume_constant_result  # the compiler cannot look into it, and need not
def _machine_has_kernels(device: int) -> bool:
    if importlib.util.find_spec("triton") is None or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


@torch.compiler.assume_constant_result
def _first_derivatives_suffice() -> bool:
    """Whether nobody asks for what our operators lack: forward-mode, batched and second derivatives.

    The first come through torch.func and forward_ad; who wants second ones turns fused attention off.
    """
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    forward_mode = torch.autograd.forward_ad._current_level >= 0
    return not transformed and not forward_mode and torch.backends.cuda.flash_sdp_enabled()
