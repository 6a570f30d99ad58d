"""The calls of a model in one step, kept so that a non-finite one can be run again under watch.

Kept are references to the arguments, the state of the random generators and of autocast, and the gradient that came
back to the output. The second run leaves gradients, buffers and generators as they were.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.skips.apply import unwrapped
from scalelong.training.guard import (
    NOT_AGAIN,
    all_finite,
    first_bad_gradient,
    first_bad_output,
    first_bad_parameter,
    tensors_in,
)
from scalelong.training.hooks import Unkept
from scalelong.training.signals import in_training_forward

BAD_INPUT = "the input of the model is not finite already"
KEPT = 8  # calls of a step, the pieces of an accumulated batch: their inputs stay in memory
_CHANGED = "; but its input was changed in place since the call, which may have been what was not finite"


@dataclass(eq=False)
class Call:
    """One call in training, as it can be repeated."""

    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    versions: list[int]  # of the tensors among them, which count changes in place
    device: torch.device
    random: tuple[Tensor, Tensor | None]
    autocast: tuple[bool, torch.dtype | None]
    output_gradient: Tensor | None = None

    def was_changed(self) -> bool:
        """Whether its input is no longer what the model saw."""
        return _versions(self.arguments) != self.versions


class StepCalls:
    """Hooks on the model as the loop calls it, which keep the last calls of each step."""

    def __init__(self, model: nn.Module) -> None:
        self.model = unwrapped(model)
        self.calls: deque[Call] = deque(maxlen=KEPT)
        self.count = 0  # of the step's calls, kept or not
        self.fresh = False  # whether the calls are those of the present step
        self.running = False  # whether one is under way; neither sampling, nor what backward computes again
        self._repeating = False
        self._trains = self.model.training
        self._hooks = [
            model.register_forward_pre_hook(Unkept(self._before), with_kwargs=True),
            model.register_forward_hook(Unkept(self._after)),
        ]

    def close(self) -> None:
        """Take the hooks off and let the tensors go."""
        for hook in self._hooks:
            hook.remove()
        self.calls.clear()

    def watches(self) -> bool:
        """Whether a call of the model, or of a part of it, that begins now is one in training.

        A model that was ever in training mode is validated in the other; one that never was is trained in it.
        """
        if self._repeating or not in_training_forward():
            return False
        self._trains = self._trains or self.model.training
        return self.model.training == self._trains

    def trace(self, what: str) -> str:
        """Run the calls again, and say where what is not finite, the "loss" or the "gradient", comes from."""
        if not self.calls:
            unseen = "the model's call was not seen: give the monitor what the loop calls (torch.compile's result)"
            return "; ".join(filter(None, [unseen, self._bad_parameter()]))
        late = "" if self.fresh else "; seen on an earlier batch"
        for number, call in enumerate(self.calls, start=1 + self.count - len(self.calls)):
            if found := self._trace(call):
                place = f"in call {number} of the {self.count} in this step, " if self.count > 1 else ""
                return place + found + (_CHANGED if call.was_changed() else "") + late
        return self._outside_of_calls(what) + late

    def _trace(self, call: Call) -> str | None:
        """What is the first to be non-finite in one call, if anything is."""
        if any((t.isnan() | (t == torch.inf)).any() for t in tensors_in(call.arguments)):  # -inf is a mask's
            return BAD_INPUT
        with self._as_it_was():
            name, _ = first_bad_output(self.model, lambda: self._repeat(call))
            if name:
                return f"the first module with a non-finite output is {name}{self._whose_weights(name)}"
            if call.output_gradient is None:
                return None
            if not all_finite(call.output_gradient):
                return "every module's output is finite, and the loss gives a non-finite gradient to the model's"
            name = first_bad_gradient(self.model, lambda: self._backward(call))
            return f"the first module with a non-finite gradient is {name}" if name else self._bad_parameter()

    def _outside_of_calls(self, what: str) -> str:
        """What is left when no kept call makes anything non-finite."""
        changed = _CHANGED if any(call.was_changed() for call in self.calls) else ""
        if self.count > len(self.calls):
            return (
                f"none of the last {len(self.calls)} calls of the model made it: one of the {self.count} in this "
                f"step before them did, or the loss itself{changed}"
            )
        if what == "loss":
            return "every module's output is finite, so the target or the loss itself is not" + changed
        if not (found := self._bad_parameter()):
            return NOT_AGAIN + changed
        repeated = all(call.output_gradient is not None for call in self.calls)
        return found + (", and finite when repeated: a hook, clipping or another loss made it" * repeated) + changed

    def _bad_parameter(self) -> str | None:
        name = first_bad_parameter(self.model)
        return f"the first non-finite gradient is that of {name}" if name else None

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.running = self.watches()
        if not self.running:
            return
        if not self.fresh:
            self.calls.clear()
            self.count = 0
        self.fresh = True
        self.count += 1
        # Asked of each call: Lightning moves a model to its device after the monitor was made.
        inputs = list(tensors_in((args, kwargs)))
        device = inputs[0].device if inputs else next(self.model.parameters()).device
        random = torch.get_rng_state(), _cuda_random(device)
        enabled = torch.is_autocast_enabled(device.type)
        autocast = enabled, torch.get_autocast_dtype(device.type) if enabled else None
        self.calls.append(Call((args, kwargs), _versions(inputs), device, random, autocast))

    def _after(self, model: nn.Module, args: Any, output: Any) -> None:
        if self.running and (tensor := next(tensors_in(output), None)) is not None and tensor.requires_grad:
            tensor.register_hook(_keeper(self.calls[-1]))
        self.running = False

    def _repeat(self, call: Call) -> Any:
        torch.set_rng_state(call.random[0])
        if call.random[1] is not None:
            torch.cuda.set_rng_state(call.random[1], call.device)
        enabled, dtype = call.autocast
        with torch.autocast(call.device.type, dtype, enabled=enabled):
            return self.model(*call.arguments[0], **call.arguments[1])

    def _backward(self, call: Call) -> None:
        next(tensors_in(self._repeat(call))).backward(call.output_gradient)

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        gradients = [(p, p.grad) for p in self.model.parameters()]
        buffers = [(b, b.clone()) for b in self.model.buffers()]
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=self._gpus()))
            stack.enter_context(torch.compiler.set_stance("force_eager"))  # a compiled graph calls no hooks
            stack.enter_context(torch.enable_grad())
            for p, _ in gradients:
                p.grad = None
            self._repeating = True
            try:
                yield
            finally:
                self._repeating = False
                for p, gradient in gradients:
                    p.grad = gradient
                with torch.no_grad():
                    for buffer, before in buffers:
                        buffer.copy_(before)

    def _gpus(self) -> list[torch.device]:
        return sorted({p.device for p in self.model.parameters() if p.is_cuda}, key=str)

    def _whose_weights(self, name: str) -> str:
        """An earlier update may have spoiled the module itself."""
        module = dict(self.model.named_modules()).get(name, self.model)
        bad = [key for key, p in module.named_parameters(recurse=False) if not p.isfinite().all()]
        return f", whose own {' and '.join(bad)} {'is' if len(bad) == 1 else 'are'} not finite" if bad else ""


def _cuda_random(device: torch.device) -> Tensor | None:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _keeper(call: Call) -> Callable[[Tensor], None]:
    """A hook for the output that does not keep the call: a loop may hold its losses, and with them their graphs."""
    there = weakref.ref(call)

    def keep(gradient: Tensor) -> None:
        if (call := there()) is not None:
            call.output_gradient = gradient.detach()

    return keep


def _versions(arguments: Any) -> list[int]:
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors_in(arguments)]
