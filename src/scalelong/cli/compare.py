"""`scalelong compare`: train several scalings side by side, and report."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scalelong.cli.common import (
    check_output_file,
    print_result,
    progress_bar,
    say_averages,
    say_warm_up,
    stopped,
    with_values,
)
from scalelong.cli.plan import comparison_plan, comparison_text, opened_data

if TYPE_CHECKING:
    from scalelong.comparison import Member
    from scalelong.config import RunConfig
    from scalelong.data.store import Store

EXAMPLES = (
    "Examples: [bold]scalelong compare[/] (the digits, five minutes on two cores) or "
    "[bold]scalelong compare cifar10-uvit-xs --data data/mine --held-out data/unseen --scalings none,cs:0.7,ls "
    "--seeds 0,1,2[/], of a UNet of yours with [bold]cifar10-unet --init path/to/unet[/]"
)


def compare(
    preset: Annotated[str, typer.Argument(help="A recipe; scalelong train --help names them.")] = "digits",
    data: Annotated[Path | None, typer.Option(help="A folder that prepare wrote; the digits without it.")] = None,
    scalings: Annotated[str, typer.Option(help="Which, separated by commas.")] = "none,1/sqrt2,cs:0.7,ls",
    seeds: Annotated[str, typer.Option(help="Which, separated by commas.")] = "0,1",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A.B=C", callback=with_values, help="Change a setting of all runs."),
    ] = None,
    init: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="Begin all with the weights of a run, or of a model's folder or name on the hub: yours.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder of the runs and the report.")] = Path("runs/compare"),
    held_out: Annotated[
        Path | None,
        typer.Option(help="Compare the loss on this prepared data, which no run is trained on, seed by seed."),
    ] = None,
    features: Annotated[
        str | None,
        typer.Option(help="Judge samples on pixels or inception, or none; by default pixels up to 32×32."),
    ] = None,
    evaluate_num: Annotated[int, typer.Option(min=4, help="From how many samples.")] = 256,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time; by default one per core, or one on a GPU.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """Train the same net with several scalings, same seeds and data, and write one report.html."""
    from scalelong import experiment
    from scalelong.comparison import Judging, default_workers, members, shared_config
    from scalelong.data.store import open_store
    from scalelong.held_out import check_like

    for setting in settings or []:
        _check_shared(setting)
    base = shared_config(preset, settings or [], init)
    say_warm_up(base)
    say_averages(base)
    if scalings.strip() != "none":
        say_changed(init, base)
    device = experiment.default_device()
    with opened_data(data, dry_run) as store:
        judging = Judging(**_sampled(features, evaluate_num, store), held_out=held_out)
        group = members(base, split(scalings, "--scalings"), seeds_of(seeds), out, judging, init)
        _say_without_none(group, scalings)
        at_once = min(len(group), workers or default_workers(device))
        # What is wrong with any run is told before the first.
        plan = comparison_plan(group, store, out, at_once, device, timed=dry_run)
        if held_out is not None:
            check_like(experiment.fitted_to(base, store), store, open_store(held_out))
        if dry_run:
            print_result(plan, as_json, comparison_text(plan))
            return
        done = run_with_bars(group, store.folder, at_once)
    if not all(done):
        stopped()
    _report([member.folder for member in group], out / "report.html", as_json)
    _say_others(group, out)


def _say_others(group: Sequence[Member], out: Path) -> None:
    """Runs of an earlier comparison in the same folder are not on this page."""
    here = {member.folder for member in group}
    others = sorted(file.parent.name for file in out.glob("*-seed*/config.json") if file.parent not in here)
    if others:
        typer.echo(
            f"{out} has other runs too, {', '.join(others[:3])}{' …' if len(others) > 3 else ''}: for a page of "
            f"all, scalelong report {out}/*-seed* --out {out / 'all.html'}",
            err=True,
        )


def _sampled(features: str | None, num: int, store: Store) -> dict[str, Any]:
    """How samples are judged: on pixels where these are few, unless told."""
    from scalelong.metrics.features import MOST_PIXELS, check_images, check_kind

    manifest = store.manifest
    numbers = manifest.height * manifest.width * manifest.channels
    if features is None:
        features = "pixels" if numbers <= MOST_PIXELS else "none"
    if features != "none":
        check_kind(features, None)
        check_images(features, numbers)
    return {"features": features, "num": num, "steps": 20 if features == "pixels" else None}


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or those of StabilityMonitors.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    theory: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Add the theory: a file with what theory --json printed.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """Write one report.html about runs that are there: curves, norms, gates, samples, with spread over seeds."""
    from scalelong.training.log import WATCHED

    check_output_file(out, "report.html")
    if any((folder / WATCHED).is_file() for folder in runs):
        _report_watched(runs, out, as_json, theory)
    else:
        _report(runs, out, as_json, theory)


def _report_watched(folders: list[Path], out: Path, as_json: bool, theory: Path | None) -> None:
    """Of loops that are not ours, which a monitor watched."""
    from scalelong.report.monitor import is_watched, write_monitor_report, write_monitors_report

    for folder in folders:
        if not is_watched(folder):
            raise ValueError(
                f"a page is about runs of scalelong train, or about folders of StabilityMonitors; got {folder} "
                "beside a monitor's. Ask for two pages."
            )
    if theory is not None:
        raise ValueError("--theory is added to a page about runs of scalelong train, not about monitors' folders.")
    command, rows = shlex.join(["scalelong", *sys.argv[1:]]), list[dict[str, str]]()
    if len(folders) == 1:
        write_monitor_report(folders[0], out, command)
    else:
        rows = write_monitors_report(folders, out, command)
        _print_table(rows, as_json)
    print_result({"report": str(out), "rows": rows}, as_json, f"The report with all curves: {out}")


def _report(folders: list[Path], out: Path, as_json: bool, theory: Path | None = None) -> None:
    from scalelong.report.compared import finding, summary_rows
    from scalelong.report.page import diverged, write_report
    from scalelong.report.runs import by_scaling, read_run

    runs = [read_run(folder) for folder in folders]
    more: list[Any] = []
    if theory is not None:
        from scalelong.report.theory import read_theory, theory_sections

        more = theory_sections(read_theory(theory))
    write_report(runs, out, command=shlex.join(["scalelong", *sys.argv[1:]]), more=more)
    lost, ended = diverged(runs), [run for run in runs if not run.divergence]
    if not ended:
        raise FloatingPointError("\n".join([*lost, f"Every run diverged; what they logged until then: {out}"]))
    rows, found = summary_rows(by_scaling(ended)), finding(by_scaling(runs))
    _print_table(rows, as_json)
    told = "".join(f"{sentence}\n" for sentence in (*lost, found) if sentence)
    result = {"report": str(out), "finding": found, "diverged": lost, "rows": rows}
    print_result(result, as_json, f"{told}The report with all curves: {out}")


REPORT_EXAMPLES = (
    "Examples: [bold]scalelong report runs/none runs/cs-0.7 --out report.html[/], or of two loops of yours that a "
    "StabilityMonitor watched, [bold]scalelong report monitor/none monitor/ls[/]"
)


def run_with_bars(group: list[Member], data: Path, workers: int, run: Any = None) -> list[bool]:
    """Train all members, with a bar for each."""
    from scalelong.comparison import run_all, train_or_record

    with progress_bar() as bar:
        tasks = [
            bar.add_task(f"{m.scaling} seed {m.seed}", total=m.config.train.steps, note="waits") for m in group
        ]
        done = run_all(
            group, data, workers=workers, watch=lambda _: _update(bar, tasks, group), run=run or train_or_record
        )
        _update(bar, tasks, group)
    return done


def _update(bar: Any, tasks: list[Any], group: list[Member]) -> None:
    from scalelong.training.log import METRICS, read_metrics

    for task, member in zip(tasks, group, strict=True):
        if (member.folder / METRICS).is_file():
            rows = [row for row in read_metrics(member.folder) if "loss" in row]
            if rows:
                row = rows[-1]
                rate = member.config.train.batch_size / row["seconds_per_step"]
                bar.update(task, completed=row["step"], note=f"loss {row['loss']:.4f}, {rate:,.0f} images/s")


def _print_table(rows: list[dict[str, str]], as_json: bool) -> None:
    if as_json:
        return
    from scalelong.skips.summary import format_table

    typer.echo("\n".join(format_table(rows)))


def say_changed(init: str | None, base: RunConfig) -> None:
    """Trained weights are another network as soon as their skips are scaled."""
    if init is not None and not base.model.keep_function:
        typer.echo(
            f"warning: each scaling changes at once what the weights of {init} compute; --set "
            "model.keep_function=true begins with the function as it is.",
            err=True,
        )


def _say_without_none(group: Sequence[Member], scalings: str) -> None:
    """What scaling does is told against no scaling: to miss that after the training is too late."""
    if all(member.scaling != "none" for member in group):
        typer.echo(
            f"warning: without none among --scalings nothing says whether scaling helps; got {scalings}, take "
            f"none,{scalings}.",
            err=True,
        )


def _check_shared(setting: str) -> None:
    """What the comparison varies cannot be set for all runs."""
    for name, option in (("model.scaling", "--scalings"), ("train.seed", "--seeds")):
        if setting.partition("=")[0].strip() == name:
            raise ValueError(f"{name} differs from run to run; choose it with {option}, got --set {setting}.")


def split(text: str, name: str) -> list[str]:
    """The parts between commas, at least one."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise ValueError(f"{name} needs at least one entry, got {text!r}.")
    return parts


def seeds_of(text: str) -> list[int]:
    """Whole numbers separated by commas."""
    parts = split(text, "--seeds")
    if not all(part.isdigit() for part in parts):
        raise ValueError(f"--seeds are whole numbers separated by commas, such as 0,1; got {text!r}.")
    if len(set(parts)) < len(parts):
        raise ValueError(f"--seeds has each seed once, got {text!r}.")
    return [int(part) for part in parts]
