"""diffusers' `UNet2DModel` and `UNet2DConditionModel` (the DDPM, SD 1.5, SDXL and DeepFloyd layouts), and the video
nets `UNetMotionModel`, `UNet3DConditionModel` and `I2VGenXLUNet`, whose skips are those of their frames.

The encoder keeps the output of its first convolution, of every ResNet block and of every downsampler; the
decoder's ResNet blocks take them back in reverse order: cat → GroupNorm → SiLU → conv, beside a 1×1
shortcut that sees the raw concatenation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from scalelong.skips import hooks
from scalelong.skips.scalers import scale_skip
from scalelong.skips.sites import Adapter, LongSkip, SkipShape, UnsupportedModelError

_DOWN_BLOCKS = (
    "DownBlock2D",
    "AttnDownBlock2D",
    "CrossAttnDownBlock2D",
    "ResnetDownsampleBlock2D",
    "SimpleCrossAttnDownBlock2D",
    "DownBlockMotion",
    "CrossAttnDownBlockMotion",
    "DownBlock3D",
    "CrossAttnDownBlock3D",
)
_UP_BLOCKS = (
    "UpBlock2D",
    "AttnUpBlock2D",
    "CrossAttnUpBlock2D",
    "ResnetUpsampleBlock2D",
    "SimpleCrossAttnUpBlock2D",
    "UpBlockMotion",
    "CrossAttnUpBlockMotion",
    "UpBlock3D",
    "CrossAttnUpBlock3D",
)
_SKIPS_ARGUMENT = "res_hidden_states_tuple"  # the second argument of every up block, innermost skip last


class UNetAdapter(Adapter):
    """Finds and scales the skips of diffusers' UNets; those of videos have [B·F, C, H, W]."""

    def find(self, model: Any) -> list[LongSkip]:
        """Pair the encoder's outputs with the decoder's ResNet blocks, and check that their widths agree."""
        _check_block_types(model)
        sources = list(_encoder_outputs(model))
        merges = [
            (f"up_blocks.{i}.resnets.{j}", resnet)
            for i, up_block in enumerate(model.up_blocks)
            for j, resnet in enumerate(up_block.resnets)
        ]
        if len(sources) != len(merges):
            raise UnsupportedModelError(
                f"the encoder keeps {len(sources)} skips and the decoder takes {len(merges)}; they must pair up."
            )
        skips = []
        main_channels = sources[-1][0]
        for index in reversed(range(len(sources))):
            name, resnet = merges[len(merges) - 1 - index]
            channels, pixels = sources[index]
            if resnet.in_channels != main_channels + channels:
                raise UnsupportedModelError(
                    f"{name} reads {resnet.in_channels} channels, but the main path brings {main_channels} and "
                    f"skip {index} brings {channels}."
                )
            shape = SkipShape("nchw", channels)
            skips.append(LongSkip(index, name, resnet, shape, main_channels, pixels, norm=resnet.norm1))
            main_channels = resnet.out_channels
        return skips[::-1]

    def check_placement(self, skips: Sequence[LongSkip], placement: str) -> None:
        """Behind the norm the shortcut must be scaled too, so it has to be a layer."""
        for skip in skips:
            if placement == "norm" and skip.block.conv_shortcut is None:
                raise UnsupportedModelError(
                    f"{skip.name} adds its input without a shortcut convolution, so the skip half of that sum "
                    "cannot be scaled; use placement='concat'."
                )

    def attach(self, model: Any, skips: Sequence[LongSkip], placement: str) -> list[RemovableHandle]:
        """One hook on each up block, or one on each first norm and each shortcut."""
        if placement == "norm":
            return [
                handle
                for skip in skips
                for handle in (
                    hooks.scale_after(skip.block.norm1, skip),
                    hooks.scale_before(skip.block.conv_shortcut, skip),
                )
            ]
        return [up_block.register_forward_pre_hook(_scale_skips, with_kwargs=True) for up_block in model.up_blocks]

    def merge_weights(self, skip: LongSkip, placement: str) -> list[Tensor]:
        """Behind the norm: its gain and bias, and the shortcut's columns. Before it: none."""
        if placement != "norm":
            return []
        resnet, main = skip.block, skip.main_channels
        return [resnet.norm1.weight[main:], resnet.norm1.bias[main:], resnet.conv_shortcut.weight[:, main:]]

    def merge_inputs(
        self, skip: LongSkip, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """The two parts of the concatenation; at "norm" the scale comes later."""
        joined = args[0] if args else kwargs["input_tensor"]
        main, part = joined.split([skip.main_channels, skip.shape.channels], 1)
        return main, part


def _scale_skips(
    up_block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before an up block: its skips times their scales. The last skip of the tuple meets the first ResNet block."""
    skips = kwargs[_SKIPS_ARGUMENT] if _SKIPS_ARGUMENT in kwargs else args[1]
    scaled = tuple(
        scale_skip(skip, resnet.skip_scale) for skip, resnet in zip(skips, reversed(up_block.resnets), strict=True)
    )
    if _SKIPS_ARGUMENT in kwargs:
        return args, kwargs | {_SKIPS_ARGUMENT: scaled}
    return (args[0], scaled, *args[2:]), kwargs


def _check_block_types(model: Any) -> None:
    for blocks, tested in ((model.down_blocks, _DOWN_BLOCKS), (model.up_blocks, _UP_BLOCKS)):
        for block in blocks:
            if not any(cls.__name__ in tested for cls in type(block).__mro__):  # FSDP makes a subclass
                raise UnsupportedModelError(
                    f"{type(block).__name__} is not a block that skip scaling was tested with; "
                    f"it takes {', '.join(tested)}."
                )


def _encoder_outputs(model: Any) -> Iterator[tuple[int, tuple[int, int] | None]]:
    """(channels, pixels) of each skip in the order in which the encoder makes them: outermost first."""
    pixels = _pair(model.config.get("sample_size"))
    yield model.conv_in.weight.shape[0], pixels  # LoRA around it hands on the weight, not the number
    for block in model.down_blocks:
        for resnet in block.resnets:
            yield resnet.out_channels, pixels
        for downsampler in block.downsamplers or ():
            pixels = _halve(pixels)
            yield downsampler.out_channels, pixels


def _pair(size: Any) -> tuple[int, int] | None:
    if size is None:
        return None
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def _halve(pixels: tuple[int, int] | None) -> tuple[int, int] | None:
    """Half the size; unknown for odd ones, where it depends on the downsampler's padding."""
    if pixels is None or pixels[0] % 2 or pixels[1] % 2:
        return None
    return pixels[0] // 2, pixels[1] // 2
