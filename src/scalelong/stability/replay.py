"""The last call of a model, kept so that a non-finite step can be run again under watch.

Kept are references to the arguments, the state of the random generators and of autocast, and the gradient that came
back to the output. The second run leaves gradients, buffers and generators as they were.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.skips.apply import unwrapped
from scalelong.stability.hooks import Unkept
from scalelong.training.guard import NOT_AGAIN, all_finite, first_bad_gradient, first_bad_output, tensors_in
from scalelong.training.signals import in_training_forward


class LastCall:
    """Hooks on the model as the loop calls it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = unwrapped(model)
        self.device = next(model.parameters()).device
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.output_gradient: Tensor | None = None
        self.fresh = False  # whether the call is that of the present step
        self.running = False  # whether it is under way; neither sampling, nor what backward computes again
        self._hooks = [
            model.register_forward_pre_hook(Unkept(self._before), with_kwargs=True),
            model.register_forward_hook(Unkept(self._after)),
        ]

    def close(self) -> None:
        """Take the hooks off and let the tensors go."""
        for hook in self._hooks:
            hook.remove()
        self.arguments = self.output_gradient = None

    def trace(self) -> str:
        """Run the call again, and say which module is the first with a non-finite output or gradient."""
        if self.arguments is None:
            return (
                "the model's last call was not seen: give the monitor what the loop calls (torch.compile's result)"
            )
        if not all_finite(self.arguments):
            return "the input of the model is not finite already"
        return self._trace() + ("" if self.fresh else "; seen on an earlier batch")

    def _trace(self) -> str:
        with self._as_it_was():
            name, _ = first_bad_output(self.model, self._call)
            if name:
                return f"the first module with a non-finite output is {name}{self._whose_weights(name)}"
            if self.output_gradient is None:
                return "every module's output is finite, so the target or the loss itself is not"
            if not all_finite(self.output_gradient):
                return "every module's output is finite, and the loss gives a non-finite gradient to the model's"
            name = first_bad_gradient(self.model, self._backward)
        return f"the first module with a non-finite gradient is {name}" if name else NOT_AGAIN

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.running = in_training_forward()
        if self.running:
            self.arguments, self.output_gradient, self.fresh = (args, kwargs), None, True
            self._random = torch.get_rng_state(), _cuda_random(self.device)
            enabled = torch.is_autocast_enabled(self.device.type)
            self._autocast = enabled, torch.get_autocast_dtype(self.device.type) if enabled else None

    def _after(self, model: nn.Module, args: Any, output: Any) -> None:
        if self.running and (tensor := next(tensors_in(output), None)) is not None and tensor.requires_grad:
            tensor.register_hook(self._keep_gradient)
        self.running = False

    def _keep_gradient(self, gradient: Tensor) -> None:
        self.output_gradient = gradient.detach()

    def _call(self) -> Any:
        assert self.arguments is not None
        torch.set_rng_state(self._random[0])
        if self._random[1] is not None:
            torch.cuda.set_rng_state(self._random[1], self.device)
        enabled, dtype = self._autocast
        with torch.autocast(self.device.type, dtype, enabled=enabled):
            return self.model(*self.arguments[0], **self.arguments[1])

    def _backward(self) -> None:
        gradient = self.output_gradient  # the call to come is a call as well
        next(tensors_in(self._call())).backward(gradient)

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
            try:
                yield
            finally:
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
