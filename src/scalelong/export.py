"""A run as a diffusers pipeline folder. `load_pipeline` opens such a folder, or any of diffusers', scaled."""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from scalelong.backbones.uvit import UViT
from scalelong.data.latents import load_autoencoder
from scalelong.diffusion.process import EDM, Flow, VariancePreserving
from scalelong.diffusion.sampling import scheduler_for
from scalelong.diffusion.solvers import EDM_SIGMAS
from scalelong.diffusion.targets import SIGMA_DATA
from scalelong.experiment import LoadedRun, autoencoder_of, encoder_of, noise_is_all, process_of
from scalelong.saving import load, read_config, recorded_scaling
from scalelong.skips.apply import scaling_of

INDEX = "model_index.json"
_OURS = ["pipeline", "ScaleLongPipeline"]  # the file that an exported folder carries, and its class
_SETTINGS = (
    "num_classes",
    "class_names",
    "null_class",
    "text_len",
    "reads_padding",
    "null_text",
    "process",
    "target",
)
_SCHEDULERS = ("DDIMScheduler", "EDMDPMSolverMultistepScheduler", "FlowMatchEulerDiscreteScheduler")


def export(run: LoadedRun, out: Path, *, fold: bool = False, text_encoder: str | None = None) -> str:
    """Write the pipeline, whole or not at all, and return the name of its class.

    A stock DDIMPipeline where that computes the same: unconditional, on pixels, neither EDM nor a flow, and the
    scaling inside U-ViT or folded into the weights. Else the folder carries `pipeline.py`, for latents their
    autoencoder, and for text its encoder and tokenizer; `text_encoder` tells where these are now.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} already exists; choose another --out, or remove it first.")
    if bad := next((name for name, w in run.model.named_parameters() if not w.isfinite().all()), None):
        raise ValueError(f"the weights are not finite, {bad} among them: nothing can be drawn with them.")
    run = replace(run, model=copy.deepcopy(run.model).cpu())  # whose run it is may go on with it
    scheduler, text = _scheduler(run), _text_parts(run, text_encoder)
    if fold and (handle := scaling_of(run.model)) is not None:
        handle.fold()
    pipeline = _pipeline(run, scheduler, text)
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
    """DDIM where variance is kept, DPM-Solver++ for EDM, Euler's steps for a flow."""
    from diffusers import EDMDPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler

    process = process_of(run.config)
    if run.config.latents is not None and noise_is_all(process):
        raise ValueError(
            f"a pipeline draws by DDIM, which cannot draw latents of the {process.name} schedule from predictions "
            "of the noise; train with --set target=v, or draw with scalelong sample."
        )
    if isinstance(process, EDM):
        return EDMDPMSolverMultistepScheduler(
            sigma_min=EDM_SIGMAS[0], sigma_max=EDM_SIGMAS[1], sigma_data=SIGMA_DATA
        )
    if isinstance(process, Flow):
        return FlowMatchEulerDiscreteScheduler()
    return scheduler_for(process, "ddim", clip=run.config.latents is None)


def _process_settings(run: LoadedRun) -> dict[str, Any]:
    """What DDIM does not know already of the run's process."""
    process = process_of(run.config)
    if isinstance(process, VariancePreserving):
        return {}
    return {"process": "flow" if isinstance(process, Flow) else process.name, "target": process.target}


def _text_parts(run: LoadedRun, place: str | None) -> dict[str, Any]:
    """A pipeline's arguments about text: the run's encoder and how it is asked."""
    if run.text is None:
        if place is not None:
            raise ValueError(f"a text encoder is for runs on text, and this is none, got {place!r}; leave it out.")
        return {}
    encoder = encoder_of(run.text, place)
    return {
        "text_encoder": encoder.model.cpu(),
        "tokenizer": encoder.tokenizer,
        "text_len": encoder.length,
        "reads_padding": encoder.reads_padding,
        "null_text": run.config.data.label_dropout > 0,
    }


def _pipeline(run: LoadedRun, scheduler: Any, text: dict[str, Any]) -> Any:
    from diffusers import DDIMPipeline

    from scalelong.pipeline import ScaleLongPipeline

    model = run.model
    keeps_scaling = scaling_of(model) is not None and not isinstance(model, UViT)
    vae, process = _vae(run), _process_settings(run)
    if run.config.data.condition == "none" and vae is None and not keeps_scaling and not process:
        return DDIMPipeline(model, scheduler)
    # Not a list: diffusers takes a list in a pipeline's index for a part of it.
    names = None if run.class_names is None else {name: i for i, name in enumerate(run.class_names)}
    classes = {"num_classes": run.num_classes, "class_names": names, "null_class": run.null_class}
    told = {**classes, **text, **process}
    return ScaleLongPipeline(model, scheduler, vae, **told)


def _vae(run: LoadedRun) -> Any:
    """The autoencoder of a run on latents, with the scale that it was trained at in its config."""
    autoencoder = autoencoder_of(run.config, "cpu")
    if autoencoder is None:
        return None
    network = copy.deepcopy(autoencoder.network)  # the opened one is kept for other runs
    network.register_to_config(scaling_factor=autoencoder.scaling_factor)
    return network


def _carry_code(folder: Path, cls: type) -> None:
    """Copy the class's file beside the weights, and name it in the index as diffusers wants it."""
    source = Path(inspect.getfile(cls))
    shutil.copyfile(source, folder / source.name)
    index = json.loads((folder / INDEX).read_text())
    index["_class_name"] = [source.stem, cls.__name__]
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def load_pipeline(folder: str | Path, *, variant: str | None = None, torch_dtype: Any = None) -> Any:
    """A pipeline folder of diffusers, with the scaling of every component that was saved with one.

    It opens what `scalelong export` wrote and what a stock pipeline's `save_pretrained` did, `variant` and
    `torch_dtype` as `from_pretrained` takes them. No code from the folder is run.
    """
    folder = Path(folder)
    index = _read_index(folder)
    if index["_class_name"] == _OURS:
        if variant is not None:
            raise ValueError(f"what scalelong export writes has no variants, got {variant!r}; leave it out.")
        return _load_ours(folder, index).to(torch_dtype)
    cls = _stock_class(folder, index)
    components = {name: entry for name, entry in index.items() if isinstance(entry, list) and entry[0]}
    for name, (library, _) in components.items():
        if (folder / name / f"{library}.py").is_file():
            raise ValueError(f"{folder / name} carries code of its own, {library}.py. {_by_hand(folder)}")
    how = {"variant": variant, "torch_dtype": torch_dtype}
    scaled = {name: load(folder, subfolder=name, **how) for name in components if _was_scaled(folder / name)}
    with _uvit_in_a_unets_place():
        return cls.from_pretrained(folder, **scaled, **how)


@contextlib.contextmanager
def _uvit_in_a_unets_place() -> Iterator[None]:
    """diffusers is surprised, in its log, by a U-ViT where a pipeline names a UNet."""

    def is_other(record: logging.LogRecord) -> bool:
        return not (
            record.getMessage().startswith("Expected types for") and "scalelong.UViT" in record.getMessage()
        )

    log = logging.getLogger("diffusers.pipelines.pipeline_utils")
    log.addFilter(is_other)
    try:
        yield
    finally:
        log.removeFilter(is_other)


def _read_index(folder: Path) -> dict[str, Any]:
    if not (folder / INDEX).is_file():
        raise ValueError(
            f"{folder} is no pipeline: it has no {INDEX}. A pipeline's save_pretrained makes one, and so does "
            f"scalelong export RUN --out {folder}."
        )
    index: dict[str, Any] = json.loads((folder / INDEX).read_text())
    return index


def _stock_class(folder: Path, index: dict[str, Any]) -> Any:
    import diffusers

    name = index["_class_name"]
    if not isinstance(name, str):
        raise ValueError(f"{folder} carries a pipeline of its own, {name}. {_by_hand(folder)}")
    if not hasattr(diffusers, name):
        raise ValueError(
            f"{folder / INDEX} names the pipeline {name!r}, which diffusers {diffusers.__version__} does not "
            "have; install one that has it."
        )
    return getattr(diffusers, name)


def _by_hand(folder: Path) -> str:
    return (
        "load_pipeline runs no code from a folder; if you trust it: diffusers.DiffusionPipeline.from_pretrained("
        f"{str(folder)!r}, trust_remote_code=True, unet=scalelong.load({str(folder)!r}, subfolder='unet'))."
    )


def _was_scaled(component: Path) -> bool:
    """Whether a component's config names a scaling; tokenizers, schedulers and transformers' models name none."""
    file = component / "config.json"
    return (
        file.is_file()
        and "_class_name" in json.loads(file.read_text())
        and recorded_scaling(read_config(component)) is not None
    )


def _load_ours(folder: Path, index: dict[str, Any]) -> Any:
    """By our own class, not by the copy of it that the folder carries."""
    import diffusers

    from scalelong.pipeline import ScaleLongPipeline

    scheduler_name = index["scheduler"][1]
    if scheduler_name not in _SCHEDULERS:
        raise ValueError(
            f"the schedulers of exported pipelines are {', '.join(_SCHEDULERS)}, got {scheduler_name!r} in "
            f"{folder / INDEX}; export the run again."
        )
    scheduler = getattr(diffusers, scheduler_name).from_pretrained(folder, subfolder="scheduler")
    unet = load(folder, subfolder="unet")
    vae = load_autoencoder(folder / "vae").network if index.get("vae", [None])[0] else None
    settings = {name: index[name] for name in _SETTINGS if name in index}
    if index.get("text_encoder", [None])[0] is not None:
        from scalelong.data.text import load_encoder

        tokenizer, encoder = load_encoder(str(folder / "text_encoder"), tokenizer=str(folder / "tokenizer"))
        settings |= {"text_encoder": encoder.eval(), "tokenizer": tokenizer}
    return ScaleLongPipeline(unet, scheduler, vae, **settings)
