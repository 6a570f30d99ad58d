"""What every step shows at little cost: the loss, each block's output, gradient and update, each skip's gate.

All of it is a vector on the device. Blocks are those of `gradient_norms`, `in_blocks.3` or `up_blocks.1`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from scalelong.skips.apply import scaling_of
from scalelong.skips.scalers import FixedScale, GatedScale
from scalelong.stability.hooks import Unkept
from scalelong.training.guard import tensors_in
from scalelong.training.signals import block_of, in_training_forward

UNSEEN = -1.0  # all signals are norms: what was not seen this time is told apart from what is not a number
_PROBED = 256  # weights per block whose change stands for the block's


class Pulse:
    """Takes the pulse of a model. Its hooks stay on the blocks until `close`."""

    def __init__(self, model: nn.Module) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise ValueError(
                f"{type(model).__name__} has no parameter to train; give the monitor the model in training."
            )
        self.parameters = [p for _, p in named]
        prefix = shared_prefix([name for name, _ in named])
        blocks = [_block(name, prefix) for name, _ in named]
        self.blocks = list(dict.fromkeys(blocks))
        self._block_of_parameter = torch.tensor([self.blocks.index(b) for b in blocks])
        self._probed = [
            _largest([p for p, b in zip(self.parameters, blocks, strict=True) if b == block])
            for block in self.blocks
        ]
        self._before: Tensor | None = None
        modules = dict(model.named_modules())
        handle = scaling_of(model)
        scales = {
            f"skip {i}": s for i, s in enumerate(handle.scales if handle else ()) if not isinstance(s, FixedScale)
        }
        self._hooks: list[RemovableHandle] = [
            *(modules[b].register_forward_hook(_Showing(self.see_output, b)) for b in self.blocks if b in modules),
            *(scale.register_forward_hook(_Showing(self.see_gate, name)) for name, scale in scales.items()),
        ]
        of_blocks = {
            kind: [f"{kind}/{block}" for block in self.blocks] for kind in ("gradient", "update", "output", "peak")
        }
        self._shown = [*of_blocks["output"], *of_blocks["peak"], *(f"gate/{name}" for name in scales)]
        self._seen: dict[str, Tensor] = {}
        self.names = ["loss", *of_blocks["gradient"], *of_blocks["update"], *self._shown]

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def take(self, loss: Tensor) -> Tensor:
        """The step's values, in the order of `names`, once its gradients are there; no wait for the device."""
        unseen = loss.new_full((), UNSEEN, dtype=torch.float32)
        shown = torch.stack([self._seen.get(name, unseen) for name in self._shown])
        self._seen.clear()
        return torch.cat([loss.detach().float().reshape(1), self._gradients(), self._updates(), shown])

    def see_output(self, block: str, module: nn.Module, output: Tensor) -> None:
        """A block's RMS, and in half precision its largest value as a share of the dtype's range."""
        rms = torch.linalg.vector_norm(output, dtype=torch.float32) / output.numel() ** 0.5
        self._note(f"output/{block}", rms)
        if output.dtype is torch.float16:
            low, high = torch.aminmax(output)
            self._note(f"peak/{block}", torch.maximum(-low, high).float() / torch.finfo(torch.float16).max)

    def see_gate(self, skip: str, scale: nn.Module, output: Tensor) -> None:
        """A skip's mean coefficient; of a gate its odds, whose logarithm has no end to run into."""
        mean = output.float().mean().abs()
        self._note(
            f"gate/{skip}",
            mean / (gate_limit(scale) - mean).clamp_min(1e-6) if isinstance(scale, GatedScale) else mean,
        )

    def _note(self, name: str, value: Tensor) -> None:
        """What is seen several times in a step, for the pieces of a batch, counts with its largest."""
        self._seen[name] = torch.maximum(value, self._seen[name]) if name in self._seen else value

    def _gradients(self) -> Tensor:
        grads = [p.grad for p in self.parameters]
        there = [g for g in grads if g is not None]
        if not there:
            return torch.full((len(self.blocks),), UNSEEN, device=self.parameters[0].device)
        norms = torch.stack(torch._foreach_norm(there)).float()
        # The model may have moved since the monitor was made; where it has not, this copies nothing.
        self._block_of_parameter = index = self._block_of_parameter.to(norms.device)
        if len(there) < len(grads):
            index = index[[i for i, g in enumerate(grads) if g is not None]]
        squares = norms.new_zeros(len(self.blocks))
        return squares.index_add_(0, index, norms.square()).sqrt()

    def _updates(self) -> Tensor:
        """‖Δw‖ / ‖w‖ of the probed weights since the last step."""
        now = torch.cat([_strided(p) for p in self._probed]).float().reshape(len(self.blocks), _PROBED)
        before, self._before = self._before, now
        if before is None:
            return now.new_full((len(now),), UNSEEN)
        return (now - before).norm(dim=1) / before.norm(dim=1).clamp_min(1e-12)


class _Showing(Unkept):
    """Shows a module's outputs in training to `see`."""

    def __init__(self, see: Callable[[str, nn.Module, Tensor], None], name: str) -> None:
        self.see = see
        self.name = name

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if in_training_forward() and (tensor := next(tensors_in(output), None)) is not None:
            with torch.no_grad():
                self.see(self.name, module, tensor)


def gate_limit(scale: GatedScale) -> float:
    """What its coefficients stay below."""
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


def _largest(parameters: list[nn.Parameter]) -> nn.Parameter:
    return max(parameters, key=lambda p: p.numel())


def _strided(p: Tensor) -> Tensor:
    """A sample of a dense tensor, whatever its layout in memory."""
    stride = max(1, p.numel() // _PROBED)
    sample = p.detach().as_strided((min(_PROBED, p.numel()),), (stride,))
    return sample if len(sample) == _PROBED else nn.functional.pad(sample, (0, _PROBED - len(sample)))
