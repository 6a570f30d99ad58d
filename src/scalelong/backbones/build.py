"""`build`: a preset's network, with a scaling."""

from __future__ import annotations

from typing import Any

from torch import nn

from scalelong.presets import Backbone, model_preset
from scalelong.saving import model_class
from scalelong.skips.apply import apply
from scalelong.skips.sites import check_placement_name
from scalelong.skips.spec import Scaling, parse_scaling

CLASS_NAMES: dict[Backbone, str] = {"uvit": "UViT", "unet": "UNet2DModel", "text-unet": "UNet2DConditionModel"}


def build(
    preset: str,
    *,
    scaling: str | Scaling = "none",
    placement: str = "concat",
    keep_function: bool = False,
    **changes: Any,
) -> nn.Module:
    """A fresh network of a preset's size; `changes` replace entries of its config, the rest is as in `apply`.

    Under `torch.device("meta")` it costs no memory.
    """
    scaling = parse_scaling(scaling)
    check_placement_name(placement)
    chosen = model_preset(preset)
    model: nn.Module = model_class(CLASS_NAMES[chosen.backbone])(**{**chosen.config, **changes})
    if str(scaling) != "none":
        apply(model, scaling, placement=placement, keep_function=keep_function)
    return model
