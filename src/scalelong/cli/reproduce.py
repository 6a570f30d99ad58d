"""`scalelong reproduce`: the paper's figures and tables, each with its verdict."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scalelong.cli.common import print_result, progress_bar, stopped
from scalelong.cli.compare import seeds_of
from scalelong.cli.plan import opened_data

if TYPE_CHECKING:
    from scalelong.comparison import Member
    from scalelong.data.store import Store
    from scalelong.reproduce.plan import Plan, Reproduction
    from scalelong.stability.statements import Statement

_MARKS = {True: "yes", False: "no", None: "–"}
EXAMPLES = (
    "Examples: [bold]scalelong reproduce fig5[/] (the digits, minutes on two cores), "
    "[bold]scalelong reproduce all[/], or [bold]scalelong reproduce table1 --full --data data/cifar10[/]. "
    "The same again goes on where it stopped; figures that need the same runs share them."
)


def reproduce(
    names: Annotated[
        list[str],
        typer.Argument(
            help="fig1, fig3a, fig3b, fig3c, fig5, fig6, fig7, table1 … table4, regimes, beyond, or all."
        ),
    ],
    full: Annotated[
        bool, typer.Option("--full/--small", help="The paper's own setting, days on a GPU; or minutes on a CPU.")
    ] = False,
    data: Annotated[Path | None, typer.Option(help="A folder that prepare wrote; the digits without it.")] = None,
    out: Annotated[Path, typer.Option(help="The folder of the runs and figures.")] = Path("runs/reproduce"),
    seeds: Annotated[
        str | None,
        typer.Option(help="By commas; 0,1,2 without it. --full has one, 1234, which has no spread to judge by."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time; by default one per core, or one on a GPU.")
    ] = None,
    from_data: Annotated[
        bool, typer.Option("--from-data", help="Draw and judge again from the data files that are there.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """Train what a figure or table of the paper needs, draw it beside the paper's numbers, and judge it."""
    from scalelong.reproduce import NAMES, reproduction_named
    from scalelong.reproduce.writing import conclude

    wanted = [reproduction_named(name) for name in (NAMES if names == ["all"] else names)]
    if full:
        wanted = _with_full(wanted, names == ["all"])
    if from_data:
        for what in wanted:
            _print(what, conclude(what, out / what.name), out, as_json)
        return
    if full and data is None:
        raise ValueError("--full is the paper's setting on CIFAR-10; give its prepared folder with --data.")
    with opened_data(data, dry_run) as store:
        for what in wanted:
            plan = what.full if full else what.small
            if plan is not None and seeds is not None:
                plan = replace(plan, seeds=tuple(seeds_of(seeds)))
            _one(what, plan, store, out, workers, full, dry_run, as_json)


def _with_full(wanted: list[Reproduction], all_of_them: bool) -> list[Reproduction]:
    """Those that have a full size, or need no runs at all; told before anything is trained."""
    lacking = [what.name for what in wanted if what.full is None and what.small is not None]
    if lacking and not all_of_them:
        raise ValueError(f"{', '.join(lacking)}: beyond the paper, and without --full; leave it out.")
    if lacking:
        typer.echo(f"left out, as beyond the paper and without --full: {', '.join(lacking)}.", err=True)
    return [what for what in wanted if what.name not in lacking]


def _one(
    what: Reproduction,
    plan: Plan | None,
    store: Store,
    out: Path,
    workers: int | None,
    full: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    from scalelong import experiment
    from scalelong.comparison import default_workers
    from scalelong.reproduce.running import folders_of, is_done, train_all
    from scalelong.reproduce.writing import conclude, write_data

    group = plan.members(out / "runs") if plan else []
    left = [member for member in group if not is_done(member)]
    if dry_run:
        steps = sum(member.config.train.steps for member in left)
        plan_data = {"name": what.name, "runs": len(group), "to train": len(left), "steps": steps}
        alone = ", one seed each: drawn, not judged" if plan and len(plan.seeds) == 1 else ""
        told = f"{what.title}: {len(group)} runs, {len(left)} to train, {steps:,} steps{alone}"
        print_result(plan_data, as_json, told)
        return
    device = experiment.default_device()
    at_once = min(workers or default_workers(device), max(1, len(left)))
    with progress_bar(transient=not left) as bar:  # where all is trained there is nothing to tell
        task = bar.add_task(what.title, total=sum(m.config.train.steps for m in left), note=f"{len(left)} runs")
        finished = train_all(group, store, at_once, lambda done: _update(bar, task, left, done))
    if not finished:
        stopped()
    from scalelong.training.log import environment

    values = what.collect(folders_of(group), store)
    about = {
        "command": shlex.join(["scalelong", *sys.argv[1:]]),
        "setting": "full" if full else "small",
        "data": store.manifest.source,
        "runs": [str(member.folder.relative_to(out)) for member in group],
        **{key: value for key, value in environment().items() if key != "command"},
    }
    write_data(out / what.name, values, about)
    _print(what, conclude(what, out / what.name), out, as_json)


def _print(what: Reproduction, statement: Statement, out: Path, as_json: bool) -> None:
    lines = [f"{what.title}", f"  the paper: {statement.claim}", f"  the rule: {statement.rule}"]
    lines += [f"  {_MARKS[check.holds]:3}  {check.where}: {check.found}" for check in statement.checks]
    lines += [f"  {statement.remark}"] if statement.remark else []
    lines += [f"  verdict: {statement.verdict}", f"  {out / what.name / 'figure.png'}", ""]
    print_result(statement.as_dict(), as_json, "\n".join(lines))


def _update(bar: Any, task: Any, group: list[Member], done: list[bool]) -> None:
    from scalelong.training.log import METRICS, read_metrics

    steps = 0
    for member, ended in zip(group, done, strict=True):
        if ended:
            steps += member.config.train.steps
        elif (member.folder / METRICS).is_file():
            rows = read_metrics(member.folder)
            steps += rows[-1]["step"] if rows else 0
    bar.update(task, completed=steps, note=f"{sum(done)} of {len(group)} runs")
