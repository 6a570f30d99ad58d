"""What a dry run prints: the work of a command, resolved and counted. Nothing is written."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scalelong.comparison import Member
    from scalelong.config import RunConfig
    from scalelong.data.latents import Autoencoder, LatentSpace
    from scalelong.data.sources import Image, Source
    from scalelong.data.store import Store
    from scalelong.experiment import Beginning, LoadedRun
    from scalelong.presets import PublishedData
    from scalelong.runs.data import RunData
    from scalelong.stability.probe import Plan as ProbePlan

Plan = dict[str, Any]


@contextmanager
def opened_data(path: Path | None, dry_run: bool, preset: str = "digits") -> Iterator[Store]:
    """The data of a command; a dry run that needs the digits does not leave them in the cache folder.

    Without data, a recipe is planned for those that it was published with.
    """
    from scalelong import experiment
    from scalelong.data.prepare import prepare
    from scalelong.data.sources import digits

    if path is None and dry_run and (published := published_data(preset)) is not None:
        yield published
    elif path is not None or not dry_run or experiment.digits_folder().is_dir():
        yield experiment.open_data(path)
    else:
        with tempfile.TemporaryDirectory(prefix="scalelong-") as folder:
            yield prepare(digits(), Path(folder) / "digits")


def published_data(preset: str) -> Store | None:
    """A store of the data that a recipe was published with, as far as a plan asks: it has no files."""
    from scalelong.data.store import FORMAT, Manifest, NoImages, Store
    from scalelong.presets import DATASETS

    data = DATASETS.get(preset.partition("-")[0])
    if data is None:
        return None
    manifest = Manifest(
        format=FORMAT,
        source=f"no --data: planned for {data.name}",
        count=data.count,
        height=data.size,
        width=data.size,
        channels=3,
        classes=[str(i) for i in range(data.classes)] if data.classes else None,
        skipped=[],
        sha256={},
        text=_published_text(data),
        latents=_published_latents(data),
    )
    return Store(Path(data.name), manifest, NoImages(Path(data.name), (data.count, data.size, data.size, 3)), None)


def _published_latents(data: PublishedData) -> LatentSpace | None:
    from scalelong.data.latents import LatentSpace

    if data.autoencoder is None:
        return None
    return LatentSpace(
        autoencoder=data.autoencoder,
        kind="AutoencoderKL",
        weights="",
        scaling_factor=data.latent_scale,
        shift_factor=0.0,
        channels=4,
        height=data.size // 8,
        width=data.size // 8,
    )


def _published_text(data: PublishedData) -> dict[str, Any] | None:
    from scalelong.data.contexts import TextInfo

    if data.text_encoder is None:
        return None
    length, width = data.text_tokens
    return asdict(
        TextInfo(
            encoder=data.text_encoder, revision=None, length=length, width=width, dtype="float16", captions=0, cut=0
        )
    )


def training_plan(config: RunConfig, store: Store, out: Path, device: str, begin: Beginning) -> Plan:
    """What `train` would do with a config on this data and device, and what a step of it costs."""
    from scalelong.costs import costs_of, hours_of
    from scalelong.experiment import Branch, as_begun, last_step
    from scalelong.world import rank_and_size

    plan, fitted = _run_plan(config, store, out, device)
    begin = as_begun(begin, out)
    begin.check(fitted, None, _data_at_hand(fitted, store))
    begin.model(fitted, "meta")  # the weights fit, or a sentence
    if isinstance(begin, Branch):
        plan["starts_at"] = last_step(begin.run)
    processes = rank_and_size()[1]
    return {
        **plan,
        "begins": begin.told(),
        "precision": fitted.train.precision,
        "costs": costs_of(fitted, processes).as_dict(),
        "hours": round(hours_of(fitted, device, done=plan["starts_at"]) / processes, 4),
    }


def checked(config: RunConfig, store: Store, out: Path, device: str) -> tuple[RunConfig, int]:
    """The config as it is run here, and how many parameters it has; what cannot be run is refused, at no cost."""
    from scalelong import experiment
    from scalelong.config import resolved_for
    from scalelong.world import World, rank_and_size

    config = experiment.fitted_to(config, store)
    world = World(*rank_and_size())
    config = replace(config, train=resolved_for(config.train, device, world.size))
    world.part(config.train.batch_size, config.train.accumulate)
    experiment.check_drawing(config)
    experiment.check_folder(config, out, data=_data_at_hand(config, store))
    return config, sum(p.numel() for p in experiment.build_model(config, "meta").parameters())


def _run_plan(config: RunConfig, store: Store, out: Path, device: str) -> tuple[Plan, RunConfig]:
    from scalelong import experiment
    from scalelong.config import to_dict
    from scalelong.costs import state_bytes
    from scalelong.presets import model_preset

    config, parameters = checked(config, store, out, device)
    if store.manifest.sha256:
        experiment.autoencoder_of(config, device)
    plan = {
        "out": str(out),
        "data": store.manifest.source,
        "images": len(store),
        "our_reading": model_preset(config.model.preset).our_reading,
        "parameters": parameters,
        "state_gib": round(state_bytes(parameters, config.train) / 2**30, 3),  # activations come on top
        "images_per_step": config.train.batch_size,
        "steps": config.train.steps,
        "starts_at": experiment.last_step(out),
        "epochs": round(config.train.steps * config.train.batch_size / len(store), 2),
        "config": to_dict(config),
    }
    return plan, config


def _data_at_hand(config: RunConfig, store: Store) -> RunData | None:
    """None for data that a recipe was published with: they are planned for without being there."""
    from scalelong.experiment import data_of

    return data_of(config, store) if store.manifest.sha256 else None


def training_text(plan: Plan) -> str:
    """A training plan for people."""
    resumed = f", the first {plan['starts_at']:,} of them done" if plan["starts_at"] else ""
    resumed += f", begun {plan['begins']}" if plan["begins"] else ""
    return (
        f"{json.dumps(plan['config'], indent=2, ensure_ascii=False)}\n"
        f"{_reading_text(plan)}{_costs_text(plan)}\n"
        f"{plan['images_per_step']} images per step, {plan['steps']:,} steps{resumed}: "
        f"{plan['epochs']} epochs of {plan['images']:,} images ({plan['data']}), {_hours_text(plan)}; nothing was "
        "written."
    )


def _hours_text(plan: Plan) -> str:
    from scalelong.cli.lines import in_words

    return f"about {in_words(3600 * plan['hours'])} here for the steps alone, by their arithmetic"


def _reading_text(plan: Plan) -> str:
    """A line for a network that is not as published, because it was not published."""
    found = plan["our_reading"]
    return f"{plan['config']['model']['preset']} is our reading: {found}\n" if found else ""


def _costs_text(plan: Plan) -> str:
    costs = plan["costs"]
    parts = ("weights", "gradients", "optimiser", "averages", "activations")
    checkpointed = plan["config"]["train"]["checkpoint_activations"]
    used = {**costs, "activations": costs["activations_checkpointed"] if checkpointed else costs["activations"]}
    other = "activations" if checkpointed else "activations_checkpointed"
    listed = ", ".join(f"{part} {_short(used[part] / 2**30)}" for part in parts)
    return (
        f"{costs['parameters']:,} parameters; {_short(costs['flops_per_image'] / 1e9)} GFLOP per image trained, "
        f"{_short(costs['flops_per_step'] / 1e12)} TFLOP per step\n"
        f"memory for {costs['images_at_once']:,} images at once in {plan['precision']}, computed for eager steps: "
        f"{_short(sum(used[part] for part in parts) / 2**30)} GiB ({listed}; activations "
        f"{_short(costs[other] / 2**30)} {'without' if checkpointed else 'with'} train.checkpoint_activations)"
    )


def _short(number: float) -> str:
    """Two decimals, or two digits of what is too small for them."""
    return f"{number:,.2f}" if number >= 0.1 else f"{number:.2g}"


def comparison_plan(
    group: Sequence[Member], store: Store, out: Path, workers: int, device: str, *, timed: bool
) -> Plan:
    """What `compare` would do: a training plan for each run, and their sums; `timed`, for how long."""
    from scalelong.costs import hours_of
    from scalelong.experiment import Weights, as_begun
    from scalelong.runs.folder import CONFIG

    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; --out is a folder for the runs and their report.")
    if (out / CONFIG).is_file():
        raise ValueError(f"{out} is a run itself; --out is a folder for several, such as {out}-compared.")
    runs: list[Plan] = []
    hours_each: dict[str, float] = {}  # of a scaling's whole run
    for member in group:
        plan, fitted = _run_plan(member.config, store, member.folder, device)
        if timed and member.scaling not in hours_each:
            hours_each[member.scaling] = hours_of(fitted, device, threads=1) / (workers if device == "cpu" else 1)
        if member.init is not None and not runs:
            as_begun(Weights(member.init), member.folder).model(fitted, "meta")  # the weights fit, or a sentence
        runs.append({"scaling": member.scaling, "seed": member.seed, "folder": plan.pop("out"), **plan})
    at_once = sorted((run["state_gib"] for run in runs), reverse=True)[:workers]
    left = ((run["scaling"], max(0.0, 1 - run["starts_at"] / run["steps"])) for run in runs)
    hours = {"hours": round(sum(hours_each[scaling] * share for scaling, share in left), 4)} if timed else {}
    return {
        "out": str(out),
        "images": len(store),
        "init": group[0].init,
        "runs": runs,
        "runs_at_once": workers,
        "state_gib_at_once": round(sum(at_once), 3),
        "total_steps": sum(run["steps"] for run in runs),
        "steps_done": sum(min(run["starts_at"], run["steps"]) for run in runs),
        **hours,
    }


def comparison_text(plan: Plan) -> str:
    """A comparison's plan for people: the config that all share, and a row per run."""
    from scalelong.skips.summary import format_table

    shown = ("scaling", "seed", "folder", "parameters", "state_gib", "images_per_step", "steps", "starts_at")
    table = format_table([{key: str(run[key]) for key in shown} for run in plan["runs"]])
    return (
        f"{json.dumps(plan['runs'][0]['config'], indent=2, ensure_ascii=False)}\n"
        f"{_reading_text(plan['runs'][0])}"
        "The config of the first run; the others differ in scaling and seed.\n\n" + "\n".join(table) + "\n\n"
        f"{len(plan['runs'])} runs of {plan['total_steps']:,} steps in all, {plan['steps_done']:,} of them done, "
        f"{_begun_text(plan)}{plan['runs_at_once']} runs at once with {plan['state_gib_at_once']} GiB of state, "
        f"activations not counted, {_hours_text(plan)}; nothing was written."
    )


def probe_plan(
    first: Sequence[Member], plan: ProbePlan, store: Store, out: Path, workers: int, device: str, *, timed: bool
) -> Plan:
    """What `kappa --probe` would do, from the runs of its first round at their full length."""
    compared = comparison_plan(first, store, out, workers, device, timed=timed)
    rounds, before, total = [], 0, 0
    for steps, kappas in plan.sizes():
        runs = kappas * len(plan.seeds)
        rounds.append({"steps": steps, "kappas": kappas, "runs": runs})
        total, before = total + runs * (steps - before), steps  # a run that stays goes on from its last step
    hours = {"hours": round(compared["hours"] * total / compared["total_steps"], 4)} if timed else {}
    return {
        "runs": str(out),
        "images": len(store),
        "init": compared["init"],
        "rounds": rounds,
        "total_steps": total,
        "runs_at_once": workers,
        "config": compared["runs"][0]["config"],
        "our_reading": compared["runs"][0]["our_reading"],
        **hours,
    }


def probe_text(plan: Plan) -> str:
    """A probe's plan for people: the config that all runs share, and a row per round."""
    from scalelong.skips.summary import format_table

    rounds = [
        {"round": str(i), "κ": str(r["kappas"]), "runs": str(r["runs"]), "to step": f"{r['steps']:,}"}
        for i, r in enumerate(plan["rounds"], start=1)
    ]
    return (
        f"{json.dumps(plan['config'], indent=2, ensure_ascii=False)}\n{_reading_text(plan)}"
        "The config of the first run; the others differ in scaling and seed, and end with the last round that "
        "their κ is in.\n\n" + "\n".join(format_table(rounds)) + "\n\n"
        f"{plan['rounds'][0]['runs']} runs of {plan['total_steps']:,} steps in all under {plan['runs']}, on "
        f"{plan['images']:,} images, {_begun_text(plan)}{plan['runs_at_once']} runs at once, {_hours_text(plan)}; "
        "nothing was written."
    )


def _begun_text(plan: Plan) -> str:
    return f"begun with the weights of {plan['init']}, " if plan["init"] else ""


def first_image(source: Source) -> Image | None:
    """The first image that can be decoded: it tells the size of all."""
    return next((item.image for item in source.items() if item.image is not None), None)


def preparation_plan(
    source: Source, out: Path, autoencoder: Autoencoder | None = None, latents_only: bool = False
) -> Plan:
    """What `prepare` would write, if no image is broken; of captions, as long as the first ones are."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not empty; choose another --out, or remove it first.")
    first = first_image(source)
    if first is None:
        raise ValueError(f"{source.description}: none of its {source.count:,} images can be decoded.")
    height, width, channels = first.shape
    kept = 0 if latents_only else first.nbytes if source.shards is None else _PLACE_BYTES
    label = 0 if source.classes is None else 8  # an int64
    latents, latent_bytes = None, 0
    if autoencoder is not None:
        from scalelong.data.latents import moment_bytes

        latents = autoencoder.space(height, width, channels)
        latent_bytes = moment_bytes(latents, autoencoder.is_random)
    return {
        "source": source.description,
        "out": str(out),
        "count": source.count,
        "height": height,
        "width": width,
        "channels": channels,
        "classes": source.classes,
        "latents": None if latents is None else asdict(latents),
        "bytes": round(source.count * (kept + label + latent_bytes + _caption_bytes(source))),
    }


_PLACE_BYTES = 3 * 8  # of an image that stays in its shard: number of the shard, first byte, bytes


def _caption_bytes(source: Source) -> float:
    """Of an image's line in captions.jsonl: the mean over the first images."""
    found = [item.captions for item in islice(source.items(), 64) if item.image is not None]
    lines = [json.dumps(captions, ensure_ascii=False) + "\n" for captions in found if captions is not None]
    return sum(len(line.encode()) for line in lines) / max(len(found), 1)


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
    latents = ""
    if plan["latents"]:
        latents = "with latents of {width}×{height}×{channels} by {autoencoder}; ".format(**plan["latents"])
    return (
        f"{plan['source']}: {plan['count']:,} images{labels}, the first of {plan['width']}×{plan['height']}×"
        f"{plan['channels']}; {latents}{total / 2**20:,.1f} MiB would go to {plan['out']}{text}; nothing was "
        "written."
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
