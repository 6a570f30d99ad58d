"""What the commands share: bars and printing."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from scalelong.cli.lines import ProgressLines, in_words

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from scalelong.config import RunConfig


STOPPED = 130  # the exit code after Ctrl-C, as shells have it
_LONG_HOURS = 3


def is_first_process() -> bool:
    """Of those that torchrun or accelerate launch started: the one that speaks."""
    return os.environ.get("RANK", "0") == "0"


def progress_bar(*, transient: bool = False) -> Any:
    """How far the work is, on standard error, so that --json stays clean: a bar, or lines where no terminal is."""
    if is_first_process() and not sys.stderr.isatty():
        return ProgressLines(last_line=not transient)
    from rich.console import Console

    return bars_on(Console(stderr=True), transient=transient, disable=not is_first_process())


def bars_on(console: Console, **how: Any) -> Progress:
    """A bar for each task, with rate and time left. Where the terminal is narrow, the description is cut first."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        Task,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column
    from rich.text import Text

    class Description(TextColumn):
        def render(self, task: Task) -> Text:
            text = super().render(task)
            text.no_wrap, text.overflow = True, "ellipsis"
            return text

    def whole() -> Column:
        return Column(no_wrap=True)

    return Progress(
        Description("{task.description}", table_column=Column()),  # of all columns the only one that may shrink
        BarColumn(max(4, min(40, console.width // 10)), table_column=whole()),
        MofNCompleteColumn(table_column=whole()),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(table_column=whole()),
        TextColumn("left"),
        TimeRemainingColumn(table_column=whole()),
        console=console,
        **how,
    )


def tracked(items: Iterable[Any], total: int, description: str) -> Iterator[Any]:
    """Iterate with a bar."""
    with progress_bar() as bar:
        task = bar.add_task(description, total=total, note="")
        for item in items:
            yield item
            bar.advance(task)


def sampling_of(config: RunConfig, **given: Any) -> dict[str, Any]:
    """Sampler, steps and guidance: what was given, and the run's own for the rest; steps as they will be taken."""
    from scalelong.diffusion.sampling import evaluations

    how = {**asdict(config.sampling), **{key: value for key, value in given.items() if value is not None}}
    return how | {"steps": evaluations(how["sampler"], how["steps"])}


def say_warm_up(config: RunConfig) -> None:
    """A training that ends while its learning rate still rises is seldom meant."""
    steps, warm_up = config.train.steps, config.train.warmup_steps
    if steps < warm_up and is_first_process():
        typer.echo(
            f"warning: the learning rate rises over train.warmup_steps={warm_up} steps, so that {steps:,} steps "
            f"end at {steps / warm_up:.0%} of train.lr; for a short run --set "
            f"train.warmup_steps={max(1, steps // 10)}.",
            err=True,
        )


def say_averages(config: RunConfig) -> None:
    """A training may end before its averages have forgotten the weights that it began with."""
    from scalelong.training.ema import of_first_weights

    train = config.train
    remedy = "take more steps or lower train.ema_rates"
    if not train.ema_warmup:
        remedy += ", or --set train.ema_warmup=true, which forgets them"
    if (told := of_first_weights(train, None, train.steps)) and is_first_process():
        typer.echo(
            f"warning: after {train.steps:,} steps the averages are {told}, and pictures, FID and held-out "
            f"losses are of these: {remedy}.",
            err=True,
        )


def data_at_hand(run: Path) -> Path | None:
    """The folder of a run's data, if it is still there."""
    from scalelong.runs.data import RunData

    kept = RunData.read(run)
    return Path(kept.folder) if kept is not None and Path(kept.folder).is_dir() else None


def say_cpu(config: RunConfig, device: str) -> None:
    """On a CPU most recipes take days: that is told before the first step, which takes half a minute."""
    import torch

    from scalelong.costs import hours_of

    if device != "cpu" or not is_first_process():
        return
    hours = hours_of(config, device)
    if hours > _LONG_HOURS:
        typer.echo(
            f"warning: on a CPU, with {torch.get_num_threads()} threads, {config.train.steps:,} steps of this "
            f"network take about {in_words(3600 * hours)}; take a GPU, fewer steps or a smaller network (a U-ViT "
            "with --set model.changes.hidden_size=64 --set model.changes.num_layers=4 --set train.batch_size=16, "
            "say).",
            err=True,
        )


def stopped() -> NoReturn:
    """Ctrl-C ended a command of many runs."""
    typer.echo("stopped; what was done is saved, and the same command goes on.", err=True)
    raise typer.Exit(STOPPED)


def with_values(settings: list[str] | None) -> list[str] | None:
    """For --set: told before a VALUE behind a space is taken for an argument."""
    if settings:
        from scalelong.config import check_has_value

        for setting in settings:
            check_has_value(setting)
    return settings


def check_output_file(out: Path, such_as: str) -> None:
    """A file can be written there, as far as its name goes: told before the work, not after it."""
    if out.is_dir():
        raise ValueError(f"{out} is a folder; --out is a file, such as {out / such_as}.")


def print_result(result: dict[str, Any], as_json: bool, sentence: str) -> None:
    """A sentence for people, or JSON for scripts."""
    if not is_first_process():
        return
    if as_json:
        from scalelong.training.log import for_json

        sentence = json.dumps(for_json(result), ensure_ascii=False, indent=2, allow_nan=False)
    typer.echo(sentence)


def print_table(rows: list[dict[str, str]], title: str | None = None) -> None:
    """Rows of the same keys for people; long cells are wrapped."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=title, title_justify="left", show_lines=any("\n" in c for row in rows for c in row.values())
    )
    for name in rows[0]:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    Console().print(table, markup=False)
