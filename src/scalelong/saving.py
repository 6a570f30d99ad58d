"""`load`: a saved model with its scaling. diffusers alone would run it unscaled, with only a warning."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from scalelong.skips.attach import adapter_for, attach, attached, is_gate_key
from scalelong.skips.sites import CONFIG_KEY, PLACEMENTS
from scalelong.skips.spec import parse_scaling

_WEIGHTS = "diffusion_pytorch_model"
_ALIGNMENT = 64  # bytes: torch's own on the CPU


def load(path: str | Path, *, subfolder: str | None = None, variant: str | None = None, **kwargs: Any) -> nn.Module:
    """Load a model that `save_pretrained` wrote, of any class that `apply` takes, with its scaling and gates.

    `path` is a folder or a hub name; other arguments (`torch_dtype`, `device_map`, …) go to the class's own
    `from_pretrained`. A model saved without a scaling comes back plain.
    """
    folder = _local_folder(path) / (subfolder or "")
    config = read_config(folder)
    cls = model_class(config)
    entry = recorded_scaling(config)
    with _quiet_about_scaling():
        model: nn.Module = cls.from_pretrained(folder, variant=variant, **kwargs)
    take_ownership(model)
    if entry is None or attached(model) is not None:
        return model
    adapter = adapter_for(model)
    skips = adapter.find(model)
    attach(model, adapter, skips, parse_scaling(entry["scaling"]), entry["placement"], entry["keep_function"])
    gates = {name for name in model.state_dict() if is_gate_key(name)}
    found = {name: tensor for name, tensor in _saved_tensors(folder, variant) if name in gates} if gates else {}
    if gates - set(found):
        raise ValueError(
            f"{folder} names the scaling {entry['scaling']!r} but lacks {', '.join(sorted(gates - set(found)))}."
        )
    model.load_state_dict(found, strict=False)
    return model


def take_ownership(model: nn.Module) -> None:
    """Finish what diffusers' loader leaves open: gates without values, and tensors that lie in the file.

    The loader maps the file, and its tensors lie there as they come. Matrix products round differently on
    misaligned memory, so without a copy the loaded model would differ in the last bits.
    """
    device = next((p.device for p in model.parameters() if not p.is_meta), None)
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if device is not None and is_gate_key(name) and own and own[0].is_meta:
            module.to_empty(device=device, recurse=False)
            module.reset_parameters()
    for tensor in chain(model.parameters(), model.buffers()):
        if tensor.device.type == "cpu" and tensor.data_ptr() % _ALIGNMENT:
            tensor.data = tensor.data.clone()


def read_config(folder: Path) -> dict[str, Any]:
    """A model folder's config.json."""
    file = folder / "config.json"
    if not file.is_file():
        hint = (
            "; it is a pipeline: name the subfolder of its model ('unet' or 'transformer')"
            if (folder / "model_index.json").is_file()
            else ""
        )
        raise ValueError(f"no config.json in {folder}{hint}. A folder that save_pretrained wrote has one.")
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON: {error}.") from error
    if not isinstance(config, dict) or "_class_name" not in config:
        raise ValueError(f"{file} names no model class (_class_name); save_pretrained writes one.")
    return config


def recorded_scaling(config: dict[str, Any]) -> dict[str, Any] | None:
    """The scaling that a config.json names: an entry of ours, or U-ViT's own fields."""
    if config["_class_name"] == "UViT":
        own = {"scaling": config.get("scaling", "none"), "keep_function": config.get("keep_function", False)}
        return own | {"placement": "concat"} if own["scaling"] != "none" else None
    entry: dict[str, Any] | None = config.get(CONFIG_KEY)
    if entry is None:
        return None
    if not isinstance(entry, dict) or set(entry) != {"scaling", "placement", "keep_function"}:
        raise ValueError(
            f"the entry {CONFIG_KEY!r} in config.json has a scaling, a placement and keep_function, got {entry!r}."
        )
    if entry["placement"] not in PLACEMENTS:
        raise ValueError(
            f"config.json names the placement {entry['placement']!r}; there is {', '.join(PLACEMENTS)}."
        )
    parse_scaling(entry["scaling"])
    return entry


def model_class(config: dict[str, Any]) -> Any:
    """The class that a config names: ours, or one of diffusers'."""
    import diffusers

    name = config["_class_name"]
    if name == "UViT":
        from scalelong.backbones.uvit import UViT

        return UViT
    cls = getattr(diffusers, name, None)
    if cls is None:
        raise ValueError(f"config.json names the class {name!r}, which is neither scalelong's nor diffusers'.")
    return cls


def _local_folder(path: str | Path) -> Path:
    if Path(path).is_dir():
        return Path(path)
    if str(path).count("/") != 1 or str(path).startswith((".", "/", "~")):
        raise ValueError(f"there is no folder {str(path)!r}.")
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors"]))


def _saved_tensors(folder: Path, variant: str | None) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    dot_variant = f".{variant}" if variant else ""
    index = folder / f"{_WEIGHTS}.safetensors.index{dot_variant}.json"
    names = {f"{_WEIGHTS}{dot_variant}.safetensors"}
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    for name in sorted(names):
        if not (folder / name).is_file():
            raise ValueError(
                f"the gates are read from {name}, which is not in {folder}; save with safe_serialization."
            )
        with safe_open(folder / name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - a file handle, not a dict
                if is_gate_key(key):
                    yield key, file.get_tensor(key)


@contextmanager
def _quiet_about_scaling() -> Iterator[None]:
    """diffusers warns of a config entry and tensors that it does not know; here they are about to be used."""

    def is_news(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return CONFIG_KEY not in message and "skip_scal" not in message

    loggers = [logging.getLogger(f"diffusers.{name}") for name in ("configuration_utils", "models.modeling_utils")]
    for logger in loggers:
        logger.addFilter(is_news)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_news)
