"""What the commands share: bars and printing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from scalelong.config import RunConfig


def is_first_process() -> bool:
    """Of those that torchrun or accelerate launch started: the one that speaks."""
    return os.environ.get("RANK", "0") == "0"


def progress_bar(*, transient: bool = False) -> Any:
    """A bar with rate and time left, on standard error, so that --json stays clean."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=transient,
        disable=not is_first_process(),
    )


def tracked(items: Iterable[Any], total: int, description: str) -> Iterator[Any]:
    """Iterate with a bar."""
    with progress_bar() as bar:
        task = bar.add_task(description, total=total, note="")
        for item in items:
            yield item
            bar.advance(task)


def sampling_of(config: RunConfig, **given: Any) -> dict[str, Any]:
    """Sampler, steps and guidance: what was given, and the run's own for the rest."""
    return {**asdict(config.sampling), **{key: value for key, value in given.items() if value is not None}}


def check_output_file(out: Path, such_as: str) -> None:
    """A file can be written there, as far as its name goes: told before the work, not after it."""
    if out.is_dir():
        raise ValueError(f"{out} is a folder; --out is a file, such as {out / such_as}.")


def print_result(result: dict[str, Any], as_json: bool, sentence: str) -> None:
    """A sentence for people, or JSON for scripts."""
    if is_first_process():
        typer.echo(json.dumps(result, ensure_ascii=False, indent=2) if as_json else sentence)


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
