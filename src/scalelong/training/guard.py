"""A non-finite loss or gradient stops the run before the optimiser, and is traced to the module that made it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.training.sharding import let_go, part

NOT_AGAIN = "it did not happen again when repeated"


class NonFiniteError(FloatingPointError):
    """Training met a NaN or an infinity. `advice` ends the message; by default it is the trainer's."""

    def __init__(self, step: int, what: str, culprit: str, advice: str = "") -> None:
        advice = advice or (
            f"The weights are those of step {step}, before the bad update. A branch goes on from there "
            "(scalelong train --branch RUN --out NEW) with a lower train.lr, train.clip_norm=1 or bf16 in place of "
            "fp16; if that fails at once, they are ruined already, and a new run is needed."
        )
        super().__init__(f"step {step}: the {what} is not finite; {culprit}. {advice}")
        self.step = step
        self.what = what
        self.culprit = culprit
        self.advice = advice

    def as_dict(self) -> dict[str, Any]:
        """For the log of the training that it ended."""
        return {"step": self.step, "what": self.what, "culprit": self.culprit, "error": str(self)}

    def __reduce__(self) -> tuple[type[NonFiniteError], tuple[int, str, str, str]]:
        # A comparison's runs are processes of their own: the error must arrive whole.
        return type(self), (self.step, self.what, self.culprit, self.advice)


def find_culprit(model: nn.Module, loss: Callable[[], Tensor], anywhere: Callable[[bool], bool] = bool) -> str:
    """Run the step again under watch, and name the first module whose output or gradient is not finite.

    `anywhere` tells whether something is true in any process: they stop looking together, as each may need the
    others to go on.
    """
    maker, value = first_bad_output(model, loss)
    let_go(model)
    stopped = anywhere(maker is not None or not value.isfinite())
    if maker:
        return f"the first module with a non-finite output is {maker}"
    if not value.isfinite():
        return "every module's output is finite, so the target or the loss itself is not"
    if stopped:
        return NOT_AGAIN
    model.zero_grad()
    maker = first_bad_gradient(model, lambda: loss().backward())
    bad = first_bad_parameter(model)
    model.zero_grad()
    made_by_a_module = anywhere(maker is not None)
    if maker:
        return f"the first module with a non-finite gradient is {maker}"
    # A process that holds parts of the weights has parts of all gradients, those that another one spoilt too.
    return f"the first non-finite gradient is that of {bad}" if bad and not made_by_a_module else NOT_AGAIN


def first_bad_output(model: nn.Module, run: Callable[[], Any]) -> tuple[str | None, Any]:
    """Run without gradient: the first module whose output is not finite, and what the run returned."""
    names = _names(model)
    found: list[str] = []

    def look(module: nn.Module, args: Any, output: Any) -> None:
        if not found and not all_finite(output):
            found.append(names[module])

    with ExitStack() as stack:
        for module in names:
            stack.callback(module.register_forward_hook(look).remove)
        with torch.no_grad():
            value = run()
    return (found[0] if found else None), value


def first_bad_gradient(model: nn.Module, run: Callable[[], Any]) -> str | None:
    """Run a backward pass: the first module that got a finite gradient and gave a non-finite one."""
    names = _names(model)
    found: list[str] = []

    def look(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        if not found and not all_finite(grad_input) and all_finite(grad_output):
            found.append(names[module])

    with ExitStack() as stack:
        for module in names:
            stack.callback(module.register_full_backward_hook(look).remove)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # torch's remarks on hooks at the edges of the graph
        run()
    return found[0] if found else None


def first_bad_parameter(model: nn.Module) -> str | None:
    """Of the parameters whose gradient is not finite, the last, which the backward pass came to first."""
    gradients = ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
    bad = [name for name, gradient in gradients if not part(gradient).isfinite().all()]
    return bad[-1] if bad else None


def _names(model: nn.Module) -> dict[nn.Module, str]:
    return {module: name or type(model).__name__ for name, module in model.named_modules()}


def all_finite(value: Any) -> bool:
    """Whether all floating tensors of a value are finite."""
    return all(bool(tensor.isfinite().all()) for tensor in tensors_in(value))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The floating tensors of a module's output, or of its arguments."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
        return
    inner: Iterable[Any] = ()
    if isinstance(value, Mapping):
        inner = value.values()
    elif isinstance(value, (tuple, list)):
        inner = value
    for item in inner:
        yield from tensors_in(item)
