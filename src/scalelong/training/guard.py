"""A non-finite loss or gradient stops the run before the optimiser, and is traced to the module that made it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.training.sharding import let_go, part

NOT_AGAIN = "it did not happen again when repeated"


class NonFiniteError(FloatingPointError):
    """Training met a NaN or an infinity. Nothing was updated with it."""

    def __init__(self, step: int, what: str, culprit: str) -> None:
        super().__init__(
            f"step {step}: the {what} is not finite; {culprit}. The weights are those of step {step}, before the "
            "bad update. A lower train.lr, train.clip_norm=1, bf16 in place of fp16 or a skip scaling may help."
        )
        self.step = step
        self.what = what
        self.culprit = culprit

    def __reduce__(self) -> tuple[type[NonFiniteError], tuple[int, str, str]]:
        # A comparison's runs are processes of their own: the error must arrive whole.
        return type(self), (self.step, self.what, self.culprit)


def find_culprit(model: nn.Module, loss: Callable[[], Tensor], anywhere: Callable[[bool], bool] = bool) -> str:
    """Run the step again under watch, and name the first module whose output or gradient is not finite.

    `anywhere` tells whether something is true in any process: they stop looking together, as each may need the
    others to go on.
    """
    names = {module: name or type(model).__name__ for name, module in model.named_modules()}
    forward: list[str] = []
    backward: list[str] = []

    def after_forward(module: nn.Module, args: Any, output: Any) -> None:
        if not forward and not _finite(output):
            forward.append(names[module])

    def after_backward(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        if not backward and not _finite(grad_input) and _finite(grad_output):
            backward.append(names[module])

    with ExitStack() as stack:
        for module in names:
            stack.callback(module.register_forward_hook(after_forward).remove)
        with torch.no_grad():
            value = loss()
        let_go(model)
    stopped = anywhere(bool(forward) or not value.isfinite())
    if forward:
        return f"the first module with a non-finite output is {forward[0]}"
    if not value.isfinite():
        return "every module's output is finite, so the target or the loss itself is not"
    if stopped:
        return NOT_AGAIN
    model.zero_grad()
    with ExitStack() as stack:
        for module in names:
            stack.callback(module.register_full_backward_hook(after_backward).remove)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # torch's remarks on hooks at the edges of the graph
        loss().backward()
    bad = [name for name, p in model.named_parameters() if p.grad is not None and not part(p.grad).isfinite().all()]
    model.zero_grad()
    made_by_a_module = anywhere(bool(backward))
    if backward:
        return f"the first module with a non-finite gradient is {backward[0]}"
    # A process that holds parts of the weights has parts of all gradients, those that another one spoilt too.
    return f"the first non-finite gradient is that of {bad[-1]}" if bad and not made_by_a_module else NOT_AGAIN


def _finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(value.isfinite().all())
    if isinstance(value, dict):
        return all(_finite(v) for v in value.values())
    if isinstance(value, (tuple, list)):
        return all(_finite(v) for v in value)
    return True
