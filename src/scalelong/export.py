"""A run as a diffusers pipeline folder, and the way back: `load_pipeline`."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

from scalelong.backbones.uvit import UViT
from scalelong.data.latents import load_autoencoder
from scalelong.diffusion.process import VariancePreserving
from scalelong.diffusion.sampling import scheduler_for
from scalelong.experiment import LoadedRun, autoencoder_of, process_of
from scalelong.saving import load
from scalelong.skips.apply import scaling_of

INDEX = "model_index.json"


def export(run: LoadedRun, out: Path, *, fold: bool = False) -> str:
    """Write the pipeline, whole or not at all, and return the name of its class.

    A stock DDIMPipeline where that computes the same: unconditional, on pixels, and the scaling inside U-ViT or
    folded into the weights. Else the folder carries `pipeline.py`, and for latents their autoencoder.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} already exists; choose another --out, or remove it first.")
    scheduler = _scheduler(run)
    if fold and (handle := scaling_of(run.model)) is not None:
        handle.fold()
    pipeline = _pipeline(run, scheduler)
    work = out.with_name(f".partial-{out.name}")
    shutil.rmtree(work, ignore_errors=True)
    try:
        pipeline.save_pretrained(work)
        if type(pipeline).__module__.startswith("scalelong"):
            _carry_code(work, type(pipeline))
        if out.is_dir():
            out.rmdir()
        work.rename(out)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return type(pipeline).__name__


def _scheduler(run: LoadedRun) -> Any:
    """DDIM for the run's process and target."""
    process = process_of(run.config)
    if not isinstance(process, VariancePreserving):
        raise ValueError(
            f"a run with process={process.name} cannot be exported yet: a pipeline's DDIM scheduler runs "
            "vp-sde, ddpm, sd and cosine; scalelong sample draws from it."
        )
    return scheduler_for(process, "ddim", clip=run.config.latents is None)


def _pipeline(run: LoadedRun, scheduler: Any) -> Any:
    from diffusers import DDIMPipeline

    from scalelong.pipeline import ScaleLongPipeline

    model = run.model.cpu()
    keeps_scaling = scaling_of(model) is not None and not isinstance(model, UViT)
    vae = _vae(run)
    if run.config.data.condition == "none" and vae is None and not keeps_scaling:
        return DDIMPipeline(model, scheduler)
    return ScaleLongPipeline(model, scheduler, vae, num_classes=run.num_classes, null_class=run.null_class)


def _vae(run: LoadedRun) -> Any:
    """The autoencoder of a run on latents, with the scale that it was trained at in its config."""
    autoencoder = autoencoder_of(run.config, "cpu")
    if autoencoder is None:
        return None
    autoencoder.network.register_to_config(scaling_factor=autoencoder.scaling_factor)
    return autoencoder.network


def _carry_code(folder: Path, cls: type) -> None:
    """Copy the class's file beside the weights, and name it in the index as diffusers wants it."""
    source = Path(inspect.getfile(cls))
    shutil.copyfile(source, folder / source.name)
    index = json.loads((folder / INDEX).read_text())
    index["_class_name"] = [source.stem, cls.__name__]
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def load_pipeline(folder: str | Path) -> Any:
    """The pipeline that `scalelong export` wrote, its scaling included. No code from the folder is run."""
    import diffusers

    from scalelong.pipeline import ScaleLongPipeline

    folder = Path(folder)
    if not (folder / INDEX).is_file():
        raise ValueError(
            f"{folder} is no pipeline: it has no {INDEX}. scalelong export RUN --out {folder} makes one."
        )
    index = json.loads((folder / INDEX).read_text())
    name = index["_class_name"]
    ours = name == ["pipeline", ScaleLongPipeline.__name__]
    if not ours and name != "DDIMPipeline":
        raise ValueError(
            f"load_pipeline opens what scalelong export wrote, and {folder} holds a {name}; use "
            "diffusers.DiffusionPipeline.from_pretrained."
        )
    scheduler = diffusers.DDIMScheduler.from_pretrained(folder, subfolder="scheduler")
    unet = load(folder, subfolder="unet")
    if not ours:
        return diffusers.DDIMPipeline(unet, scheduler)
    vae = load_autoencoder(folder / "vae").network if index.get("vae", [None])[0] else None
    return ScaleLongPipeline(unet, scheduler, vae, num_classes=index["num_classes"], null_class=index["null_class"])
