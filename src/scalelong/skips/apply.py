"""`apply`: scale the long skips of a model. Find them, check everything, and only then change it."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from scalelong.skips import fold
from scalelong.skips.attach import adapter_for, attach, attached, build, refuse_offloaded
from scalelong.skips.handle import AppliedScaling
from scalelong.skips.scalers import GatedScale, starts_at_identity
from scalelong.skips.sites import Adapter, LongSkip, UnsupportedModelError, check_placement_name
from scalelong.skips.spec import ConstantScaling, Scaling, SkipNorm, parse_scaling
from scalelong.skips.summary import norm_advice

_MOST = 0.5  # of the skips' channels


class UndoneByNormWarning(UserWarning):
    """A norm behind the concatenation divides out most of what was applied."""


def find_skips(model: nn.Module) -> list[LongSkip]:
    """The model's long skips, outermost first; `UnsupportedModelError` says what was looked for."""
    return adapter_for(model).find(model)


def apply(
    model: nn.Module,
    scaling: str | Scaling,
    *,
    placement: str = "concat",
    keep_function: bool = False,
) -> AppliedScaling:
    """Scale the long skips of `model`, in place, and return a handle.

    `scaling` is a spec such as "cs:0.7", "ls" or "1/sqrt2", or an object such as `CS(kappa=0.7)`.
    `placement="concat"` scales the skip before it meets the main path, as the paper does; "norm" scales
    it behind the normalisation that follows (GroupNorm UNets, HunyuanDiT), which would undo a constant.
    `keep_function=True` is for trained weights: the outputs stay as they were at the first step.

    Residuals of a ControlNet are added to the skips before they are scaled. FreeU acts after the scale at
    "concat" and before it at "norm". Apply first; the optimiser, an average (EMA), compiling, wrapping (DDP, FSDP)
    and adapters (PEFT) come after: they know only what was there.
    `nn.DataParallel` is not supported: its replicas would ask the original's gates.
    """
    if isinstance(scaling, nn.Module):
        raise ValueError("apply takes the model first and the scaling second: apply(model, 'cs:0.7').")
    scaling = parse_scaling(scaling)
    check_placement_name(placement)
    if not isinstance(keep_function, bool):
        raise ValueError(f"keep_function is True or False, got {keep_function!r}.")
    _refuse_wrapped(model)
    adapter = adapter_for(model)
    if (present := attached(model)) is not None:
        raise ValueError(
            f"{type(model).__name__} already has the scaling {str(present.scaling)!r}; "
            "call scalelong.scaling_of(model).remove() first."
        )
    skips = adapter.find(model)
    _check_placement(adapter, model, skips, placement)
    if isinstance(scaling, SkipNorm):
        _check_skip_norm(placement, keep_function)
    factors = fold.compensation(scaling, len(skips)) if keep_function else []
    fold.check_exact(adapter, skips, placement, factors)
    if keep_function or not isinstance(scaling, ConstantScaling):
        refuse_offloaded(model, f"apply({str(scaling)!r}{', keep_function=True' * keep_function})")
    _warn_of_recorded(adapter, model)
    if not keep_function and not starts_at_identity(scaling, len(skips)) and not _looks_fresh(model):
        _warn_of_trained(scaling, skips)
    scales, root = build(skips, scaling, placement, keep_function)
    fold.scale_merge_weights(adapter, skips, placement, factors)
    attach(model, adapter, skips, scales, root)
    # Gates there are the paper's own setting: summary() tells of the norm, without a warning.
    gated = any(isinstance(scale, GatedScale) for scale in scales)
    if placement == "concat" and not gated and (advice := norm_advice(skips, scales, above=_MOST)):
        warnings.warn(advice, UndoneByNormWarning, stacklevel=2)
    return AppliedScaling(model)


def scaling_of(model: nn.Module) -> AppliedScaling | None:
    """The handle of the scaling that is attached to a model, its deep copy or a loaded one; else None.

    Looks through `torch.compile`, data-parallel and PEFT wrappers.
    """
    model = unwrapped(model)
    return None if attached(model) is None else AppliedScaling(model)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside `torch.compile`, data-parallel and PEFT wrappers."""
    while isinstance(inner := _inside(model), nn.Module):
        model = inner
    return model


def _inside(model: nn.Module) -> Any:
    if hasattr(model, "get_base_model"):
        return model.get_base_model()  # type: ignore[operator]
    if "_orig_mod" in model._modules:
        return model._modules["_orig_mod"]
    inner = model._modules.get("module")
    if inner is None:
        return None
    # A network of one's own may have a part of that name, and others beside it: a wrapper has no weights but those.
    inside = {id(p) for p in inner.parameters()}
    return inner if all(id(p) in inside for p in model.parameters()) else None


def is_compiled(model: nn.Module) -> bool:
    """Whether `torch.compile` holds the model, or a part of it: as a wrapper, in place, or by its `forward`."""
    return any(
        "_orig_mod" in module._modules
        or module._compiled_call_impl is not None
        or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
        for module in model.modules()
    )


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP has cut its parameters into parts."""
    ancestors = {cls for module in model.modules() for cls in type(module).__mro__}
    return any(cls.__module__.startswith("torch.distributed.fsdp") for cls in ancestors)


def _check_placement(adapter: Adapter, model: nn.Module, skips: list[LongSkip], placement: str) -> None:
    if placement not in adapter.placements:
        raise ValueError(
            f"{type(model).__name__} has no norm after the concatenation, so there is no placement={placement!r}; "
            f"use placement={adapter.placements[0]!r}."
        )
    adapter.check_placement(skips, placement)


def _check_skip_norm(placement: str, keep_function: bool) -> None:
    if placement == "norm":
        raise ValueError(
            "skip-norm brings a skip to one size, which the norm behind the concatenation has done already at "
            "placement='norm'; use placement='concat', or another scaling."
        )
    if keep_function:
        raise ValueError(
            "keep_function needs coefficients that can start at 1, and skip-norm divides each token by its own "
            "size; use a gate ('ls', 'ie') or 'scalar'."
        )


def _refuse_wrapped(model: nn.Module) -> None:
    """Hooks set on a wrapper, or behind a compiled graph, would silently do nothing."""
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(
            f"apply takes a model, got {type(model).__name__}"
            + ("; give it the pipeline's .unet or .transformer." if hasattr(model, "components") else ".")
        )
    ancestors = {cls for module in model.modules() for cls in type(module).__mro__}
    how = None
    if is_compiled(model):
        how = ("compiled", "apply to the plain model, then compile it")
    elif isinstance(model, nn.DataParallel):
        how = (
            "wrapped in nn.DataParallel",
            "that is not supported, because its replicas would ask the original's gates: apply to the plain model "
            "and wrap it in nn.parallel.DistributedDataParallel",
        )
    elif isinstance(model, nn.parallel.DistributedDataParallel):
        how = (
            "wrapped in DistributedDataParallel",
            "it synchronises only what was there when it was wrapped: apply to the plain model, then wrap it",
        )
    elif is_sharded(model):
        how = ("sharded by FSDP", "apply before sharding it")
    elif any(cls.__module__.split(".")[0] == "peft" for cls in ancestors):
        how = ("carrying PEFT adapters", "apply to the base model, then add the adapters")
    if how:
        raise ValueError(f"the model is {how[0]}; {how[1]}.")


def _warn_of_recorded(adapter: Adapter, model: nn.Module) -> None:
    entry = adapter.recorded(model)
    if entry:
        warnings.warn(
            f"this model was saved with the scaling {entry['scaling']!r} at {entry['placement']!r}, and loaded "
            "without it; scalelong.load(folder) restores both. What is applied now replaces that note.",
            stacklevel=3,
        )


def _looks_fresh(model: nn.Module) -> bool:
    """Every norm still has gain 1 and bias 0, which no training step leaves them at."""
    for module in model.modules():
        if isinstance(module, (nn.GroupNorm, nn.LayerNorm)) and module.weight is not None:
            if module.weight.is_meta:
                return True
            if (module.weight != 1).any() or (module.bias is not None and (module.bias != 0).any()):
                return False
    return True


def _warn_of_trained(scaling: Scaling, skips: list[LongSkip]) -> None:
    if isinstance(scaling, ConstantScaling):
        smallest = min(scaling.coefficients(len(skips)))
        effect = f"multiplies a skip by {smallest:.2g}"
    else:
        effect = "starts away from 1 on every skip"
    keeps = "'ls' with keep_function=True" if isinstance(scaling, SkipNorm) else "apply(..., keep_function=True)"
    warnings.warn(
        f"these weights look trained, and {str(scaling)!r} {effect}, which changes what they compute; "
        f"{keeps} leaves the outputs as they are at the first step.",
        stacklevel=3,
    )
