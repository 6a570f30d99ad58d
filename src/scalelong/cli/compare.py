"""`scalelong compare`: train several scalings side by side, and report."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scalelong.cli.common import check_output_file, print_result, progress_bar, say_warm_up, with_values
from scalelong.cli.plan import comparison_plan, comparison_text, opened_data

if TYPE_CHECKING:
    from scalelong.comparison import Member
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
    from scalelong.comparison import DIGITS_SETTINGS, Judging, default_workers, members
    from scalelong.config import with_overrides
    from scalelong.data.store import open_store
    from scalelong.held_out import check_like
    from scalelong.presets import run_preset

    for setting in settings or []:
        _check_shared(setting)
    small = [setting for setting in DIGITS_SETTINGS if preset == "digits"]
    if init is not None:  # which decide the network
        small = [setting for setting in small if not setting.startswith("model.")]
    base = with_overrides(run_preset(preset), [*small, *(settings or [])])
    say_warm_up(base)
    device = experiment.default_device()
    with opened_data(data, dry_run) as store:
        judging = Judging(**_sampled(features, evaluate_num, store), held_out=held_out)
        group = members(base, split(scalings, "--scalings"), seeds_of(seeds), out, judging, init)
        _say_without_none(group, scalings)
        at_once = min(len(group), workers or default_workers(device))
        # What is wrong with any run is told before the first.
        plan = comparison_plan(group, store, out, at_once, device)
        if held_out is not None:
            check_like(experiment.fitted_to(base, store), store, open_store(held_out))
        if dry_run:
            print_result(plan, as_json, comparison_text(plan))
            return
        done = run_with_bars(group, store.folder, at_once)
    if not all(done):
        typer.echo("stopped; what was done is saved, and the same command goes on.", err=True)
        raise typer.Exit(1)
    _report_ended(group, out / "report.html", as_json)


def _report_ended(group: list[Member], out: Path, as_json: bool) -> None:
    """Of the runs that came to their end; who diverged is said, and that is a result, too."""
    from scalelong.comparison import diverged, divergence

    lost = [f"{m.scaling} with seed {m.seed} diverged: {divergence(m.folder)}" for m in group if diverged(m.folder)]
    ended = [member.folder for member in group if not diverged(member.folder)]
    if not ended:
        raise FloatingPointError("\n".join([*lost, "Every run diverged: there is nothing to report."]))
    _report(ended, out, as_json, lost=lost)


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
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    theory: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Add the theory: a file with what theory --json printed.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """Write one report.html about runs that are there: curves, norms, gates, samples, with spread over seeds."""
    check_output_file(out, "report.html")
    _report(runs, out, as_json, theory)


def _report(
    folders: list[Path], out: Path, as_json: bool, theory: Path | None = None, lost: Sequence[str] = ()
) -> None:
    from scalelong.report.page import write_report
    from scalelong.report.runs import by_scaling, finding, read_run, summary_rows

    runs = [read_run(folder) for folder in folders]
    more: list[Any] = []
    if theory is not None:
        from scalelong.report.theory import read_theory, theory_sections

        more = theory_sections(read_theory(theory))
    write_report(runs, out, command=shlex.join(["scalelong", *sys.argv[1:]]), more=more, lost=lost)
    groups = by_scaling(runs)
    rows, found = summary_rows(groups), finding(groups)
    _print_table(rows, as_json)
    told = "".join(f"{sentence}\n" for sentence in (*lost, found) if sentence)
    result = {"report": str(out), "finding": found, "diverged": list(lost), "rows": rows}
    print_result(result, as_json, f"{told}The report with all curves: {out}")


REPORT_EXAMPLES = "Example: [bold]scalelong report runs/none runs/cs-0.7 --out report.html[/]"


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
