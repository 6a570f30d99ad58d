"""What a dry run prints: the work of a command, resolved and counted. Nothing is written."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scalelong.comparison import Member
    from scalelong.config import RunConfig
    from scalelong.data.sources import Image, Source
    from scalelong.data.store import Store
    from scalelong.experiment import LoadedRun

Plan = dict[str, Any]


@contextmanager
def opened_data(path: Path | None, dry_run: bool) -> Iterator[Store]:
    """The data of a command; a dry run that needs the digits does not leave them in the cache folder."""
    from scalelong import experiment
    from scalelong.data.prepare import prepare
    from scalelong.data.sources import digits

    if path is not None or not dry_run or experiment.digits_folder().is_dir():
        yield experiment.open_data(path)
    else:
        with tempfile.TemporaryDirectory(prefix="scalelong-") as folder:
            yield prepare(digits(), Path(folder) / "digits")


def training_plan(config: RunConfig, store: Store | None, out: Path, device: str) -> Plan:
    """What `train` would do with a config on this data and device; without data, with the preset's own shapes."""
    from scalelong import experiment
    from scalelong.config import resolved_for, to_dict

    config = config if store is None else experiment.fitted_to(config, store)
    config = replace(config, train=resolved_for(config.train, device))
    experiment.check_folder(config, out)
    parameters = sum(p.numel() for p in experiment.build_model(config, "meta").parameters())
    # Weights, gradients and Adam's two moments, and each average, in float32; activations come on top.
    state_bytes = 4 * parameters * (4 + len(config.train.ema_rates))
    return {
        "out": str(out),
        "images": None if store is None else len(store),
        "parameters": parameters,
        "gflop_per_image": round(experiment.flops_per_image(config) / 1e9, 2),
        "state_gib": round(state_bytes / 2**30, 3),
        "images_per_step": config.train.batch_size,
        "steps": config.train.steps,
        "starts_at": experiment.last_step(out),
        "epochs": None if store is None else round(config.train.steps * config.train.batch_size / len(store), 2),
        "config": to_dict(config),
    }


def training_text(plan: Plan) -> str:
    """A training plan for people."""
    resumed = f", the first {plan['starts_at']:,} of them done" if plan["starts_at"] else ""
    data = "no data is given: sizes are the preset's own"
    if plan["images"] is not None:
        data = f"{plan['epochs']} epochs of {plan['images']:,} images"
    return (
        f"{json.dumps(plan['config'], indent=2, ensure_ascii=False)}\n"
        f"{plan['parameters']:,} parameters; {plan['gflop_per_image']:,} GFLOP to train on an image; "
        f"{plan['state_gib']} GiB for weights, gradients, optimiser and "
        f"averages, activations not counted; {plan['images_per_step']} images per step, {plan['steps']:,} "
        f"steps{resumed}: "
        f"{data}; nothing was written."
    )


def comparison_plan(group: Sequence[Member], store: Store, out: Path, workers: int, device: str) -> Plan:
    """What `compare` would do: a training plan for each run, and their sums."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; --out is a folder for the runs and their report.")
    runs = []
    for member in group:
        plan = training_plan(member.config, store, member.folder, device)
        runs.append({"scaling": member.scaling, "seed": member.seed, "folder": plan.pop("out"), **plan})
    at_once = sorted((run["state_gib"] for run in runs), reverse=True)[:workers]
    return {
        "out": str(out),
        "images": len(store),
        "runs": runs,
        "runs_at_once": workers,
        "state_gib_at_once": round(sum(at_once), 3),
        "total_steps": sum(run["steps"] for run in runs),
        "steps_done": sum(min(run["starts_at"], run["steps"]) for run in runs),
    }


def comparison_text(plan: Plan) -> str:
    """A comparison's plan for people: the config that all share, and a row per run."""
    from scalelong.skips.summary import format_table

    shown = ("scaling", "seed", "folder", "parameters", "state_gib", "images_per_step", "steps", "starts_at")
    table = format_table([{key: str(run[key]) for key in shown} for run in plan["runs"]])
    return (
        f"{json.dumps(plan['runs'][0]['config'], indent=2, ensure_ascii=False)}\n"
        "The config of the first run; the others differ in scaling and seed.\n\n" + "\n".join(table) + "\n\n"
        f"{len(plan['runs'])} runs of {plan['total_steps']:,} steps in all, {plan['steps_done']:,} of them done, "
        f"{plan['runs_at_once']} runs at once with {plan['state_gib_at_once']} GiB of state, activations not "
        "counted; nothing was written."
    )


def first_image(source: Source) -> Image | None:
    """The first image that can be decoded: it tells the size of all."""
    return next((item.image for item in source.items() if item.image is not None), None)


def preparation_plan(source: Source, out: Path) -> Plan:
    """What `prepare` would write, if no image is broken."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not empty; choose another --out, or remove it first.")
    first = first_image(source)
    if first is None:
        raise ValueError(f"{source.description}: none of its {source.count:,} images can be decoded.")
    height, width, channels = first.shape
    per_image = first.nbytes + (8 if source.classes is not None else 0)  # a label is an int64
    return {
        "source": source.description,
        "out": str(out),
        "count": source.count,
        "height": height,
        "width": width,
        "channels": channels,
        "classes": source.classes,
        "bytes": source.count * per_image,
    }


def preparation_text(plan: Plan) -> str:
    """A preparation's plan for people."""
    labels = f" with {len(plan['classes'])} classes" if plan["classes"] else " without labels"
    total, text = plan["bytes"] + plan.get("text_bytes", 0), ""
    if "text" in plan:
        told = plan["text"]
        text = (
            f"; {told['captions']:,} captions as {told['length']} tokens of width {told['width']} in float16, "
            f"{plan['text_bytes'] / 2**20:,.1f} MiB of it"
        )
    return (
        f"{plan['source']}: {plan['count']:,} images{labels}, the first of {plan['width']}×{plan['height']}×"
        f"{plan['channels']}; {total / 2**20:,.1f} MiB would go to {plan['out']}{text}; nothing was written."
    )


def evaluation_plan(
    run: LoadedRun, store: Store, features: str, inception: Path | None, how_sampled: str, **how: Any
) -> Plan:
    """What `evaluate` would do. A guided step asks the network twice, with the class and without."""
    from scalelong.metrics.evaluate import protocol_of, reference_file, statistics_folder
    from scalelong.metrics.features import KINDS, inception_name
    from scalelong.metrics.weights import REQUIREMENT, local_inception

    name = inception_name(inception) if features == "inception" else KINDS[features].name
    cached = reference_file(store, name, statistics_folder()).is_file()
    weights = local_inception(inception) or f"to be downloaded from {REQUIREMENT}, 81 MB"
    return {
        "step": run.step,
        "ema": run.ema_rate,
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "data": str(store.folder),
        "images": len(store),
        "reference": "cached" if cached else f"to be computed from {len(store):,} images",
        "inception": str(weights) if features == "inception" else None,
        "num": how["num"],
        "images_per_batch": min(how["num"], how["batch"]),
        "network_evaluations": how["num"] * how["steps"] * (1 if how["guidance"] == 1 else 2),
        "protocol": protocol_of(name, how["num"], len(store), how_sampled),
    }


def evaluation_text(plan: Plan) -> str:
    """An evaluation's plan for people."""
    lines = [
        f"{plan['run']}: {plan['parameters']:,} parameters of step {plan['step']:,}, averaged at {plan['ema']}",
        f"{plan['num']:,} samples, {plan['images_per_batch']:,} at a time: {plan['network_evaluations']:,} "
        "evaluations of the network on one image",
        f"features of the data in {plan['data']}: {plan['reference']}",
        f"Inception weights: {plan['inception']}" if plan["inception"] else "",
        f"({plan['protocol']})",
        "nothing was written.",
    ]
    return "\n".join(line for line in lines if line)
