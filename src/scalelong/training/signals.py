"""Live stability signals of one step: norms at every skip, gradient norms per block, gate means.

Observed every `train.monitor_every` steps with hooks that live for that step alone, so that the others pay nothing.
The oscillation index of a signal x over its last 20 values is Σ|x_i - x_(i-1)| / Σ|x_i|: 0 for a constant, √2 for
independent normal values around 0, 2 for one that changes its sign each time.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.skips.apply import scaling_of
from scalelong.skips.attach import adapter_for
from scalelong.skips.scalers import FixedScale
from scalelong.skips.sites import LongSkip
from scalelong.training.hooks import Unkept
from scalelong.training.sharding import whole
from scalelong.world import World

Signals = dict[str, float]
_WINDOW = 20


class Observer:
    """Watches the merges of a model's skips during one step, in the calls for which `watches` is true."""

    def __init__(self, model: nn.Module, watches: Callable[[], bool] | None = None) -> None:
        self.model = model
        self.watches = watches or in_training_forward
        self.adapter = adapter_for(model)
        self.skips = self.adapter.find(model)
        # One value per piece of the batch: squares of norms, and means.
        self.squares: dict[str, list[Tensor]] = defaultdict(list)
        self.means: dict[str, list[Tensor]] = defaultdict(list)
        self.names: list[str] = []
        self.values = torch.zeros(0)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hooks on every merging block and every gate, for as long as the block lasts."""
        handle = scaling_of(self.model)
        with ExitStack() as stack:
            for skip in self.skips:
                hook = skip.block.register_forward_pre_hook(Unkept(self._see_merge(skip)), with_kwargs=True)
                stack.callback(hook.remove)
            for index, scale in enumerate(handle.scales if handle else []):
                if isinstance(scale, FixedScale):
                    self.means[f"coefficient/{index}"].append(torch.full((), scale.value, device=self._device()))
                else:
                    stack.callback(scale.register_forward_hook(Unkept(self._see_gate(index))).remove)
            yield

    def _see_merge(self, skip: LongSkip) -> Any:
        def see(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            if not self.watches():
                return
            with torch.no_grad():
                main, part = self.adapter.merge_inputs(skip, args, kwargs)
                self.squares[f"skip norm/{skip.index}"].append(part.float().square().sum())
                self.squares[f"main norm/{skip.index}"].append(main.float().square().sum())

        return see

    def _see_gate(self, index: int) -> Any:
        def see(_: nn.Module, args: Any, output: Tensor) -> None:
            if self.watches():
                self.means[f"coefficient/{index}"].append(output.detach().float().mean())

        return see

    @torch.no_grad()
    def measure(self, world: World | None = None, *, blocks: bool = True) -> None:
        """Put what was seen, and the norms of the gradients that are there now, into one vector on the device.

        A skip whose hooks were not called, inside of a compiled graph, is left out.
        What was seen is of the whole batch: of all its pieces, and of all processes. `blocks=False` leaves out the
        gradients of all blocks, for those who have them already.
        """
        world = world or World()
        values: dict[str, Tensor] = {}
        if self.squares:
            squares = world.sum(torch.stack([torch.stack(pieces).sum() for pieces in self.squares.values()]))
            values |= dict(zip(self.squares, squares.sqrt(), strict=True))
        if self.means:
            means = world.mean(torch.stack([torch.stack(pieces).mean() for pieces in self.means.values()]))
            values |= dict(zip(self.means, means, strict=True))
        for skip in self.skips:
            if (norm := values.get(f"skip norm/{skip.index}")) is not None:
                values[f"skip to main/{skip.index}"] = norm / values[f"main norm/{skip.index}"]
        for skip in self.skips:
            if gradients := [p.grad for p in skip.block.parameters() if p.grad is not None]:
                values[f"merge gradient/{skip.index}"] = total_norm(gradients).float()
        if blocks:
            values |= {f"gradient/{block}": norm for block, norm in gradient_norms(self.model).items()}
        self.forget()
        self.names = list(values)
        self.values = torch.stack([v.float().reshape(()) for v in values.values()]) if values else torch.zeros(0)

    def forget(self) -> None:
        """Let go of what was seen and not measured."""
        self.means.clear()
        self.squares.clear()

    def signals(self) -> Signals:
        """The last measurement: one transfer from the device."""
        return dict(zip(self.names, self.values.tolist(), strict=True))

    def _device(self) -> torch.device:
        return next(self.model.parameters()).device


def in_training_forward() -> bool:
    """Neither sampling, nor the second pass of checkpointed activations on the way back.

    The compiler finds a constant here, and leaves out the hooks that ask.
    """
    if torch.compiler.is_compiling():
        return False
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1


def block_of(name: str) -> str:
    """The block that a parameter belongs to: the first part of its name, with its number (`in_blocks.3`)."""
    parts = name.split(".")
    return ".".join(parts[:2]) if len(parts) > 1 and parts[1].isdigit() else parts[0]


def gradient_norms(model: nn.Module) -> dict[str, Tensor]:
    """‖∇‖ of each block."""
    groups: dict[str, list[Tensor]] = defaultdict(list)
    for name, p in model.named_parameters():
        if p.grad is not None:
            groups[block_of(name)].append(p.grad)
    return {block: total_norm(grads).float() for block, grads in groups.items()}


def total_norm(gradients: list[Tensor]) -> Tensor:
    """The norm of all gradients together; of whole ones, where processes hold parts."""
    return whole(torch.nn.utils.get_total_norm(gradients))


class Oscillation:
    """The oscillation index of each signal over its last 20 values."""

    def __init__(self) -> None:
        self.history: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_WINDOW))

    def state(self) -> dict[str, list[float]]:
        """What a checkpoint keeps."""
        return {name: list(values) for name, values in self.history.items()}

    def load(self, state: Mapping[str, list[float]]) -> None:
        """Go on from a checkpoint."""
        for name, values in state.items():
            self.history[name].extend(values)

    def update(self, signals: Signals) -> Signals:
        """Take the newest values and return the index of each signal that has at least three."""
        for name, value in signals.items():
            self.history[name].append(value)
        return {name: oscillation_index(list(h)) for name, h in self.history.items() if len(h) >= 3}


def oscillation_index(values: list[float]) -> float:
    """Σ|x_i - x_(i-1)| / Σ|x_i|, over the same i."""
    steps = sum(abs(b - a) for a, b in pairwise(values))
    size = sum(abs(b) for b in values[1:])
    return steps / size if size else 0.0
