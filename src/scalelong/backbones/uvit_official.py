"""The published checkpoints of U-ViT and ScaleLong: their configuration from shapes, their gates renamed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from scalelong.skips.spec import LS, Scaling, parse_scaling


def config_of(state_dict: Mapping[str, Tensor], num_heads: int, scaling: str | Scaling) -> dict[str, Any]:
    """Everything but the number of heads and a constant scaling follows from the shapes."""
    missing = [key for key in ("pos_embed", "patch_embed.proj.weight", "mid_block.mlp.fc1.weight") if key not in state_dict]
    if missing:
        raise ValueError(f"this is no U-ViT state dict: it has no {', '.join(missing)}.")
    hidden_size, in_channels, patch_size, _ = state_dict["patch_embed.proj.weight"].shape
    context = state_dict.get("context_embed.weight")
    labels = state_dict.get("label_emb.weight")
    text_len = 77  # CLIP's, in every published text model; pass text_len= for another
    extra = 1 + (labels is not None) + (text_len if context is not None else 0)
    side = math.isqrt(state_dict["pos_embed"].shape[1] - extra)
    num_encoder_blocks = len({m[1] for key in state_dict if (m := re.match(r"in_blocks\.(\d+)\.", key))})
    return {
        "sample_size": side * patch_size,
        "in_channels": in_channels,
        "patch_size": patch_size,
        "hidden_size": hidden_size,
        "num_layers": 2 * num_encoder_blocks,
        "num_attention_heads": num_heads,
        "mlp_ratio": state_dict["mid_block.mlp.fc1.weight"].shape[0] / hidden_size,
        "qkv_bias": "mid_block.attn.qkv.bias" in state_dict,
        "mlp_time_embed": "time_embed.0.weight" in state_dict,
        "num_class_embeds": None if labels is None else labels.shape[0],
        "cross_attention_dim": None if context is None else context.shape[1],
        "text_len": text_len,
        "final_conv": "final_layer.weight" in state_dict,
        "scaling": str(_scaling_of(state_dict, parse_scaling(scaling))),
    }


def rename(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Only the gates have other names here. Published per-skip gates count from the innermost, as blocks do."""
    width = next((w.shape[1] for key, w in state_dict.items() if re.fullmatch(r"se\.(\d+\.)?layer1\.weight", key)), 0)
    renamed = {}
    for key, tensor in state_dict.items():
        key = re.sub(r"^se\.(\d+)\.", r"out_blocks.\1.skip_scale.gate.", key)
        renamed[re.sub(r"^se\.(?=layer)", f"skip_scaling.gates.{width}.", key)] = tensor
    return renamed


def _scaling_of(state_dict: Mapping[str, Tensor], asked: Scaling) -> Scaling:
    """The gate that the checkpoint holds, unless it holds none; the activation cannot be seen in it."""
    layer = next((w for key, w in state_dict.items() if re.fullmatch(r"se\.(\d+\.)?layer1\.weight", key)), None)
    if layer is None or (str(asked) != "none" and not isinstance(asked, LS)):
        return asked
    hidden, width = layer.shape
    activation = asked.activation if isinstance(asked, LS) else "relu"
    return LS(ratio=width // hidden, activation=activation, shared="se.layer1.weight" in state_dict)
