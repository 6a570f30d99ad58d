"""What the live signals cost: `python -m benchmarks.signals cifar10-uvit-s`.

Plain and observed steps take turns; the overhead is (observed - plain) / plain / `train.monitor_every`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.measure import RESULTS, Contender, race, table, write
from benchmarks.throughput import flops, random_store, recipe, stepper_for
from scalelong import experiment
from scalelong.config import RunConfig, with_overrides
from scalelong.data.store import Store


def main(
    preset: Annotated[str, typer.Argument(help="A recipe of scalelong train.")] = "digits",
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C")] = None,
    rounds: Annotated[int, typer.Option(help="How often each has its turn.")] = 15,
    steps: Annotated[int, typer.Option(help="Steps per turn.")] = 10,
    out: Annotated[Path, typer.Option(help="Where the result file goes.")] = RESULTS,
) -> None:
    """Time plain and observed steps in turns, and print the overhead at the preset's interval."""
    config = with_overrides(recipe(preset), settings or [])
    with tempfile.TemporaryDirectory() as folder:
        store = random_store(Path(folder) / "store", config)
        fitted = experiment.fitted_to(config, store)
        contenders = [
            Contender(
                name, "none", fitted.train.batch_size, flops(fitted), partial(_start, fitted, store, observed)
            )
            for name, observed in (("plain step", False), ("observed step", True))
        ]
        rows = race(contenders, rounds=rounds, steps=steps)
    plain, observed = (row.ms_per_step for row in rows)
    share = (observed - plain) / plain / config.train.monitor_every
    typer.echo(table(rows))
    typer.echo(f"every {config.train.monitor_every} steps: {share:.2%} of the time")
    typer.echo(f"written: {write(rows, f'signals-{preset}', out)}")


def _start(config: RunConfig, store: Store, observed: bool) -> Callable[[], None]:
    stepper = stepper_for(config, store)

    def step() -> None:
        stepper.update(0, observed=observed)
        if observed:
            stepper.signals()

    return step


if __name__ == "__main__":
    typer.run(main)
