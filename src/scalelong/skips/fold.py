"""Moving constants between skips and weights, where that is exact: a linear layer reads the skip directly.

U-ViT: `W[:, D:] *= κ_i`. GroupNorm UNets scaled after the norm: the skip part of the norm's gain and bias
and of the shortcut's columns. HunyuanDiT scaled after the norm: the skip's columns of `skip_linear`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from scalelong.skips.scalers import SkipScale, first_coefficients
from scalelong.skips.sites import Adapter, LongSkip
from scalelong.skips.spec import Scaling


def constants_of(scales: Sequence[SkipScale]) -> list[float]:
    """The coefficients as numbers; there are none where they depend on the input."""
    constants = [number for scale in scales if (number := scale.number()) is not None]
    if len(constants) < len(scales):
        raise ValueError(
            "coefficients that depend on the input, as a gate's do, cannot be folded into weights; keep the "
            "scaling (save_pretrained and scalelong.load do), or train with a constant ('cs:0.7')."
        )
    return constants


def compensation(scaling: Scaling, num_skips: int) -> list[float]:
    """What the merge weights are multiplied by so that the first coefficients change nothing: 1/κ_i."""
    first = first_coefficients(scaling, num_skips) or ()
    if any(c == 0 or not math.isfinite(1 / c) for c in first):
        raise ValueError(f"keep_function divides by the first coefficients, and {str(scaling)!r} has a 0.")
    return [1 / c for c in first]


def check_exact(adapter: Adapter, skips: Sequence[LongSkip], placement: str, factors: Sequence[float]) -> None:
    """Refuse where a factor other than 1 would have to pass through a normalisation."""
    if all(factor == 1 for factor in factors):
        return
    if any(not adapter.merge_weights(skip, placement) for skip in skips):
        raise ValueError(
            f"a constant at placement={placement!r} cannot be moved into the weights of this model: a "
            "normalisation stands between the skip and the weights that read it. Apply with placement='norm' for "
            "that; or, to begin with a trained model's function, apply a gate ('ls') with keep_function=True."
        )


@torch.no_grad()
def scale_merge_weights(
    adapter: Adapter, skips: Sequence[LongSkip], placement: str, factors: Sequence[float]
) -> None:
    """Multiply the weights that read skip i by the i-th factor, all or none; no factors, no change."""
    if not factors:
        return
    products = []
    for skip, factor in zip(skips, factors, strict=True):
        views = adapter.merge_weights(skip, placement) if factor != 1 else []
        _refuse_adapted(skip, views)
        for view in views:
            product = view * factor
            if not view.is_meta and view.isfinite().all() and not product.isfinite().all():
                raise ValueError(
                    f"the weights of {skip.name} times {factor:.3g} overflow {view.dtype}; "
                    "convert the model to float32 first, or choose coefficients nearer to 1."
                )
            products.append((view, product))
    for view, product in products:
        view.copy_(product)


def _refuse_adapted(skip: LongSkip, views: Sequence[torch.Tensor]) -> None:
    """LoRA beside a weight that reads the skip reads it too, and so does the original of a trained copy."""
    storages = {view.untyped_storage()._cdata for view in views}
    for name, module in skip.block.named_modules():
        if type(module).__module__.split(".")[0] != "peft":
            continue
        adapted = [getattr(module, "base_layer", None), *getattr(module, "modules_to_save", {}).values()]
        weights = [layer.weight for layer in adapted if isinstance(getattr(layer, "weight", None), torch.Tensor)]
        if any(weight.untyped_storage()._cdata in storages for weight in weights):
            raise ValueError(
                f"{skip.name}.{name} carries a PEFT adapter, which reads the skip beside the weights that would be "
                "changed; merge it into them first (merge_and_unload()), or unload() it."
            )
