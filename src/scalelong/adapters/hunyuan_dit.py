"""diffusers' `HunyuanDiT2DModel`: a transformer whose later blocks do cat → LayerNorm → Linear with a skip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from scalelong.skips import hooks
from scalelong.skips.scalers import scale_skip
from scalelong.skips.sites import Adapter, LongSkip, SkipShape, UnsupportedModelError


class HunyuanDiTAdapter(Adapter):
    """Finds and scales the skips of HunyuanDiT."""

    def find(self, model: Any) -> list[LongSkip]:
        """The blocks with a `skip_linear`; the last block has the outermost skip."""
        config = model.config
        merges = [(i, b) for i, b in enumerate(model.blocks) if b.skip_linear is not None]
        kept = max(0, config.num_layers // 2 - 1)
        if not merges or len(merges) != kept:
            raise UnsupportedModelError(
                f"a HunyuanDiT of {config.num_layers} layers keeps {kept} skips and takes {len(merges)}; "
                "skip scaling needs an even number of layers, at least 4."
            )
        tokens = (config.sample_size // config.patch_size) ** 2
        width = model.inner_dim
        return [
            LongSkip(index, f"blocks.{i}", block, SkipShape("tokens", width, tokens), width, norm=block.skip_norm)
            for index, (i, block) in enumerate(reversed(merges))
        ]

    def attach(self, model: Any, skips: Sequence[LongSkip], placement: str) -> list[RemovableHandle]:
        """One hook on each merging block, or on its `skip_norm`."""
        if placement == "norm":
            return [hooks.scale_after(skip.block.skip_norm, skip) for skip in skips]
        return [skip.block.register_forward_pre_hook(_scale_skip, with_kwargs=True) for skip in skips]

    def merge_weights(self, skip: LongSkip, placement: str) -> list[Tensor]:
        """Behind the norm: the skip's columns of `skip_linear`. Before it: none."""
        return [skip.block.skip_linear.weight[:, skip.main_channels :]] if placement == "norm" else []

    def merge_inputs(
        self, skip: LongSkip, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """The block's input and its `skip`; at "norm" the scale comes later."""
        return args[0], kwargs["skip"]


def _scale_skip(
    block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before a merging block, which gets its skip by name."""
    return args, kwargs | {"skip": scale_skip(kwargs["skip"], block.skip_scale)}
