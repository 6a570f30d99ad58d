"""Putting scales into a model's tree and taking them out again. No checks: those are `apply`'s.

Each skip's scale sits on the block that merges it, as `skip_scale`; on the model one `skip_scaling` holds
the gates that skips share (registered twice, safetensors would refuse to save them) and what was asked for.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from typing import Any, Self

from torch import nn
from torch.utils.hooks import RemovableHandle

from scalelong.skips import hooks
from scalelong.skips.scalers import SkipScale, build_scales, copy_parts, refuse_a_copy_alone
from scalelong.skips.sites import Adapter, LongSkip, UnsupportedModelError
from scalelong.skips.spec import Scaling

# Class name -> the module and class of its adapter. By name, so that nothing is imported before it is needed.
_ADAPTERS = {
    "UNet2DModel": ("scalelong.adapters.unet", "UNetAdapter"),
    "UNet2DConditionModel": ("scalelong.adapters.unet", "UNetAdapter"),
    "UNetMotionModel": ("scalelong.adapters.unet", "UNetAdapter"),
    "UNet3DConditionModel": ("scalelong.adapters.unet", "UNetAdapter"),
    "I2VGenXLUNet": ("scalelong.adapters.unet", "UNetAdapter"),
    "HunyuanDiT2DModel": ("scalelong.adapters.hunyuan_dit", "HunyuanDiTAdapter"),
    "UViT": ("scalelong.adapters.uvit", "UViTAdapter"),
}


class SkipScaling(nn.Module):
    """On the model: the shared gates, and what `scaling_of` needs to know."""

    def __init__(self, scaling: Scaling, placement: str, keep_function: bool, gates: nn.ModuleDict) -> None:
        super().__init__()
        self.scaling = scaling
        self.placement = placement
        self.keep_function = keep_function
        self.gates = gates
        self.hook_handles: list[RemovableHandle] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        refuse_a_copy_alone(memo)
        return copy_parts(self, memo)

    def extra_repr(self) -> str:
        """The spec and the placement, for printing the model."""
        return f"{self.scaling}, placement={self.placement}"


def build(
    skips: list[LongSkip], scaling: Scaling, placement: str, keep_function: bool
) -> tuple[list[SkipScale], SkipScaling]:
    """The modules that `attach` puts into the tree; the model is not touched yet."""
    like = next(p for p in skips[0].block.parameters() if p.is_floating_point())
    scales, gates = build_scales(
        scaling,
        [skip.shape for skip in skips],
        keep_function=keep_function,
        device=like.device,
        dtype=like.dtype,
    )
    return scales, SkipScaling(scaling, placement, keep_function, gates)


def attach(
    model: nn.Module, adapter: Adapter, skips: list[LongSkip], scales: list[SkipScale], root: SkipScaling
) -> None:
    """Put the scales into the tree, the hooks on the blocks and the note into the config."""
    for skip, scale in zip(skips, scales, strict=True):
        skip.block.skip_scale = scale
    model.skip_scaling = root
    root.hook_handles += adapter.attach(model, skips, root.placement)
    root.hook_handles.append(model.register_load_state_dict_post_hook(_accept_missing_gates))
    root.train(model.training)
    adapter.record(
        model,
        {"scaling": str(root.scaling), "placement": root.placement, "keep_function": root.keep_function},
    )


def detach(model: nn.Module) -> None:
    """Undo `attach`, to the last attribute."""
    adapter = adapter_for(model)
    for skip in adapter.find(model):
        hooks.unlink(skip.block)
        del skip.block.skip_scale
    for handle in model.skip_scaling.hook_handles:  # type: ignore[union-attr]
        handle.remove()
    del model.skip_scaling
    adapter.record(model, None)


def attached(model: nn.Module) -> SkipScaling | None:
    """The note that `attach` left on the model."""
    found = model._modules.get("skip_scaling")
    return found if isinstance(found, SkipScaling) else None  # a network of one's own may use the name


def refuse_offloaded(model: nn.Module, what: str) -> None:
    """Weights that accelerate keeps elsewhere cannot be changed here: it would seem to work and do nothing."""
    offloaded = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    if offloaded and any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise ValueError(
            f"{what} needs the weights, and {len(offloaded)} tensors of {type(model).__name__} are offloaded "
            f"({offloaded[0]}, …); do it before cpu_offload, device_map or enable_sequential_cpu_offload, or take "
            "that off first (accelerate.hooks.remove_hook_from_submodules, pipeline.remove_all_hooks)."
        )


def adapter_for(model: nn.Module) -> Adapter:
    """The adapter for this model's class, or a refusal that says what was looked for."""
    for cls in type(model).__mro__:
        if cls.__name__ in _ADAPTERS and cls.__module__.split(".")[0] in ("diffusers", "scalelong"):
            module, name = _ADAPTERS[cls.__name__]
            adapter: Adapter = getattr(importlib.import_module(module), name)()
            return adapter
    raise UnsupportedModelError(
        f"no long skips were found in {type(model).__name__}: looked for one of {', '.join(_ADAPTERS)}, "
        "or a subclass. For a network of your own, put scalelong.SkipScales on the line that concatenates "
        "(docs/your-own-unet.md)."
    )


def _accept_missing_gates(model: nn.Module, keys: Any) -> None:
    """A state dict without gates loads, and says so; one with half of them does not.

    It may come from before the gates were there, or from a model that lost them in loading: nothing in it tells.
    One that lacks more than gates is a part of a state, as LoRA's is, or an error that torch raises.
    """
    gates = [name for name, _ in model.named_parameters() if is_gate_key(name)]
    # As part of a larger module, the model's keys carry that module's prefix.
    missing = [key for key in keys.missing_keys if any(f".{key}".endswith(f".{gate}") for gate in gates)]
    if gates and len(missing) == len(gates) == len(keys.missing_keys):
        keys.missing_keys.clear()
        warnings.warn(
            f"the state dict holds none of the {len(gates)} gate tensors, which keep the values they have: it was "
            "made without skip gates, or it comes from a model that plain from_pretrained loaded, which drops "
            "them; scalelong.load(folder) keeps them.",
            stacklevel=_frames_to_the_caller(),
        )


def _frames_to_the_caller() -> int:
    """The `stacklevel` that names the line outside torch and this package from which all this was called."""
    level, frame = 1, inspect.currentframe()
    while frame and frame.f_back and frame.f_globals["__name__"].split(".")[0] in ("torch", "scalelong"):
        level, frame = level + 1, frame.f_back
    return level - 1  # not counting this function's own frame


def is_gate_key(name: str) -> bool:
    """Whether a state-dict key belongs to what `attach` added."""
    return "skip_scale" in name.split(".") or "skip_scaling" in name.split(".")
