"""What every step shows at little cost: loss, and per block the norms of output and gradient, and the update.

All of it is a vector on the device. Blocks are those of `gradient_norms`, `in_blocks.3` or `up_blocks.1`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from scalelong.training.signals import block_of

UNSEEN = -1.0  # all signals are norms: what was not seen this time is told apart from what is not a number
_PROBED = 256  # weights per block whose change stands for the block's


class Pulse:
    """Takes the pulse of a model. Its hooks stay on the blocks until `close`."""

    def __init__(self, model: nn.Module) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise ValueError(f"{type(model).__name__} has no parameter to train; give the monitor the model in training.")
        self.parameters = [p for _, p in named]
        prefix = shared_prefix([name for name, _ in named])
        blocks = [_block(name, prefix) for name, _ in named]
        self.blocks = list(dict.fromkeys(blocks))
        self.device = self.parameters[0].device
        self._block_of_parameter = torch.tensor([self.blocks.index(b) for b in blocks], device=self.device)
        self._probed = [_largest([p for p, b in zip(self.parameters, blocks, strict=True) if b == block]) for block in self.blocks]
        self._before: Tensor | None = None
        self._outputs: dict[str, Tensor] = {}
        self._peaks: dict[str, Tensor] = {}
        modules = dict(model.named_modules())
        self._hooks: list[RemovableHandle] = [
            modules[block].register_forward_hook(Hook(self, block)) for block in self.blocks if block in modules
        ]
        self.names = ["loss", *(f"{kind}/{block}" for kind in ("gradient", "update", "output", "peak") for block in self.blocks)]

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def take(self, loss: Tensor) -> Tensor:
        """The step's values, in the order of `names`, once its gradients are there; no wait for the device."""
        vector = torch.cat([loss.detach().float().reshape(1), self._gradients(), self._updates(), self._seen()])
        self._outputs.clear()
        self._peaks.clear()
        return vector

    def see(self, block: str, output: Tensor) -> None:
        """A block's output: its RMS, and in a narrow dtype its largest value as a share of the dtype's range."""
        output = output.detach()
        rms = torch.linalg.vector_norm(output, dtype=torch.float32) / output.numel() ** 0.5
        # A block that runs several times in a step, for the pieces of a batch, counts with its largest.
        self._outputs[block] = rms if block not in self._outputs else torch.maximum(rms, self._outputs[block])
        if output.dtype is torch.float16:
            low, high = torch.aminmax(output)
            peak = torch.maximum(-low, high).float() / torch.finfo(output.dtype).max
            self._peaks[block] = peak if block not in self._peaks else torch.maximum(peak, self._peaks[block])

    def _gradients(self) -> Tensor:
        grads = [p.grad for p in self.parameters]
        there = [g for g in grads if g is not None]
        squares = torch.zeros(len(self.blocks), device=self.device)
        if not there:
            return squares.fill_(UNSEEN)
        norms = torch.stack(torch._foreach_norm(there)).float()
        index = self._block_of_parameter
        if len(there) < len(grads):
            index = index[[i for i, g in enumerate(grads) if g is not None]]
        return squares.index_add_(0, index, norms.square()).sqrt()

    def _updates(self) -> Tensor:
        """‖Δw‖ / ‖w‖ of the probed weights since the last step."""
        now = torch.cat([_strided(p) for p in self._probed]).float().reshape(len(self.blocks), _PROBED)
        before, self._before = self._before, now
        if before is None:
            return now.new_full((len(now),), UNSEEN)
        return (now - before).norm(dim=1) / before.norm(dim=1).clamp_min(1e-12)

    def _seen(self) -> Tensor:
        unseen = torch.full((), UNSEEN, device=self.device)
        return torch.stack([seen.get(block, unseen) for seen in (self._outputs, self._peaks) for block in self.blocks])


class Hook:
    """Shows a block's outputs to a pulse. A copy of the model, or one that was pickled, has none."""

    def __init__(self, pulse: Pulse, block: str) -> None:
        self.pulse = pulse
        self.block = block

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if in_training_forward():
            tensor = next(tensors_in(output), None)
            if tensor is not None:
                self.pulse.see(self.block, tensor)

    def __deepcopy__(self, memo: Any) -> Any:
        return _see_nothing

    def __reduce__(self) -> Any:
        return "_see_nothing"


def _see_nothing(module: nn.Module, args: Any, output: Any) -> None:
    """In the place of a hook that was not copied."""


def in_training_forward() -> bool:
    """Neither sampling, nor the second pass of checkpointed activations on the way back."""
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The floating tensors of a module's output, or of its arguments."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from tensors_in(inner)


def shared_prefix(names: Sequence[str]) -> str:
    """What all names begin with, in whole parts: `net.` of a network inside another module."""
    prefix = commonprefix([name.rpartition(".")[0] + "." for name in names])
    prefix = prefix[: prefix.rfind(".") + 1]
    return "" if len(names) == 1 or not prefix.strip(".") else prefix


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
