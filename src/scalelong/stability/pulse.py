"""What every step shows at little cost: the loss, each block's output, gradient and update, each skip's gate.

All of it is a vector on the device. Blocks are those of `gradient_norms`, `in_blocks.3` or `up_blocks.1`. What
costs is the number of calls of torch, each of which finds the processor's caches full of the training, and on a GPU
starts a kernel: hence few of them, and the arithmetic on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from scalelong.skips.apply import scaling_of
from scalelong.skips.scalers import FixedScale, GatedScale
from scalelong.stability.replay import StepCalls
from scalelong.training.guard import tensors_in
from scalelong.training.hooks import Unkept
from scalelong.training.signals import block_of

Values = NDArray[np.float32]

UNSEEN = -1.0  # all signals are norms: what was not seen this time is told apart from what is not a number
ASLEEP = 0.0  # of a block whose gradient is exactly that
ANY = "any gradient"  # whether all of them are finite, and no more
_FIRST = 3  # blocks at the input, whose gradients show what came back through all others
_LINES = _LINE = 16  # weights whose change stands for their block's: so many pieces, each a line of a cache


class Pulse:
    """Takes the pulse of a model while `call` sees it run. Its hooks stay on the blocks until `close`.

    Outputs and gates are taken in every fourth step, updates in every second, and on a CPU gradients with them;
    between them a glance at the loss, the first gradients and the first output tells whether a batch is as usual.
    Whether every gradient is finite is looked at in every step, so that a bad one is known before its update.
    A GPU does not wait: it has no glance, but sends the loss and all gradients in every step. There only an output
    names the block of a NaN, which is found late.
    Watched are the parameters in training, and those `also` named.
    """

    def __init__(self, model: nn.Module, call: StepCalls, also: Collection[str] = ()) -> None:
        watched = {name: p.requires_grad or name in also for name, p in model.named_parameters()}
        named = [(name, p) for name, p in model.named_parameters() if watched[name]]
        if not named:
            raise ValueError(
                f"{type(model).__name__} has no parameter to train; give the monitor the model in training."
            )
        self.call = call
        self.watched = [name for name, _ in named]
        self._frozen = [p for name, p in model.named_parameters() if not watched[name]]
        self.parameters = [p for _, p in named]
        prefix = shared_prefix([name for name, _ in named])
        self._block_of = [_block(name, prefix) for name, _ in named]
        self.blocks = list(dict.fromkeys(self._block_of))
        largest = [self._largest_of(block, also) for block in self.blocks]
        self._samples = Samples([self.parameters[place] for place in largest])
        # Vectors are many and short: one call takes all of them, but for those that stand for their block.
        apart = [place for place, p in enumerate(self.parameters) if p.ndim != 1 or place in largest]
        self._apart = [self.parameters[place] for place in apart]
        self._vectors = [p for place, p in enumerate(self.parameters) if place not in apart]
        places = {place: number for number, place in enumerate(largest, start=1)}
        self._place_of_apart = [places.get(place) for place in apart]  # in `names`, of a block's gradient
        self._wide = torch.float64 if any(p.dtype is torch.float64 for p in self.parameters) else torch.float32
        self._before: Tensor | None = None
        self._step = self._step_before = 0
        # Whether this step is taken, with its updates, and whether its outputs and gates are.
        self.looking = self.updating = self.showing = True
        self._norms: dict[str, Tensor] = {}  # of the outputs of this step, by block,
        self._sizes: dict[str, int] = {}  # and how many numbers they are of
        self._peaks: dict[str, Tensor] = {}
        self._means: dict[str, Tensor] = {}
        handle = scaling_of(model)
        scales = enumerate(handle.scales if handle else ())
        gates = {f"skip {i}": scale for i, scale in scales if not isinstance(scale, FixedScale)}
        self._gates = list(gates)
        self._limits = np.array([gate_limit(scale) for scale in gates.values()], dtype=np.float32)
        self._hooks = self._hook(model, gates)
        shown = {"output": self.blocks, "peak": self.blocks, "gate": self._gates, "update": self.blocks}
        self.names = ["loss", *(f"gradient/{block}" for block in self.blocks), ANY]
        self.names += [f"{kind}/{name}" for kind, names in shown.items() for name in names]
        self._place = {name: place for place, name in enumerate(self.names)}
        self.telling = 2 + len(self.blocks)  # the first of them tell whether a step is finite

    def _largest_of(self, block: str, also: Collection[str]) -> int:
        """The place of a block's largest weight; what stood for a block before more was unfrozen still does."""
        places = [place for place, of in enumerate(self._block_of) if of == block]
        return max(places, key=lambda place: (self.watched[place] in also, self.parameters[place].numel()))

    def _in_blocks(self) -> Iterator[tuple[nn.Parameter, str]]:
        return zip(self.parameters, self._block_of, strict=True)

    def _hook(self, model: nn.Module, gates: Mapping[str, nn.Module]) -> list[RemovableHandle]:
        modules = dict(model.named_modules())
        blocks = [b for b in self.blocks if b in modules]
        outputs = [(modules[b], _Showing(self, self.see_output, b, always=b == blocks[0])) for b in blocks]
        coefficients = [(gate, _Showing(self, self.see_gate, name)) for name, gate in gates.items()]
        return [module.register_forward_hook(hook) for module, hook in outputs + coefficients]

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def was_unfrozen(self) -> bool:
        """Whether a parameter that is not watched is in training now."""
        return any(p.requires_grad for p in self._frozen)

    def arm(self, step: int, *, everything: bool, outputs: bool = False) -> None:
        """Say which step is coming, and whether it is to show everything, or its outputs besides what is its turn.

        Updates keep their turns: that of one step is not as large as the mean of two.
        """
        self._step = step
        self.updating = everything or step % 2 == 0
        self.showing = everything or outputs or step % 4 == 0
        self.looking = self.updating or outputs or self.parameters[0].is_cuda

    @torch.no_grad()
    def glance(self, loss: Tensor) -> Values:
        """The loss, the first gradients and the first output, in the order of `names`; for a CPU: it waits."""
        values = np.full(len(self.names), UNSEEN, dtype=np.float32)
        values[0] = loss.item()
        for block, norm in self._norms.items():
            values[self.telling + self.blocks.index(block)] = norm.item() / self._sizes[block] ** 0.5
        self._norms, self._sizes, self._peaks = {}, {}, {}
        norms, places = self._gradients()
        for place, norm in zip(places, norms, strict=True):
            if place is not None and place <= _FIRST:
                values[place] = norm.float().item()
        if norms:
            values[self.telling - 1] = _only_if_bad(torch.stack(norms).sum().item())
        return values

    @torch.no_grad()
    def take(self, loss: Tensor) -> tuple[Tensor, Note]:
        """The step's numbers, once its gradients are there, for `read`; no wait for the device."""
        norms, places = self._gradients()
        shown = {
            self._place[f"{kind}/{name}"]: value
            for kind, seen in (("output", self._norms), ("peak", self._peaks), ("gate", self._means))
            for name, value in seen.items()
        }
        note = Note(self._sizes, self._step - self._step_before, places, list(shown), self.updating)
        self._norms, self._sizes, self._peaks, self._means = {}, {}, {}, {}
        # One stack, and the rest is left to the host: each number picked or added up here is a call of torch.
        numbers = torch.stack([loss.reshape(()), *norms, *shown.values()]).float()
        updates = self._updates() if self.updating else None
        return numbers if updates is None else torch.cat([numbers, *updates]), note

    def read(self, taken: Values, note: Note) -> Values:
        """What `take` gave, on the host, in the order of `names`."""
        blocks, gates = len(self.blocks), len(self._limits)
        loss, norms, shown, updated = np.split(taken, np.cumsum([1, len(note.gradients), len(note.shown)]))
        values = np.full(len(self.names), UNSEEN, dtype=np.float32)
        values[0] = loss[0]
        for place, norm in zip(note.gradients, norms, strict=True):
            if place is not None:
                values[place] = norm
        if len(norms):
            values[self.telling - 1] = _only_if_bad(float(norms.sum(dtype=np.float64)))
        values[note.shown] = shown
        gradients, updates = values[1 : 1 + blocks], values[-blocks:]
        if len(updated):
            changes, weights = updated.reshape(2, blocks)
            updates[:] = changes / (max(note.steps, 1) * np.maximum(weights, 1e-12))
            updates[updates == 0] = UNSEEN  # a step that was left out
        if note.updating:
            updates[gradients == 0] = ASLEEP  # what weight decay alone changes is no measure of updates to come
        if note.sizes:
            values[self.telling : self.telling + blocks] /= [
                note.sizes.get(block, 1) ** 0.5 for block in self.blocks
            ]
        if gates:
            odds = values[-blocks - gates : -blocks]
            np.divide(odds, np.maximum(self._limits - odds, 1e-6), out=odds, where=self._limits < np.inf)
        return values

    def is_finite(self, values: Values) -> bool:
        """Whether a step's loss and gradients are."""
        return math.isfinite(values[: self.telling].sum(dtype=np.float64))

    def is_without_gradients(self, values: Values) -> bool:
        """Whether every gradient that was looked at is exactly 0, or none was there."""
        gradients = values[1 : 1 + len(self.blocks)]
        return not gradients[gradients != UNSEEN].any()

    def bad_outputs(self, values: Values) -> dict[str, float]:
        """Norms that are not finite, of the blocks' outputs in a step."""
        outputs = values[self.telling : self.telling + len(self.blocks)].tolist()
        return {block: norm for block, norm in zip(self.blocks, outputs, strict=True) if not math.isfinite(norm)}

    @torch.no_grad()
    def look_again(self, values: Values) -> None:
        """Take the gradients of a step's values anew, in float64, as long as they are there; waits for the device.

        float32 holds no square of 1e19: a gradient of that norm is large, and not infinite.
        """
        norms, places = self._gradients(torch.float64)
        for place, norm in zip(places, norms, strict=True):
            if place is not None and not np.isfinite(values[place]):
                values[place] = _narrow(norm.item())
        if norms:
            values[self.telling - 1] = _only_if_bad(torch.stack(norms).sum().item())

    @torch.no_grad()
    def gradient_norms(self) -> dict[str, float]:
        """‖∇‖ of each block that has one, of all its parameters; waits for the device."""
        there = [(b, p.grad) for p, b in self._in_blocks() if p.grad is not None]
        if not there:
            return {}
        gradients = [gradient for _, gradient in there]
        norms = torch.stack(torch._foreach_norm(gradients, 2, self._wide)).tolist()
        if not all(map(math.isfinite, norms)):
            norms = torch.stack(torch._foreach_norm(gradients, 2, torch.float64)).tolist()
        found: dict[str, float] = {}
        for (block, _), norm in zip(there, norms, strict=True):
            found[block] = math.hypot(found.get(block, 0.0), norm)
        return found

    def see_output(self, block: str, output: Tensor) -> None:
        """A block's norm, of all pieces of a batch; in half precision its largest share of the range as well."""
        norm = torch.linalg.vector_norm(output, dtype=_wide(output.dtype)).float()
        self._norms[block] = torch.hypot(norm, self._norms[block]) if block in self._norms else norm
        self._sizes[block] = self._sizes.get(block, 0) + output.numel()
        if output.dtype is torch.float16:
            low, high = torch.aminmax(output)
            _keep_larger(self._peaks, block, torch.maximum(-low, high).float() / torch.finfo(torch.float16).max)

    def see_gate(self, skip: str, output: Tensor) -> None:
        """A skip's mean coefficient."""
        _keep_larger(self._means, skip, output.mean(dtype=torch.float32).abs())

    def _gradients(self, wide: torch.dtype | None = None) -> tuple[list[Tensor], list[int | None]]:
        """Norms that are finite where every gradient is, and the places in `names` of those that stand for a block.

        `wide` is what they are taken in; by default the parameters' own.
        """
        dtype = wide or self._wide
        there = [
            (g, place)
            for p, place in zip(self._apart, self._place_of_apart, strict=True)
            if (g := p.grad) is not None
        ]
        vectors = [g for p in self._vectors if (g := p.grad) is not None]
        norms = list(torch._foreach_norm([g for g, _ in there], 2, dtype)) if there else []
        places = [place for _, place in there]
        if vectors:
            norms.append(torch.linalg.vector_norm(torch.cat(vectors), dtype=dtype))
            places.append(None)
        return norms, places

    def _updates(self) -> tuple[Tensor, Tensor] | None:
        """‖Δw‖ and ‖w‖ of the probed weights since they were last looked at."""
        now = self._samples.take()
        before, self._before, self._step_before = self._before, now, self._step
        if before is None:
            return None
        return torch.linalg.vector_norm(now - before, dim=1), torch.linalg.vector_norm(before, dim=1)


@dataclass(frozen=True)
class Note:
    """What the host knows of a step."""

    sizes: Mapping[str, int]  # how many numbers each output had,
    steps: int  # and how many steps an update is of
    gradients: Sequence[int | None]  # places of norms in `names`; others only tell whether they are finite
    shown: Sequence[int]  # places of outputs, peaks and gates
    updating: bool  # whether updates were looked at, though there may have been none


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
    """Shows a module's outputs in training to `see`; `always`, or when the pulse says so."""

    def __init__(
        self, pulse: Pulse, see: Callable[[str, Tensor], None], name: str, *, always: bool = False
    ) -> None:
        self.pulse = pulse
        self.see = see
        self.name = name
        self.always = always

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        # The compiler finds a constant in the first question, and leaves out the hook.
        if torch.compiler.is_compiling() or not ((self.pulse.showing or self.always) and self.pulse.call.running):
            return
        tensor = output if isinstance(output, Tensor) else next(tensors_in(output), None)
        if tensor is not None:
            self.see(self.name, tensor.detach())


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What norms are taken in: squares of half precision would overflow, and torch does not narrow."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _narrow(norm: float) -> float:
    """As a float32, which what is finite does not leave."""
    return min(norm, float(np.finfo(np.float32).max)) if math.isfinite(norm) else norm


def _only_if_bad(total: float) -> float:
    """The sum of all gradients' norms tells no more than whether all of them are finite."""
    return UNSEEN if math.isfinite(total) else total


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
