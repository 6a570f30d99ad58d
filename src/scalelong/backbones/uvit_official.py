"""The published checkpoints of U-ViT and ScaleLong: their configuration from shapes, their gates renamed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from scalelong.skips.attach import is_gate_key
from scalelong.skips.spec import LS, Scaling, parse_scaling

_GATE = re.compile(r"se\.(\d+\.)?layer1\.weight")


def config_of(
    state_dict: Mapping[str, Tensor], num_heads: int, scaling: str | Scaling, **changes: Any
) -> dict[str, Any]:
    """Everything but the number of heads and a constant scaling follows from the shapes.

    In text models it is assumed that the text has 77 tokens, as CLIP's has; `text_len=` says otherwise.
    """
    needed = ("pos_embed", "patch_embed.proj.weight", "mid_block.mlp.fc1.weight")
    if missing := [key for key in needed if key not in state_dict]:
        raise ValueError(f"this is no U-ViT state dict: it has no {', '.join(missing)}.")
    hidden_size, in_channels, patch_size, _ = state_dict["patch_embed.proj.weight"].shape
    context = state_dict.get("context_embed.weight")
    labels = state_dict.get("label_emb.weight")
    text_len = changes.get("text_len", 77)
    num_encoder_blocks = len({m[1] for key in state_dict if (m := re.match(r"in_blocks\.(\d+)\.", key))})
    config = {
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
        **changes,
    }
    if "sample_size" not in config:
        extra = 1 + (labels is not None) + (text_len if context is not None else 0)
        config["sample_size"] = _side(state_dict["pos_embed"].shape[1] - extra) * patch_size
    return config


def rename(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Only the gates have other names here. Published per-skip gates count from the innermost, as blocks do."""
    width = next((w.shape[1] for key, w in state_dict.items() if _GATE.fullmatch(key)), 0)
    renamed = {}
    for key, tensor in state_dict.items():
        own = re.sub(r"^se\.(\d+)\.", r"out_blocks.\1.skip_scale.gate.", key)
        renamed[re.sub(r"^se\.(?=layer)", f"skip_scaling.gates.{width}.", own)] = tensor
    return renamed


def check_keys(given: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Name every tensor too many, too few or of another shape. A model may have gates that the file has not."""
    without_gates = not any(is_gate_key(key) for key in given)
    missing = sorted(k for k in expected.keys() - given.keys() if not (without_gates and is_gate_key(k)))
    reshaped = sorted(k for k in expected.keys() & given.keys() if expected[k].shape != given[k].shape)
    problems = {
        "not expected": sorted(given.keys() - expected.keys()),
        "not found": missing,
        "of another shape": reshaped,
    }
    if any(problems.values()):
        found = "; ".join(f"{what}: {', '.join(keys)}" for what, keys in problems.items() if keys)
        raise ValueError(
            f"the state dict does not fit the U-ViT that its shapes describe. Keys {found}. "
            "Drop or rename what is too much; a prefix such as 'module.' has to go."
        )


def _side(num_patches: int) -> int:
    side = math.isqrt(max(0, num_patches))
    if side < 1 or side * side != num_patches:
        raise ValueError(
            f"the position embedding leaves {num_patches} patches, which is no square; "
            "give sample_size=(height, width), or text_len= where the text is not of 77 tokens."
        )
    return side


def _scaling_of(state_dict: Mapping[str, Tensor], asked: Scaling) -> Scaling:
    """The gate that the checkpoint holds, unless it holds none; the activation cannot be seen in it."""
    layer = next((w for key, w in state_dict.items() if _GATE.fullmatch(key)), None)
    if layer is None or (str(asked) != "none" and not isinstance(asked, LS)):
        return asked
    hidden, width = layer.shape
    hint = asked if isinstance(asked, LS) else LS()
    # Several ratios give the same hidden width: take the one asked for, else one that the paper used.
    ratio = next(r for r in (hint.ratio, 16, 8, 4, width // hidden) if max(1, width // r) == hidden)
    return LS(ratio=ratio, activation=hint.activation, shared="se.layer1.weight" in state_dict)
