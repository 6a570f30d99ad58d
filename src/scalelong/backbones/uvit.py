"""U-ViT (Bao et al., CVPR 2023): a ViT whose encoder blocks are joined to decoder blocks by long skips.

The published architecture under diffusers' interface. Parameter names are the published ones, so published
weights load as they are (`from_official`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from diffusers.utils import BaseOutput
from torch import Tensor, nn

from scalelong.backbones.block_scaling import branch_scale
from scalelong.backbones.uvit_settings import check_conditions, check_sizes, check_switches, grid_of
from scalelong.kernels.attention import attention
from scalelong.kernels.gelu import linear_gelu
from scalelong.kernels.support import is_plain
from scalelong.saving import take_ownership
from scalelong.skips.apply import apply, scaling_of
from scalelong.skips.scalers import scale_skip
from scalelong.skips.spec import Scaling, parse_scaling


@dataclass
class UViTOutput(BaseOutput):
    """What a U-ViT returns: `sample`, the prediction [B, C, H, W]."""

    sample: Tensor


class UViT(ModelMixin, ConfigMixin):
    """A noise predictor on images [B, C, H, W]. Its tokens: [label,] time, [text,] patches.

    Args:
        sample_size: height and width of the images, or one number for both. Other sizes run too: the
            position embedding is interpolated.
        in_channels: channels of the images, in and out.
        patch_size: side of a patch.
        hidden_size: width D of the tokens.
        num_layers: blocks besides the middle one, half before and half behind it: an even number.
        num_attention_heads: heads; they divide `hidden_size`.
        mlp_ratio: width of a block's MLP over `hidden_size`.
        qkv_bias: whether the attention's input projection has a bias.
        mlp_time_embed: whether the time token passes an MLP first.
        num_class_embeds: classes, the null class included; None for no class token.
        cross_attention_dim: width of the text tokens; None for no text.
        text_len: how many text tokens there are.
        final_conv: whether a 3×3 convolution follows the last projection.
        identity_final_conv: whether that convolution starts as the identity, not at random as published: the loss
            then falls sooner (docs/experiment_log.md).
        timestep_map: what reaches the sinusoid for timestep t: "identity" t; "continuous" 999(t+1)/1000
            and "one-based" t+1, for schedulers that count 0 … 999.
        scaling: the skips' scaling, as in `scalelong.apply`.
        keep_function: as in `scalelong.apply`.
        block_scaling: "none", "rezero" or "stable:T" (`block_scaling.py`).
    """

    _supports_gradient_checkpointing = True
    _no_split_modules = ("UViTBlock",)
    _repeated_blocks = ("UViTBlock",)

    @register_to_config
    def __init__(
        self,
        sample_size: int | tuple[int, int] = 32,
        in_channels: int = 3,
        patch_size: int = 2,
        hidden_size: int = 512,
        num_layers: int = 12,
        num_attention_heads: int = 8,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = False,
        mlp_time_embed: bool = False,
        num_class_embeds: int | None = None,
        cross_attention_dim: int | None = None,
        text_len: int = 77,
        final_conv: bool = True,
        identity_final_conv: bool = False,
        timestep_map: str = "identity",
        scaling: str | Scaling = "none",
        keep_function: bool = False,
        block_scaling: str = "none",
    ) -> None:
        super().__init__()
        grid = grid_of(sample_size, patch_size)
        check_sizes(num_layers, hidden_size, num_attention_heads, mlp_ratio)
        check_conditions(num_class_embeds, cross_attention_dim, timestep_map)
        check_switches(
            qkv_bias=qkv_bias,
            mlp_time_embed=mlp_time_embed,
            final_conv=final_conv,
            identity_final_conv=identity_final_conv,
        )
        self.grid = grid
        self.patch_size = patch_size
        self.num_extra_tokens = 1 + (num_class_embeds is not None) + (text_len if cross_attention_dim else 0)
        self.num_tokens = self.num_extra_tokens + grid[0] * grid[1]
        self.timestep_map = timestep_map
        self.gradient_checkpointing = False

        def block(skip: bool) -> UViTBlock:
            return UViTBlock(hidden_size, num_attention_heads, mlp_ratio, qkv_bias, skip, block_scaling)

        self.patch_embed = PatchEmbed(in_channels, hidden_size, patch_size)
        self.time_embed = (
            nn.Sequential(
                nn.Linear(hidden_size, 4 * hidden_size), nn.SiLU(), nn.Linear(4 * hidden_size, hidden_size)
            )
            if mlp_time_embed
            else nn.Identity()
        )
        self.label_emb = nn.Embedding(num_class_embeds, hidden_size) if num_class_embeds is not None else None
        self.context_embed = nn.Linear(cross_attention_dim, hidden_size) if cross_attention_dim else None
        self.pos_embed = nn.Parameter(torch.zeros(1, self.num_tokens, hidden_size))
        self.in_blocks = nn.ModuleList(block(skip=False) for _ in range(num_layers // 2))
        self.mid_block = block(skip=False)
        self.out_blocks = nn.ModuleList(block(skip=True) for _ in range(num_layers // 2))
        self.norm = nn.LayerNorm(hidden_size)
        self.decoder_pred = nn.Linear(hidden_size, patch_size**2 * in_channels)
        self.final_layer = nn.Conv2d(in_channels, in_channels, 3, padding=1) if final_conv else nn.Identity()
        self.reset_parameters()
        scaling = parse_scaling(scaling)
        self.register_to_config(scaling=str(scaling))  # a string, so that the config stays JSON
        if str(scaling) != "none":
            apply(self, scaling, keep_function=keep_function)

    def reset_parameters(self) -> None:
        """Truncated normal 0.02 on linears and the position embedding, zero biases; PyTorch's on the rest, the
        final convolution the identity where that is asked for."""
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        if self.config.identity_final_conv and isinstance(self.final_layer, nn.Conv2d):
            nn.init.dirac_(self.final_layer.weight)
            nn.init.zeros_(self.final_layer.bias)  # type: ignore[arg-type]
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    @classmethod
    def from_preset(cls, name: str, **changes: Any) -> Self:
        """A model of a published size, `UViT.from_preset("cifar10-uvit-s", scaling="ls")`."""
        from scalelong.presets import model_preset

        preset = model_preset(name)
        if preset.backbone != "uvit":
            raise ValueError(f"{name!r} is a {preset.backbone}, not a U-ViT; use scalelong.build({name!r}).")
        return cls(**{**preset.config, **changes})

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """As diffusers' models do. Another `scaling` than the saved one is applied to the loaded weights."""
        scaling, keep_function = kwargs.pop("scaling", None), kwargs.pop("keep_function", False)
        loaded = super().from_pretrained(pretrained_model_name_or_path, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        take_ownership(model)
        saved = model.config.scaling
        if scaling is not None and str(parse_scaling(scaling)) != saved:
            warnings.warn(
                f"the checkpoint was saved with the scaling {saved!r}; {str(parse_scaling(scaling))!r} takes its "
                "place, and what it learns has its first values.",
                stacklevel=2,
            )
            if (old := scaling_of(model)) is not None:
                old.remove()
            apply(model, scaling, keep_function=keep_function)
        return loaded

    @classmethod
    def from_official(
        cls,
        state_dict: Mapping[str, Tensor],
        num_heads: int = 8,
        scaling: str | Scaling = "none",
        **changes: Any,
    ) -> Self:
        """A model with the published U-ViT's or ScaleLong's weights.

        All but the number of heads and a constant scaling is read off the shapes; `changes` add to the
        config or correct it (`timestep_map=`, `sample_size=` of images that are not square, `text_len=`).
        `scaling` is what the weights were trained with; with `keep_function=True`, what they get now.
        """
        from scalelong.backbones.uvit_official import check_keys, config_of, rename

        if changes.pop("keep_function", False):
            model = cls.from_official(state_dict, num_heads, **changes)
            apply(model, scaling, keep_function=True)
            return model
        model = cls(**config_of(state_dict, num_heads, scaling, **changes))
        renamed = rename(state_dict)
        check_keys(renamed, model.state_dict())
        model.load_state_dict(renamed)
        return model

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor | float,
        class_labels: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        return_dict: bool = True,
    ) -> UViTOutput | tuple[Tensor]:
        """Predict from `sample` [B, C, H, W] at `timestep`, a number, a 0-d or a [B] tensor."""
        height, width = self._check_inputs(sample, class_labels, encoder_hidden_states)
        x = self.patch_embed(sample)  # [B, h·w, D]
        extra = self._extra_tokens(sample, timestep, class_labels, encoder_hidden_states)
        x = torch.cat([*extra, x], dim=1) + self._position_embedding(height, width)  # [B, N, D]
        skips = []
        for block in self.in_blocks:
            x = self._run(block, x)
            skips.append(x)
        x = self._run(self.mid_block, x)
        for block in self.out_blocks:
            x = self._run(block, x, skips.pop())
        x = self.decoder_pred(self.norm(x)[:, self.num_extra_tokens :])  # [B, h·w, p·p·C]
        x = self.final_layer(_unpatchify(x, height, width, self.patch_size))  # [B, C, H, W]
        return UViTOutput(sample=x) if return_dict else (x,)

    def _run(self, block: nn.Module, *args: Tensor) -> Tensor:
        if torch.is_grad_enabled() and self.gradient_checkpointing:
            out: Tensor = self._gradient_checkpointing_func(block, *args)
            return out
        return block(*args)

    def _extra_tokens(
        self, sample: Tensor, timestep: Tensor | float, labels: Tensor | None, text: Tensor | None
    ) -> list[Tensor]:
        """[label, time] or [time, text]: the published order."""
        dtype = self.pos_embed.dtype
        t = torch.as_tensor(timestep, device=sample.device).expand(sample.shape[0])
        time = timestep_embedding(map_timestep(t, self.timestep_map, dtype), self.pos_embed.shape[2])
        tokens = [self.time_embed(time.to(dtype))[:, None]]
        if self.label_emb is not None:
            tokens.insert(0, self.label_emb(labels)[:, None])
        if self.context_embed is not None:
            tokens.append(self.context_embed(text))
        return tokens

    def _position_embedding(self, height: int, width: int) -> Tensor:
        """The learned one, its patch part interpolated to another grid."""
        if (height, width) == self.grid:
            return self.pos_embed
        extra, patches = self.pos_embed.tensor_split([self.num_extra_tokens], dim=1)
        image = patches.transpose(1, 2).unflatten(2, self.grid)
        wide = image if image.dtype == torch.float64 else image.float()
        resized = F.interpolate(wide, (height, width), mode="bicubic", align_corners=False)
        return torch.cat([extra, resized.to(image.dtype).flatten(2).transpose(1, 2)], dim=1)

    def _check_inputs(self, sample: Tensor, labels: Tensor | None, text: Tensor | None) -> tuple[int, int]:
        height, width = sample.shape[-2:]
        if height % self.patch_size or width % self.patch_size:
            raise ValueError(
                f"height and width are multiples of the patch size {self.patch_size}, got {height}×{width}."
            )
        for given, layer, name in (
            (labels, self.label_emb, "class_labels"),
            (text, self.context_embed, "encoder_hidden_states"),
        ):
            if (given is None) != (layer is None):
                state = "needs" if layer is not None else "was built without a place for"
                raise ValueError(f"this U-ViT {state} {name}, got {'none' if given is None else 'some'}.")
        text_len = self.config.text_len
        if text is not None and text.shape[1] != text_len:
            raise ValueError(f"this U-ViT takes {text_len} text tokens, got {text.shape[1]}; pad or cut them.")
        return height // self.patch_size, width // self.patch_size


# What pipeline folders name, and diffusers looks for among the modules that are imported: a public, stable path.
UViT.__module__ = "scalelong"


class UViTBlock(nn.Module):
    """Pre-norm attention and MLP; a decoder block first merges its skip: Linear(cat[x, κ·skip])."""

    def __init__(
        self, dim: int, num_heads: int, mlp_ratio: float, qkv_bias: bool, skip: bool, block_scaling: str
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, num_heads, qkv_bias)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = MLP(dim, round(dim * mlp_ratio))
        self.skip_linear = SkipLinear(2 * dim, dim) if skip else None
        self.branch_scale = branch_scale(block_scaling)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        """[B, N, D] -> [B, N, D]."""
        if skip is not None:
            x = self._merge(x, skip)
        x = x + self.branch_scale(self.attn(self.norm1(x)))
        return x + self.branch_scale(self.mlp(self.norm2(x)))

    def _merge(self, x: Tensor, skip: Tensor) -> Tensor:
        scale = getattr(self, "skip_scale", None)
        # A wrapped layer (LoRA) has a second branch that must see the scaled skip too.
        if scale is not None and (scale.reads_skip or not isinstance(self.skip_linear, SkipLinear)):
            return self.skip_linear(torch.cat([x, scale_skip(skip, scale)], dim=-1))  # type: ignore[misc]
        return self.skip_linear(torch.cat([x, skip], dim=-1), scale)  # type: ignore[misc]


class SkipLinear(nn.Linear):
    """Reads [x, skip]. A coefficient that does not depend on the skip scales the weight's half, D×D numbers
    instead of B×N×D: it costs nothing at run time."""

    def forward(self, joined: Tensor, scale: nn.Module | None = None) -> Tensor:
        """[B, N, 2D] -> [B, N, D]."""
        if scale is None:
            return F.linear(joined, self.weight, self.bias)
        coefficient = scale(self.weight)
        if isinstance(coefficient, float) and coefficient == 1:
            return F.linear(joined, self.weight, self.bias)
        main, skip = self.weight.chunk(2, dim=1)
        return F.linear(joined, torch.cat([main, skip * coefficient], dim=1), self.bias)


class Attention(nn.Module):
    """Multi-head self-attention in the input's precision."""

    def __init__(self, dim: int, num_heads: int, qkv_bias: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, D] -> [B, N, D]."""
        return self.proj(attention(self.qkv(x), self.num_heads))


class MLP(nn.Module):
    """Linear, GELU, Linear."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, D] -> [B, N, D]."""
        return self.fc2(linear_gelu(x, self.fc1))


class PatchEmbed(nn.Module):
    """Cut an image into patches and project each to a token."""

    def __init__(self, in_channels: int, dim: int, patch_size: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_channels, dim, patch_size, stride=patch_size)

    def forward(self, image: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, h·w, D]."""
        if image.is_cuda and is_plain(self.proj, nn.Conv2d):
            return _patches_by_product(image, self.proj)
        return self.proj(image).flatten(2).transpose(1, 2)


def _patches_by_product(image: Tensor, proj: nn.Conv2d) -> Tensor:
    """The same as one matrix product, which leaves tokens in the order that the next layer reads them in."""
    rows, columns = proj.kernel_size
    cut = image.unflatten(3, (-1, columns)).unflatten(2, (-1, rows))  # [B, C, h, p, w, p]
    return F.linear(cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2), proj.weight.flatten(1), proj.bias)


def timestep_embedding(t: Tensor, dim: int) -> Tensor:
    """[B] -> [B, dim]: cos then sin of t over geometrically spaced periods, 2π to 20000π."""
    half = dim // 2
    frequencies = torch.exp(-math.log(10000) * torch.arange(half, device=t.device, dtype=t.dtype) / half)
    angles = t[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin(), torch.zeros_like(t[:, None].expand(-1, dim % 2))], dim=1)


def map_timestep(t: Tensor, timestep_map: str, dtype: torch.dtype) -> Tensor:
    """What the sinusoid is taken of, in float32 at least: half precision cannot tell 998 from 999."""
    t = t.to(torch.float64 if dtype == torch.float64 else torch.float32)
    if timestep_map == "continuous":  # index k carries the noise of t = (k+1)/1000, trained as 999·t
        return 999 * (t + 1) / 1000
    return t + 1 if timestep_map == "one-based" else t


def _unpatchify(tokens: Tensor, height: int, width: int, patch: int) -> Tensor:
    """[B, h·w, p·p·C] -> [B, C, h·p, w·p]; a token's numbers run over its rows, columns, channels."""
    pixels = tokens.unflatten(2, (patch, patch, -1)).unflatten(1, (height, width))  # [B, h, w, p, p, C]
    return pixels.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)
