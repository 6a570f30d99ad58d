"""`build`: a preset's network, with a scaling."""

from __future__ import annotations

from typing import Any

from torch import nn

from scalelong.presets import model_preset
from scalelong.skips.apply import apply
from scalelong.skips.sites import check_placement_name
from scalelong.skips.spec import Scaling, parse_scaling


def build(
    preset: str,
    *,
    scaling: str | Scaling = "none",
    placement: str = "concat",
    **changes: Any,
) -> nn.Module:
    """A fresh network of a preset's size; `changes` replace entries of its config.

    Under `torch.device("meta")` it costs no memory.
    """
    scaling = parse_scaling(scaling)
    check_placement_name(placement)
    chosen = model_preset(preset)
    config = {**chosen.config, **changes}
    model: nn.Module
    if chosen.backbone == "uvit":
        from scalelong.backbones.uvit import UViT

        model = UViT(**config)
    elif chosen.backbone == "unet":
        from diffusers import UNet2DModel

        model = UNet2DModel(**config)
    else:
        from diffusers import UNet2DConditionModel

        model = UNet2DConditionModel(**config)
    if str(scaling) != "none":
        apply(model, scaling, placement=placement)
    return model
