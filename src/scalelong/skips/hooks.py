"""The two hooks that adapters share, for scaling a skip after the norm that follows the concatenation.

A hook finds its scale through the module it hangs on, never through a closure: a deep copy of the model
then has scales of its own. Nothing computed here is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from scalelong.skips.scalers import SkipScale
from scalelong.skips.sites import LongSkip

_LINK = "_skip_scale_link"


@dataclass(frozen=True)
class Link:
    """From a module inside the merging block to the block's scale, and where the skip begins in its input."""

    scale: SkipScale
    main_channels: int
    dim: int


def scale_after(norm: nn.Module, skip: LongSkip) -> RemovableHandle:
    """Scale the skip's part of the norm's output; a gate reads the skip as it entered the norm."""
    _link(norm, skip)
    return norm.register_forward_hook(_scale_output)


def scale_before(layer: nn.Module, skip: LongSkip) -> RemovableHandle:
    """Scale the skip's part of the layer's input."""
    _link(layer, skip)
    return layer.register_forward_pre_hook(_scale_input)


def unlink(block: nn.Module) -> None:
    """Forget the links below a block."""
    for module in block.modules():
        module.__dict__.pop(_LINK, None)


def _link(module: nn.Module, skip: LongSkip) -> None:
    # Into __dict__, past nn.Module's own bookkeeping: the scale is registered on the block, and only there.
    scale = skip.block.skip_scale
    scale.is_linked = True
    module.__dict__[_LINK] = Link(scale, skip.main_channels, skip.shape.channel_dim)


def _scale_output(norm: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    return _scale_part(norm.__dict__[_LINK], raw=args[0], target=output)


def _scale_input(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (_scale_part(layer.__dict__[_LINK], raw=args[0], target=args[0]), *args[1:])


def _scale_part(link: Link, raw: Tensor, target: Tensor) -> Tensor:
    sizes = [link.main_channels, raw.shape[link.dim] - link.main_channels]
    coefficient = link.scale(raw.split(sizes, link.dim)[1])
    if isinstance(coefficient, float) and coefficient == 1:
        return target
    main, skip = target.split(sizes, link.dim)
    return torch.cat([main, skip * coefficient], link.dim)
