"""Our own U-ViT. It looks for its blocks' `skip_scale` itself, so there is nothing to hook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from scalelong.skips.scalers import scale_skip
from scalelong.skips.sites import Adapter, LongSkip, SkipShape


class UViTAdapter(Adapter):
    """Finds the skips of `UViT`; cat → Linear, with no norm between."""

    placements = ("concat",)

    def find(self, model: Any) -> list[LongSkip]:
        """One per decoder block; the last block has the outermost skip."""
        blocks = list(enumerate(model.out_blocks))
        shape = SkipShape("tokens", model.config.hidden_size, model.num_tokens)
        return [
            LongSkip(index, f"out_blocks.{i}", block, shape, shape.channels)
            for index, (i, block) in enumerate(reversed(blocks))
        ]

    def attach(self, model: Any, skips: Sequence[LongSkip], placement: str) -> list[RemovableHandle]:
        """Nothing: the blocks read their own `skip_scale`."""
        return []

    def merge_weights(self, skip: LongSkip, placement: str) -> list[Tensor]:
        """The skip's columns of `skip_linear`."""
        return [skip.block.skip_linear.weight[:, skip.main_channels :]]

    def merge_inputs(
        self, skip: LongSkip, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """The block's two arguments, the skip times its coefficient."""
        main, part = args
        scale = getattr(skip.block, "skip_scale", None)
        return main, part if scale is None else scale_skip(part, scale)

    def record(self, model: Any, entry: Mapping[str, Any] | None) -> None:
        """Into U-ViT's own config fields, so that its plain `from_pretrained` builds the scaling too."""
        scaling, keep = (entry["scaling"], entry["keep_function"]) if entry else ("none", False)
        defaults = set(model.config.get("_use_default_values", ())) - {"scaling", "keep_function"}
        model.register_to_config(scaling=scaling, keep_function=keep, _use_default_values=sorted(defaults))

    def recorded(self, model: Any) -> None:
        """A U-ViT always has attached what its config names."""
        return
