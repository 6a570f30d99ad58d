"""What every step shows at little cost: the loss, each block's output, gradient and update, each skip's gate.

All of it is a vector on the device. Blocks are those of `gradient_norms`, `in_blocks.3` or `up_blocks.1`. What counts
is the number of calls of torch, each of which finds the processor's caches full of the training: hence no more of
them than needed, and the arithmetic on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from scalelong.skips.apply import scaling_of
from scalelong.skips.scalers import FixedScale, GatedScale
from scalelong.stability.hooks import Unkept
from scalelong.stability.replay import LastCall
from scalelong.training.guard import tensors_in
from scalelong.training.signals import block_of

Values = NDArray[np.float32]

UNSEEN = -1.0  # all signals are norms: what was not seen this time is told apart from what is not a number
_LINES = _LINE = 16  # weights whose change stands for their block's: so many pieces of so many, a line of a cache each


class Pulse:
    """Takes the pulse of a model while `call` sees it run. Its hooks stay on the blocks until `close`.

    On a CPU outputs and gates are looked at in every second step. A GPU does not wait for them, and shows them in every
    step, because there only an output names the block of a NaN, which is found late.
    """

    def __init__(self, model: nn.Module, call: LastCall) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise ValueError(
                f"{type(model).__name__} has no parameter to train; give the monitor the model in training."
            )
        self.call = call
        self.parameters = [p for _, p in named]
        prefix = shared_prefix([name for name, _ in named])
        self._block_of_parameter = [_block(name, prefix) for name, _ in named]
        self.blocks = list(dict.fromkeys(self._block_of_parameter))
        self._largest = [max(self._parameters_of(block), key=Tensor.numel) for block in self.blocks]
        self._samples = Samples(self._largest)
        self._before: Tensor | None = None
        self._unseen = torch.tensor(UNSEEN)
        self.wants_outputs = True
        self._norms: dict[str, Tensor] = {}  # of the outputs of this step, by block,
        self._sizes: dict[str, int] = {}  # and how many numbers they are of
        self._peaks: dict[str, Tensor] = {}
        self._means: dict[str, Tensor] = {}
        handle = scaling_of(model)
        scales = enumerate(handle.scales if handle else ())
        gates = {f"skip {i}": scale for i, scale in scales if not isinstance(scale, FixedScale)}
        self._limits = np.array([gate_limit(scale) for scale in gates.values()], dtype=np.float32)
        self._hooks = self._hook(model, gates)
        of_blocks = {kind: [f"{kind}/{b}" for b in self.blocks] for kind in ("gradient", "update", "output", "peak")}
        gradients, updates, outputs, peaks = of_blocks.values()
        self.names = ["loss", *gradients, *outputs, *peaks, *(f"gate/{name}" for name in gates), *updates]
        self.telling = 1 + len(gradients)  # the first of them tell whether a step is finite

    def _hook(self, model: nn.Module, gates: dict[str, nn.Module]) -> list[RemovableHandle]:
        modules = dict(model.named_modules())
        outputs = [(modules[b], _Showing(self, self.see_output, b)) for b in self.blocks if b in modules]
        coefficients = [(gate, _Showing(self, self.see_gate, name)) for name, gate in gates.items()]
        self._gates = list(gates)
        return [module.register_forward_hook(hook) for module, hook in outputs + coefficients]

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def arm(self, step: int, *, everything: bool) -> None:
        """Say which step is coming, and whether it is to show all."""
        self.wants_outputs = everything or step % 2 == 0 or self.parameters[0].is_cuda

    @torch.no_grad()
    def take(self, loss: Tensor) -> Tensor:
        """The step's numbers, once its gradients are there, for `read`; no wait for the device."""
        if self._unseen.device != loss.device:
            self._unseen = loss.new_full((), UNSEEN, dtype=torch.float32)
        rms = self._root_mean_squares()
        found = [
            loss.float().reshape(()),
            *self._gradients(),
            *(rms.get(block, self._unseen) for block in self.blocks),
            *(self._peaks.get(block, self._unseen) for block in self.blocks),
            *(self._means.get(gate, self._unseen) for gate in self._gates),
        ]
        for seen in (self._norms, self._sizes, self._peaks, self._means):
            seen.clear()
        return torch.cat([torch.stack(found), *self._updates()])

    def read(self, taken: Values) -> Values:
        """What `take` gave, on the host, in the order of `names`."""
        blocks = len(self.blocks)
        values = taken[:-blocks].copy()
        values[-blocks:] /= np.maximum(taken[-blocks:], 1e-12)
        if len(self._limits):
            gates = values[-blocks - len(self._limits) : -blocks]
            np.divide(gates, np.maximum(self._limits - gates, 1e-6), out=gates, where=self._limits < np.inf)
        return values

    @torch.no_grad()
    def gradient_norms(self) -> dict[str, Tensor]:
        """‖∇‖ of each block that has one, of all its parameters."""
        gradients = {b: [p.grad for p in self._parameters_of(b) if p.grad is not None] for b in self.blocks}
        return {block: torch.nn.utils.get_total_norm(found) for block, found in gradients.items() if found}

    def see_output(self, block: str, output: Tensor) -> None:
        """A block's norm, of all pieces of a batch, and in half precision its largest share of the dtype's range."""
        norm = torch.linalg.vector_norm(output, dtype=torch.float32)
        self._norms[block] = torch.hypot(norm, self._norms[block]) if block in self._norms else norm
        self._sizes[block] = self._sizes.get(block, 0) + output.numel()
        if output.dtype is torch.float16:
            low, high = torch.aminmax(output)
            _keep_larger(self._peaks, block, torch.maximum(-low, high).float() / torch.finfo(torch.float16).max)

    def see_gate(self, skip: str, output: Tensor) -> None:
        """A skip's mean coefficient."""
        _keep_larger(self._means, skip, output.mean(dtype=torch.float32).abs())

    def _root_mean_squares(self) -> dict[str, Tensor]:
        if not self._norms:
            return {}
        scaled = torch._foreach_mul(list(self._norms.values()), [size**-0.5 for size in self._sizes.values()])
        return dict(zip(self._norms, scaled, strict=True))

    def _gradients(self) -> list[Tensor]:
        """‖∇‖ of each block's largest weight.

        What comes back through a layer and is not finite goes on to the blocks before it, and shows there.
        """
        gradients = [p.grad for p in self._largest]
        there = [g for g in gradients if g is not None]
        norms = iter(torch._foreach_norm(there, 2, torch.float32) if there else ())
        return [self._unseen if g is None else next(norms) for g in gradients]

    def _updates(self) -> tuple[Tensor, Tensor]:
        """‖Δw‖ and ‖w‖ of the probed weights since the last step."""
        now = self._samples.take()
        before, self._before = self._before, now
        if before is None:
            return now.new_full((len(now),), UNSEEN), now.new_ones(len(now))
        return torch.linalg.vector_norm(now - before, dim=1), torch.linalg.vector_norm(before, dim=1)

    def _parameters_of(self, block: str) -> list[nn.Parameter]:
        return [p for p, b in zip(self.parameters, self._block_of_parameter, strict=True) if b == block]


class Samples:
    """The same `_LINES` pieces of each dense tensor, whatever its layout in memory."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self._addresses: list[int] = []
        self._views: list[Tensor] = []

    def take(self) -> Tensor:
        """A copy, [tensors, numbers]."""
        addresses = [t.data_ptr() for t in self.tensors]
        if addresses != self._addresses:  # the first time, and where the model has moved
            self._addresses = addresses
            self._views = [view for t in self.tensors for view in _sample(t.detach())]
        return torch.cat(self._views).float().view(len(self.tensors), _LINES * _LINE)


def _sample(t: Tensor) -> list[Tensor]:
    """Views of `_LINES` rows together; of a short tensor each number in a row of its own, and rows of zeros."""
    if t.numel() >= _LINE:
        return [t.as_strided((_LINES, _LINE), ((t.numel() - _LINE) // (_LINES - 1), 1))]
    return [t.as_strided((t.numel(), _LINE), (1, 0)), t.new_zeros(_LINES - t.numel(), _LINE)]


class _Showing(Unkept):
    """Shows a module's outputs in training to `see`."""

    def __init__(self, pulse: Pulse, see: Callable[[str, Tensor], None], name: str) -> None:
        self.pulse = pulse
        self.see = see
        self.name = name

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        # The compiler finds a constant in the first question, and leaves out the hook.
        if torch.compiler.is_compiling() or not (self.pulse.wants_outputs and self.pulse.call.running):
            return
        if (tensor := next(tensors_in(output), None)) is not None:
            self.see(self.name, tensor.detach())


def _keep_larger(seen: dict[str, Tensor], name: str, value: Tensor) -> None:
    """What is seen several times in a step, for the pieces of a batch, counts with its largest."""
    seen[name] = torch.maximum(value, seen[name]) if name in seen else value


def gate_limit(scale: nn.Module) -> float:
    """What the coefficients of a gate stay below: of these the odds are looked at, whose logarithm has no end."""
    if not isinstance(scale, GatedScale):
        return float("inf")
    gate = scale.gate if scale.gate is not None else scale.shared_gate[0]
    return 2.0 if gate.identity_start else 1.0


def shared_prefix(names: Sequence[str]) -> str:
    """What all names begin with, in whole parts: `net.` of a network inside another module."""
    first, last = min(paths := [name.split(".")[:-1] for name in names]), max(paths)
    shared = list(takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))
    return "".join(f"{part}." for part, _ in shared)


def _block(name: str, prefix: str) -> str:
    rest = name.removeprefix(prefix)
    return prefix + block_of(rest) if not prefix or "." in rest else prefix[:-1]
