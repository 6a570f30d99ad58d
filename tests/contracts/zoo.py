"""Small models of every family that `apply` takes, with inputs, and where their skips are known to be.

`merges` lists the merging blocks outermost first, by hand: it is what the code under test has to find.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

SCALINGS = (
    "none",
    "1/sqrt2",
    "uniform:0.3",
    "cs:0.7",
    "cs-reversed:0.7",
    "ls",
    "ls:ratio=4,act=mish",
    "ls-per-skip",
    "ls-channel",
    "scalar:0.6",
    "ie",
    "ie:shared=false",
    "skip-norm:0.8",
)
LEARNED = tuple(s for s in SCALINGS if s.startswith(("ls", "ie", "scalar", "skip-norm")))
CONSTANT = tuple(s for s in SCALINGS if s not in LEARNED)


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], nn.Module]
    inputs: dict[str, Any]
    merges: tuple[str, ...]
    widths: tuple[int, ...]  # channels of each skip, outermost first
    placements: tuple[str, ...] = ("concat", "norm")
    kind: str = "unet"
    tokens: int | None = None
    folds_at: tuple[str, ...] = ("norm",)
    supports_checkpointing: bool = field(default=True)

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        return copy.deepcopy(_made(self.name)).to(dtype).eval()

    def call(self, model: nn.Module, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return model(**self.cast(dtype)).sample

    def cast(self, dtype: torch.dtype) -> dict[str, Any]:
        return {key: _cast(value, dtype) for key, value in self.inputs.items()}


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, dict):
        return {k: _cast(v, dtype) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_cast(v, dtype) for v in value)
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


@functools.cache
def _made(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = CASES[name].make()
    # Norms away from 1 and 0: their part in folding is then visible.
    for module in model.modules():
        if isinstance(module, (nn.GroupNorm, nn.LayerNorm)) and module.weight is not None:
            nn.init.uniform_(module.weight, 0.5, 1.5)
            if module.bias is not None:
                nn.init.uniform_(module.bias, -0.5, 0.5)
    return model


def _randn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _uvit() -> nn.Module:
    from scalelong import UViT

    return UViT(
        sample_size=16, patch_size=2, hidden_size=64, num_layers=6, num_attention_heads=4, num_class_embeds=5
    )


def _unet2d() -> nn.Module:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=8,
        block_out_channels=(32, 48),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
        attention_head_dim=16,
        resnet_time_scale_shift="scale_shift",
    )


def _sd15(**more: Any) -> nn.Module:
    from diffusers import UNet2DConditionModel

    defaults = dict(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=24,
        attention_head_dim=8,
        norm_num_groups=16,
    )
    return UNet2DConditionModel(**{**defaults, **more})


def _sd15_freeu() -> nn.Module:
    model = _sd15()
    model.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    return model


def _sdxl() -> nn.Module:
    return _sd15(
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2),
        attention_head_dim=(4, 8),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=8 * 6 + 16,
    )


def _deepfloyd() -> nn.Module:
    return _sd15(
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        resnet_time_scale_shift="scale_shift",
        encoder_hid_dim=24,
        encoder_hid_dim_type="text_proj",
        attention_head_dim=16,
    )


def _motion() -> nn.Module:
    from diffusers import UNetMotionModel

    return UNetMotionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"),
        up_block_types=("UpBlockMotion", "CrossAttnUpBlockMotion"),
        cross_attention_dim=24,
        num_attention_heads=4,
        motion_num_attention_heads=4,
        norm_num_groups=16,
    )


def _of_3d_blocks(name: str) -> nn.Module:
    import diffusers

    return getattr(diffusers, name)(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        cross_attention_dim=24,
        attention_head_dim=8,
        norm_num_groups=16,
    )


def _hunyuan() -> nn.Module:
    from diffusers import HunyuanDiT2DModel

    return HunyuanDiT2DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=4,
        patch_size=2,
        sample_size=16,
        hidden_size=64,
        num_layers=8,
        mlp_ratio=2.0,
        cross_attention_dim=24,
        cross_attention_dim_t5=16,
        pooled_projection_dim=16,
        text_len=5,
        text_len_t5=6,
        activation_fn="gelu-approximate",
    )


def _hunyuan_inputs() -> dict[str, Any]:
    angles = _randn(64, 8, seed=9)
    rotary = (angles.cos().repeat_interleave(2, 1), angles.sin().repeat_interleave(2, 1))
    return dict(
        hidden_states=_randn(2, 4, 16, 16),
        timestep=torch.tensor([3.0, 700.0]),
        encoder_hidden_states=_randn(2, 5, 24, seed=2),
        text_embedding_mask=torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]),
        encoder_hidden_states_t5=_randn(2, 6, 16, seed=3),
        text_embedding_mask_t5=torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]]),
        image_meta_size=torch.tensor([[16, 16, 16, 16, 0, 0]] * 2).float(),
        style=torch.tensor([0, 0]),
        image_rotary_emb=rotary,
    )


_TEXT = dict(
    sample=_randn(2, 4, 8, 8), timestep=torch.tensor([3, 700]), encoder_hidden_states=_randn(2, 7, 24, seed=2)
)
_VIDEO = {**_TEXT, "sample": _randn(2, 4, 3, 8, 8)}  # three frames
_SD15_SKIPS = dict(
    merges=(
        "up_blocks.1.resnets.1",
        "up_blocks.1.resnets.0",
        "up_blocks.0.resnets.1",
        "up_blocks.0.resnets.0",
    ),
    widths=(32, 32, 32, 64),
)

CASES = {
    case.name: case
    for case in (
        Case(
            "uvit",
            _uvit,
            dict(
                sample=_randn(2, 3, 16, 16),
                timestep=torch.tensor([0.3, 777.0]),
                class_labels=torch.tensor([1, 4]),
            ),
            merges=("out_blocks.2", "out_blocks.1", "out_blocks.0"),
            widths=(64, 64, 64),
            placements=("concat",),
            kind="uvit",
            tokens=66,
            folds_at=("concat",),
        ),
        Case(
            "unet2d",
            _unet2d,
            dict(sample=_randn(2, 3, 8, 8), timestep=torch.tensor([3, 700])),
            merges=_SD15_SKIPS["merges"],
            widths=(32, 32, 32, 48),
        ),
        Case("sd15", _sd15, _TEXT, **_SD15_SKIPS),
        Case("sd15-freeu", _sd15_freeu, _TEXT, **_SD15_SKIPS),
        Case(
            "sdxl",
            _sdxl,
            {
                **_TEXT,
                "added_cond_kwargs": {"text_embeds": _randn(2, 16, seed=5), "time_ids": _randn(2, 6, seed=6)},
            },
            **_SD15_SKIPS,
        ),
        Case("deepfloyd", _deepfloyd, _TEXT, **_SD15_SKIPS),
        Case(  # AnimateDiff's pipeline gives each frame its text
            "motion",
            _motion,
            {**_VIDEO, "encoder_hidden_states": _randn(6, 7, 24, seed=2)},
            **_SD15_SKIPS,
            kind="video",
        ),
        Case(
            "unet3d",
            functools.partial(_of_3d_blocks, "UNet3DConditionModel"),
            _VIDEO,
            **_SD15_SKIPS,
            kind="video",
            supports_checkpointing=False,
        ),
        Case(
            "i2vgen",
            functools.partial(_of_3d_blocks, "I2VGenXLUNet"),
            {
                **_VIDEO,
                "fps": torch.tensor([8, 16]),
                "image_latents": _randn(2, 4, 3, 8, 8, seed=7),
                "image_embeddings": _randn(2, 24, seed=8),
            },
            **_SD15_SKIPS,
            kind="video",
            supports_checkpointing=False,
        ),
        Case(
            "hunyuan",
            _hunyuan,
            _hunyuan_inputs(),
            merges=("blocks.7", "blocks.6", "blocks.5"),
            widths=(64, 64, 64),
            kind="hunyuan",
            tokens=64,
            supports_checkpointing=False,
        ),
    )
}

# The same class with other blocks or settings. What depends on the arithmetic is tested on them with every
# scaling; what depends on the class (removal, copies, saving, ...) with one of each kind, and with the
# others in `make test-all`.
VARIANTS = ("sd15-freeu", "sdxl", "deepfloyd", "motion", "unet3d", "i2vgen")
ONE_OF_EACH_KIND = ("none", "cs:0.7", "ls", "ls-per-skip", "scalar:0.6")
EVERY_PLACE = [(case, placement) for case in CASES.values() for placement in case.placements]
EVERYTHING = [  # behind a norm there is nothing left for skip-norm to do: it is refused
    (c, p, s) for c, p in EVERY_PLACE for s in SCALINGS if not (p == "norm" and s.startswith("skip-norm"))
]
