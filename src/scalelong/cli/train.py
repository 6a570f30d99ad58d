"""`scalelong train`: train, or go on with, a run."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scalelong.cli.common import (
    STOPPED,
    data_at_hand,
    is_first_process,
    print_result,
    progress_bar,
    say_averages,
    say_cpu,
    say_warm_up,
    with_values,
)
from scalelong.cli.plan import checked, opened_data, published_data, training_plan, training_text

if TYPE_CHECKING:
    from scalelong.config import RunConfig
    from scalelong.data.store import Store
    from scalelong.experiment import Beginning, Judge

EXAMPLES = (
    "Examples: [bold]scalelong train cifar10-uvit-xs --data data/mine --scaling cs:0.7 "
    "--set train.steps=20000 --out runs/mine[/]; the same again, or [bold]scalelong train --out runs/mine[/], goes "
    "on where it stopped. [bold]scalelong train --branch runs/mine --set train.lr=1e-4 --out runs/slower[/] goes "
    "on with another learning rate."
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
    preset: Annotated[
        str | None,
        typer.Argument(
            help=f"A recipe: {', '.join(RECIPES)}. By default that of the run in --out or --branch, or digits "
            "where neither is given.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="A folder that prepare wrote; by default that of the run in --out or --branch, or digits."
        ),
    ] = None,
    scaling: Annotated[str | None, typer.Option(help="cs:0.7, ls, 1/sqrt2, none, …")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A.B=C", callback=with_values, help="Change a setting; may be given often."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; an existing run in it is resumed.")] = None,
    init: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="Begin with the weights of a run, of a model's or pipeline's folder, or of a name on the hub.",
        ),
    ] = None,
    branch: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Begin at another run's newest checkpoint, optimiser and averages too, with other settings of "
            "training: a lower learning rate, say. It stays as it is.",
        ),
    ] = None,
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
    evaluate_num: Annotated[
        int | None, typer.Option(min=4, help="From how many samples.", show_default="10000")
    ] = None,
    features: Annotated[
        str | None, typer.Option(help="inception, or pixels for tiny images.", show_default="inception")
    ] = None,
    inception: Annotated[Path | None, typer.Option(help="The FID network's TorchScript file.")] = None,
    held_out: Annotated[
        Path | None, typer.Option(help="Log the loss on this prepared data too, which is not trained on.")
    ] = None,
    held_out_every: Annotated[
        int | None, typer.Option(min=1, help="How often; by default whenever pictures are drawn.")
    ] = None,
    held_out_num: Annotated[
        int | None, typer.Option(min=2, help="On how many of its images.", show_default="2000")
    ] = None,
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
    from scalelong.runs.folder import CONFIG
    from scalelong.training.trackers import check_logger
    from scalelong.world import rank_and_size

    check_logger(logger)
    _check_asked(held_out, "--held-out", {"--held-out-every": held_out_every, "--held-out-num": held_out_num})
    of_quality = {"--evaluate-num": evaluate_num, "--features": features, "--inception": inception}
    _check_asked(evaluate_every, "--evaluate-every", of_quality)
    features = features or "inception"
    check_kind(features, inception)
    overrides = [*([f"model.scaling={scaling}"] if scaling else []), *(settings or [])]
    asked = _beginning(init, branch)
    out = out or _folder_beside(branch)
    before = _run_to_go_on_from(out, branch)
    if before is None and out is not None and preset is None and data is None and init is None:
        raise ValueError(
            f"{out} has no run to go on with; to begin one there, name its recipe, such as scalelong train digits "
            f"--out {out}."
        )
    config = with_overrides(_settings_of(preset, before), overrides)
    preset, data = config.model.preset, data or (None if before is None else _data_of(before))
    out = out or _default_folder(asked.fitted(config))
    begin = experiment.beginning_in(out, asked)
    config = _fitted_to(begin, config, overrides)
    device = experiment.usable_device(device)
    with opened_data(data, dry_run, preset) as store:
        config = experiment.with_autoencoder(experiment.fitted_to(config, store), autoencoder)
        if evaluate_every is not None:
            check_images(features, store.manifest.height * store.manifest.width * store.manifest.channels)
        if held_out is not None:
            check_like(config, store, open_store(held_out))
        if is_first_process():  # the others may find a folder that it has begun
            checked(config, store, out, device)
        if data is None and not dry_run:
            _say_digits(preset)
        _say_null_class(config, run_preset(preset).data.label_dropout)
        if not (out / CONFIG).is_file():  # what has begun was told, and keeps its averages; so does a branch
            say_warm_up(config)
            if branch is None and init is None:
                say_averages(config)
        if dry_run:
            plan = training_plan(config, store, out, device, begin)
            print_result(plan, as_json, training_text(plan))
            return
        say_cpu(config, device)
        judges = []
        if held_out is not None:
            judges.append(_held_out(config, store, held_out, device, held_out_num or 2_000, held_out_every))
        if evaluate_every is not None:
            num = evaluate_num or 10_000
            judges.append(_quality(config, store, features, inception, device, num, evaluate_every))
        stop_after_s = math.inf if stop_after is None else 60 * stop_after
        how: dict[str, Any] = {"logger": logger, "judges": judges, "stop_after_s": stop_after_s, "begin": begin}
        until = time.monotonic() + stop_after_s
        done, trained = _run(config, store, out, device, **how)
    if is_first_process():
        _write_report(out)
    step = config.train.steps if done and trained else experiment.last_step(out)
    told = _told(out, step, config.train.steps, done, trained)
    print_result({"out": str(out), "done": done, "step": step}, as_json, f"{told} Next: scalelong sample {out}")
    # Of several processes the launcher was stopped, and says so itself.
    if not done and time.monotonic() < until and rank_and_size()[1] == 1:
        raise typer.Exit(STOPPED)


def _told(out: Path, step: int, steps: int, done: bool, trained: bool) -> str:
    if done and not trained:
        return (
            f"{out} is done: step {step:,} is saved and train.steps={steps:,}, so nothing was trained. For more "
            f"steps: scalelong train --out {out} --set train.steps={2 * step}."
        )
    again = "" if done else " Stopped before its end; the same command goes on from there."
    return f"{out}: step {step:,} of {steps:,} is saved.{again}"


def _check_asked(question: object, name: str, about: Mapping[str, object]) -> None:
    """An option that only says how something is done means nothing where it is not asked for."""
    for option, value in about.items():
        if question is None and value is not None:
            raise ValueError(f"{option} is about {name}, which was not given; add it, or leave {option} out.")


def _run_to_go_on_from(out: Path | None, branch: Path | None) -> Path | None:
    """The run whose data are meant where none are given, and whose settings are where no recipe is named."""
    from scalelong.runs.folder import CONFIG

    return out if out is not None and (out / CONFIG).is_file() else branch


def _settings_of(preset: str | None, run: Path | None) -> RunConfig:
    from scalelong.experiment import read_config
    from scalelong.presets import run_preset

    return run_preset(preset or "digits") if preset or run is None else read_config(run)


def _data_of(run: Path) -> Path:
    """Where a run's data were when it began."""
    from scalelong.runs.data import RunData

    if (data := data_at_hand(run)) is None:
        kept = RunData.read(run)
        where = "" if kept is None else f", which were in {kept.folder}"
        raise ValueError(f"{run} does not tell where its data are now{where}; give their folder with --data.")
    return data


def _folder_beside(branch: Path | None) -> Path | None:
    return None if branch is None else branch.with_name(f"{branch.resolve().name}-branch")


def _default_folder(config: RunConfig) -> Path:
    return Path("runs") / f"{config.model.preset}-{config.model.scaling.replace('/', '-').replace(':', '-')}"


def _beginning(init: str | None, branch: Path | None) -> Beginning:
    from scalelong.experiment import Beginning, Branch, Weights

    if init is not None and branch is not None:
        raise ValueError(f"a run begins by --init or by --branch, got {init} and {branch}; choose one of them.")
    if branch is not None:
        return Branch(branch)
    return Beginning() if init is None else Weights(init)


def _fitted_to(begin: Beginning, config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """The config with what the beginning decides. What was typed is not changed without a word."""
    fitted = begin.fitted(config)
    typed = {override.partition("=")[0].strip() for override in overrides}
    for name in ("scaling", "placement", "keep_function"):
        given, own = getattr(config.model, name), getattr(fitted.model, name)
        if f"model.{name}" in typed and given != own:
            raise ValueError(
                f"a run that begins {begin.told()} keeps their model.{name}, {own!r}, got {given!r}; leave it out, "
                "or give weights without a scaling (scalelong export --fold)."
            )
    return fitted


def _say_digits(preset: str) -> None:
    if is_first_process() and (meant := published_data(preset)) is not None:
        typer.echo(
            f"warning: no --data: {preset} is trained on scikit-learn's digits, not on {meant.folder}; prepare "
            "images and give their folder.",
            err=True,
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


def _run(config: RunConfig, store: Any, out: Path, device: str, **how: Any) -> tuple[bool, bool]:
    """Whether it is done, and whether there was anything to train."""
    from scalelong import experiment
    from scalelong.training.fit import Progress

    with progress_bar() as bar:
        tasks: list[Any] = []  # none where a run is refused, or was done before

        def show(progress: Progress) -> None:
            if not tasks:
                name = f"training {config.model.preset} {config.model.scaling}"
                tasks.append(bar.add_task(name, total=progress.steps, completed=progress.step, note=""))
                return
            (task,) = tasks
            bar.update(task, completed=progress.step)
            if progress.loss is not None:
                speed = bar.tasks[0].speed or 0.0
                bar.update(task, note=f"loss {progress.loss:.4f}, {speed * config.train.batch_size:,.0f} images/s")

        return experiment.train(config, store, out, device=device, show=show, **how), bool(tasks)


def _write_report(out: Path) -> None:
    from scalelong.report.page import write_report
    from scalelong.report.runs import read_run
    from scalelong.training.log import read_metrics

    if read_metrics(out):  # a run that was stopped before its first log line has nothing to show
        write_report([read_run(out)], out / "report.html", command=shlex.join(["scalelong", *sys.argv[1:]]))
