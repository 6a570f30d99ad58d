"""`scalelong inspect`: the long skips of a saved model or a preset, and what a scaling makes of them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from torch import nn

    from scalelong.skips.handle import AppliedScaling

EXAMPLES = (
    "Examples: [bold]scalelong inspect cifar10-uvit-s --scaling cs:0.5[/] or "
    "[bold]scalelong inspect path/to/stable-diffusion/unet --scaling ls[/]"
)


def inspect(
    model: Annotated[
        str, typer.Argument(metavar="PATH|PRESET", help="A saved diffusers folder, a run's, or a preset's name.")
    ],
    scaling: Annotated[
        str | None, typer.Option(help="A spec such as cs:0.7, ls or 1/sqrt2. By default the saved one, or none.")
    ] = None,
    placement: Annotated[str | None, typer.Option(help="concat (the paper's) or norm.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """Print one row per long skip: index, module, shape, coefficient. Loads no weights."""
    import torch

    from scalelong.presets import MODEL_PRESETS
    from scalelong.skips.apply import apply
    from scalelong.skips.spec import parse_scaling

    if scaling is not None:
        parse_scaling(scaling)  # before any building: a typo answers at once
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the table says the same
        if model in MODEL_PRESETS:
            network, saved = _from_preset(model), None
        else:
            network, saved = _from_folder(model)
        saved = saved or {}
        handle = apply(
            network,
            scaling or saved.get("scaling", "none"),
            placement=placement or saved.get("placement", "concat"),
        )
        parameters = sum(p.numel() for p in network.parameters())
        if as_json:
            typer.echo(json.dumps(_as_dict(handle, parameters), ensure_ascii=False, indent=2))
        else:
            typer.echo(f"{model}: {parameters:,} parameters, {_learned(handle):,} of them in the scaling")
            typer.echo(handle.summary())


def _from_preset(name: str) -> nn.Module:
    from scalelong.backbones.build import build

    return build(name)


def _from_folder(path: str) -> tuple[nn.Module, dict[str, Any] | None]:
    from scalelong.config import meant
    from scalelong.experiment import run_config
    from scalelong.presets import MODEL_PRESETS
    from scalelong.saving import model_class, read_config, recorded_scaling

    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(
            f"{path!r} is neither a folder nor a preset; {meant(path, MODEL_PRESETS)} presets are "
            f"{', '.join(MODEL_PRESETS)}."
        )
    if (run := run_config(folder)) is not None:
        from scalelong.backbones.build import build

        scaled = {"scaling": run.model.scaling, "placement": run.model.placement}
        return build(run.model.preset, **run.model.changes), scaled
    if (folder / "model_index.json").is_file():
        parts = [folder / part for part in ("unet", "transformer") if (folder / part).is_dir()]
        if not parts:
            raise ValueError(f"the pipeline in {path} has neither a unet nor a transformer folder.")
        folder = parts[0]
    config = read_config(folder)
    entry = recorded_scaling(config)
    plain = {key: value for key, value in config.items() if key not in ("scalelong", "scaling", "keep_function")}
    return model_class(config["_class_name"]).from_config(plain), entry


def _learned(handle: AppliedScaling) -> int:
    return sum(p.numel() for p in handle.parameters())


def _as_dict(handle: AppliedScaling, parameters: int) -> dict[str, Any]:
    from scalelong.skips.summary import undone_share

    return {
        "model": type(handle.model).__name__,
        "parameters": parameters,
        "scaling": str(handle.scaling),
        "placement": handle.placement,
        "scaling_parameters": _learned(handle),
        "skips": [
            {
                "index": skip.index,
                "module": skip.name,
                "shape": skip.shape_text,
                "coefficient": scale.number(),
                "undone_by_norm": undone_share(skip) if handle.placement == "concat" else 0.0,
            }
            for skip, scale in zip(handle.skips, handle.scales, strict=True)
        ],
    }
