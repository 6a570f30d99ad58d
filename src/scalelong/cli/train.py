"""`scalelong train`: train, or go on with, a run."""

from __future__ import annotations

import math
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scalelong.cli.common import is_first_process, print_result, progress_bar, say_warm_up
from scalelong.cli.plan import opened_data, published_data, training_plan, training_text

if TYPE_CHECKING:
    from scalelong.config import RunConfig
    from scalelong.data.store import Store
    from scalelong.experiment import Judge

EXAMPLES = (
    "Example: [bold]scalelong train cifar10-uvit-xs --data data/mine --scaling cs:0.7 "
    "--set train.steps=20000 --out runs/mine[/]; the same again goes on where it stopped."
)


# By name, as the recipes themselves need torch, and --help does not wait for it.
RECIPES = (
    "digits",
    "cifar10-uvit-xs",
    "cifar10-uvit-s",
    "cifar10-uvit-s-deep",
    "celeba64-uvit-s",
    "imagenet64-uvit-m",
    "imagenet64-uvit-l",
    "coco64-uvit-s",
    "coco-uvit-s",
    "coco-uvit-s-deep",
    "coco-unet",
    "imagenet256-uvit-l",
    "imagenet256-uvit-h",
    "imagenet512-uvit-l",
    "imagenet512-uvit-h",
    "cifar10-unet",
    "imagenet64-unet",
)


def train(
    preset: Annotated[str, typer.Argument(help=f"A recipe: {', '.join(RECIPES)}.")] = "digits",
    data: Annotated[Path | None, typer.Option(help="A folder that prepare wrote; the digits without it.")] = None,
    scaling: Annotated[str | None, typer.Option(help="cs:0.7, ls, 1/sqrt2, none, …")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Change a setting; may be given often.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; an existing run in it is resumed.")] = None,
    autoencoder: Annotated[
        str | None, typer.Option(help="Where the autoencoder that made the data's latents is now, if it was moved.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default the GPU where there is one.")] = None,
    logger: Annotated[
        str, typer.Option(help="tensorboard, wandb (both), or none; metrics.jsonl is always written.")
    ] = "tensorboard",
    evaluate_every: Annotated[
        int | None,
        typer.Option(min=1, help="Log FID, KID, precision, recall of each average every so often."),
    ] = None,
    evaluate_num: Annotated[int, typer.Option(min=4, help="From how many samples.")] = 10_000,
    features: Annotated[str, typer.Option(help="inception, or pixels for tiny images.")] = "inception",
    inception: Annotated[Path | None, typer.Option(help="The FID network's TorchScript file.")] = None,
    held_out: Annotated[
        Path | None, typer.Option(help="Log the loss on this prepared data too, which is not trained on.")
    ] = None,
    held_out_every: Annotated[
        int | None, typer.Option(min=1, help="How often; by default whenever pictures are drawn.")
    ] = None,
    held_out_num: Annotated[int, typer.Option(min=2, help="On how many of its images.")] = 2_000,
    stop_after: Annotated[
        float | None,
        typer.Option(min=0, metavar="MINUTES", help="Save and stop after so long; the same command goes on."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """Train a preset on prepared data. Ctrl-C saves and stops; the same command goes on."""
    from scalelong import experiment
    from scalelong.config import with_overrides
    from scalelong.data.store import open_store
    from scalelong.held_out import check_like
    from scalelong.metrics.features import check_images, check_kind
    from scalelong.presets import run_preset
    from scalelong.training.trackers import check_logger

    check_logger(logger)
    check_kind(features, inception)
    overrides = [*([f"model.scaling={scaling}"] if scaling else []), *(settings or [])]
    config = with_overrides(run_preset(preset), overrides)
    out = out or Path("runs") / f"{preset}-{config.model.scaling.replace('/', '-').replace(':', '-')}"
    device = experiment.usable_device(device)
    with opened_data(data, dry_run, preset) as store:
        config = experiment.with_autoencoder(experiment.fitted_to(config, store), autoencoder)
        if evaluate_every is not None:
            check_images(features, store.manifest.height * store.manifest.width * store.manifest.channels)
        if data is None and not dry_run and is_first_process() and (meant := published_data(preset)) is not None:
            typer.echo(
                f"warning: no --data: {preset} is trained on scikit-learn's digits, not on {meant.folder}; prepare "
                "images and give their folder.",
                err=True,
            )
        _say_null_class(config, run_preset(preset).data.label_dropout)
        say_warm_up(config)
        if held_out is not None:
            check_like(config, store, open_store(held_out))
        if dry_run:
            plan = training_plan(config, store, out, device)
            print_result(plan, as_json, training_text(plan))
            return
        judges = []
        if held_out is not None:
            judges.append(_held_out(config, store, held_out, device, held_out_num, held_out_every))
        if evaluate_every is not None:
            judges.append(_quality(config, store, features, inception, device, evaluate_num, evaluate_every))
        stop_after_s = math.inf if stop_after is None else 60 * stop_after
        done = _run(config, store, out, device, logger=logger, judges=judges, stop_after_s=stop_after_s)
    if is_first_process():
        _write_report(out)
    step = config.train.steps if done else experiment.last_step(out)
    again = "" if done else " Stopped before its end; the same command goes on from there."
    print_result(
        {"out": str(out), "done": done, "step": step},
        as_json,
        f"{out}: step {step:,} of {config.train.steps:,} is saved.{again} Next: scalelong sample {out}",
    )


def _say_null_class(config: RunConfig, published_dropout: float) -> None:
    """A class embedding more than the data has classes is worth a word, most where the recipe has none."""
    from scalelong.experiment import num_classes

    dropout = config.data.label_dropout
    if config.data.condition == "class" and dropout > 0 and is_first_process():
        more = "" if published_dropout else "; the published recipe has no such row"
        typer.echo(
            f"labels are dropped with probability {dropout:g}: {(num_classes(config) or 0) + 1:,} class "
            f"embeddings, the last one for no class{more}.",
            err=True,
        )


# The first process alone judges; the others have to know when.


def _held_out(config: RunConfig, store: Store, held_out: Path, device: str, num: int, every: int | None) -> Judge:
    from scalelong.data.store import open_store
    from scalelong.experiment import Judge
    from scalelong.judging import HELD_OUT, judge_held_out

    if not is_first_process():
        return Judge(HELD_OUT, _never, every)
    return judge_held_out(config, store, open_store(held_out), device, num=num, every=every)


def _quality(
    config: RunConfig, store: Store, features: str, inception: Path | None, device: str, num: int, every: int
) -> Judge:
    from scalelong.experiment import Judge
    from scalelong.judging import QUALITY, judge_quality
    from scalelong.metrics.features import features_named

    if not is_first_process():
        return Judge(QUALITY, _never, every)
    return judge_quality(config, store, features_named(features, inception, device), num=num, every=every)


def _never(model: Any, walk: Any) -> dict[str, float]:
    raise AssertionError("asked to judge besides the first process")


def _run(config: RunConfig, store: Any, out: Path, device: str, **how: Any) -> bool:
    from scalelong import experiment
    from scalelong.training.fit import Progress

    with progress_bar() as bar:
        task = bar.add_task(
            f"training {config.model.preset} {config.model.scaling}", total=config.train.steps, note=""
        )

        def show(progress: Progress) -> None:
            bar.update(task, completed=progress.step)
            if progress.loss is not None:
                speed = bar.tasks[0].speed or 0.0
                bar.update(task, note=f"loss {progress.loss:.4f}, {speed * config.train.batch_size:,.0f} images/s")

        return experiment.train(config, store, out, device=device, show=show, **how)


def _write_report(out: Path) -> None:
    from scalelong.report.page import write_report
    from scalelong.report.runs import read_run
    from scalelong.training.log import read_metrics

    if read_metrics(out):  # a run that was stopped before its first log line has nothing to show
        write_report([read_run(out)], out / "report.html", command=shlex.join(["scalelong", *sys.argv[1:]]))
