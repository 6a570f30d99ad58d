"""`load`: a saved model with its scaling. diffusers alone would run it unscaled, with only a warning."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from scalelong.skips.attach import adapter_for, attach, attached, build, is_gate_key, refuse_offloaded
from scalelong.skips.sites import CONFIG_KEY, PLACEMENTS
from scalelong.skips.spec import parse_scaling

_WEIGHTS = "diffusion_pytorch_model"
_HUB_ARGUMENTS = ("revision", "token", "cache_dir", "local_files_only", "force_download")
_NOTHING: Mapping[str, Any] = {}
_ALIGNMENT = 64  # bytes: torch's own on the CPU


def load(
    path: str | Path,
    *,
    subfolder: str | None = None,
    variant: str | None = None,
    cls: Any = None,
    **kwargs: Any,
) -> nn.Module:
    """Load a model that `save_pretrained` wrote, of any class that `apply` takes, with its scaling and gates.

    `path` is a folder or a hub name. `cls` is for classes of your own that extend a supported one. Other
    arguments (`torch_dtype`, `device_map`, …) go to the class's `from_pretrained`, those about the hub
    (`revision`, `token`, `cache_dir`, `local_files_only`) to the download. A `variant` is needed where there are
    several and no weights without one. A model saved without a scaling comes back plain.
    """
    if kwargs.pop("output_loading_info", False):
        raise ValueError("load returns the model alone; leave output_loading_info out.")
    hub = {name: kwargs.pop(name) for name in _HUB_ARGUMENTS if name in kwargs}
    folder = local_folder(path, subfolder, hub)
    variant = variant or _only_variant(folder)
    config = read_config(folder)
    entry = recorded_scaling(config)
    with _quiet_about_scaling():
        cls = cls or model_class(config["_class_name"])
        model: nn.Module = cls.from_pretrained(str(folder), variant=variant, **kwargs)
    take_ownership(model)
    if entry is None or attached(model) is not None:
        return model
    adapter = adapter_for(model)
    skips = adapter.find(model)
    attach(
        model,
        adapter,
        skips,
        *build(skips, parse_scaling(entry["scaling"]), entry["placement"], entry["keep_function"]),
    )
    gates = {name for name in model.state_dict() if is_gate_key(name)}
    if gates:
        refuse_offloaded(model, f"restoring the gates of {entry['scaling']!r}")
    found = {name: tensor for name, tensor in _saved_tensors(folder, variant) if name in gates} if gates else {}
    _check_gates(gates - set(found), entry["scaling"])
    model.load_state_dict(found, strict=False)
    return model


def take_ownership(model: nn.Module) -> None:
    """Check that diffusers' loader found the gates, and copy the tensors that it left lying in the file.

    The loader maps the file, and its tensors lie there as they come. Matrix products round differently on
    misaligned memory, so without a copy the loaded model would differ in the last bits.
    """
    if not all(p.is_meta for p in model.parameters()) and (root := attached(model)) is not None:
        empty = {name for name, p in model.named_parameters() if p.is_meta and is_gate_key(name)}
        _check_gates(empty, str(root.scaling))
    for tensor in chain(model.parameters(), model.buffers()):
        if tensor.device.type == "cpu" and tensor.data_ptr() % _ALIGNMENT:
            tensor.data = tensor.data.clone()


def _check_gates(missing: set[str], scaling: str) -> None:
    if missing:
        raise ValueError(
            f"config.json names the scaling {scaling!r}, but the weights lack {', '.join(sorted(missing))}: "
            "the file was not written by this model's save_pretrained (diffusers' EMAModel.save_pretrained leaves "
            "gates out). Save the model itself, for an EMA after ema.copy_to(model.parameters())."
        )


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


def model_class(name: str) -> Any:
    """The class of that name: ours, or one of diffusers'."""
    if name == "UViT":
        from scalelong.backbones.uvit import UViT

        return UViT
    import diffusers

    cls = getattr(diffusers, name, None)
    if cls is None:
        raise ValueError(
            f"config.json names the class {name!r}, which is neither scalelong's nor diffusers'; "
            "give it yourself: load(path, cls=YourClass)."
        )
    return cls


def local_folder(path: str | Path, subfolder: str | None = None, hub: Mapping[str, Any] = _NOTHING) -> Path:
    """A folder as it is, or what the hub has under that name, downloaded."""
    if Path(path).is_dir():
        return Path(path) / (subfolder or "")
    if str(path).count("/") != 1 or str(path).startswith((".", "/", "~")):
        raise ValueError(f"there is no folder {str(path)!r}; give a folder, or the hub's 'owner/name'.")
    from huggingface_hub import snapshot_download

    prefix = f"{subfolder}/" if subfolder else ""
    patterns = [f"{prefix}*.json", f"{prefix}*.safetensors"]
    return Path(snapshot_download(str(path), allow_patterns=patterns, **hub)) / (subfolder or "")


def _only_variant(folder: Path) -> str | None:
    """What the weights are called besides their plain name, such as fp16, where there are none of that name."""
    part = r"(-\d+-of-\d+)?"
    pattern = re.compile(rf"{_WEIGHTS}{part}(\.(?P<variant>[^.]+?))?{part}\.(safetensors|bin)")
    found = {match["variant"] for file in folder.iterdir() if (match := pattern.fullmatch(file.name))}
    if None in found or not found:
        return None
    if len(found) > 1:
        raise ValueError(
            f"of weights without a plain name there is one variant, got {', '.join(sorted(found))} in {folder}; "
            "choose with load(path, variant=...), or leave one of them in the folder."
        )
    return str(found.pop())


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
        expected = "will be ignored" in message or "were not used" in message
        return not (expected and (CONFIG_KEY in message or "skip_scal" in message))

    loggers = [logging.getLogger(f"diffusers.{name}") for name in ("configuration_utils", "models.modeling_utils")]
    for logger in loggers:
        logger.addFilter(is_news)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_news)
