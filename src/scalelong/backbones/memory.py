"""How much memory a step needs: counted on tensors that take none, by following each one's birth and death."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StepBytes(NamedTuple):
    """Bytes of a forward and a backward pass, weights left out."""

    kept: int  # what the forward pass leaves for the backward pass
    peak: int  # at the fullest moment, gradients included


def step_bytes(
    build: Callable[[], nn.Module], inputs: Callable[[], tuple[Any, dict[str, Any]]], precision: str = "fp32"
) -> StepBytes:
    """Run `build()` on `inputs()` forward and back without memory, as an eager step with autocast would.

    A compiled step fuses operations and keeps less.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    autocast: Any = contextlib.nullcontext()
    if precision != "fp32":
        dtype = torch.bfloat16 if precision == "bf16" else torch.float16
        autocast = torch.autocast("cpu", dtype, cache_enabled=False)
    with torch.device("meta"):
        model = build().train()  # where initialisation may look at its values
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        if precision != "fp32":
            _norms_in_float32(model)
        arguments, given = inputs()
        with LiveBytes() as live:
            with autocast:
                prediction = model(*arguments, **given, return_dict=False)[0].float()
            loss = prediction.square().mean()
            del prediction
            kept = live.now
            loss.backward()
    return StepBytes(kept, live.peak)


def _norms_in_float32(model: nn.Module) -> None:
    """As a GPU's autocast has it; a CPU's leaves norms in the type that comes."""
    for module in model.modules():
        if isinstance(module, nn.GroupNorm | nn.LayerNorm):
            module.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(), *inputs[1:]))


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages that were made since it was entered and are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count the storages of its results that were not there before."""
        kwargs = kwargs or {}
        before = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and id(tensor.untyped_storage()) not in before:
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: Any) -> None:
        if storage in self.known:
            return
        self.known.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, size)

    def _remove(self, size: int) -> None:
        self.now -= size
