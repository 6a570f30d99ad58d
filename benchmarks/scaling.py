"""How a step's cost grows with depth, width, tokens and batch, beside its arithmetic.

    python -m benchmarks.scaling cifar10-uvit-s

For each axis the table ends in an exponent: time as a power of the FLOP count between the axis' ends. 1 means that
time follows arithmetic; less, that fixed costs are being spread over more work.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.measure import RESULTS, Contender, Row, race, table, write
from benchmarks.throughput import flops, random_store, recipe, step_of
from scalelong import experiment
from scalelong.config import with_overrides

FACTORS = (0.5, 1, 2)
AXES = {"depth": "num_layers", "width": "hidden_size", "tokens": "sample_size", "batch": ""}


def main(
    preset: Annotated[str, typer.Argument(help="A recipe of scalelong train with a U-ViT.")] = "cifar10-uvit-s",
    axes: Annotated[str, typer.Option(help="Which of depth, width, tokens, batch; by commas.")] = ",".join(AXES),
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C")] = None,
    rounds: Annotated[int, typer.Option(help="How often each has its turn.")] = 5,
    steps: Annotated[int, typer.Option(help="Steps per turn.")] = 10,
    out: Annotated[Path, typer.Option(help="Where the result file goes.")] = RESULTS,
) -> None:
    """Time steps of the net at half, once and twice its size along each axis."""
    base = with_overrides(recipe(preset), settings or [])
    network = experiment.build_model(base, "meta").config  # type: ignore[union-attr]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for axis in axes.split(","):
            contenders = []
            for factor in FACTORS:
                if axis == "batch":
                    size = round(base.train.batch_size * factor)
                    change = f"train.batch_size={size}"
                else:  # twice the side is four times the tokens
                    size = round(getattr(network, AXES[axis]) * factor)  # type: ignore[union-attr]
                    change = f"model.changes.{AXES[axis]}={size}"
                config = with_overrides(base, [change])
                store = random_store(Path(folder) / f"{axis}-{factor}", config)
                fitted = experiment.fitted_to(config, store)
                step = partial(step_of, fitted, store)
                shown = experiment.build_model(fitted, "meta").num_tokens if axis == "tokens" else size
                name = f"{axis} {shown}"
                contenders.append(Contender(name, "none", fitted.train.batch_size, flops(fitted), step))
            rows += race(contenders, rounds=rounds, steps=steps)
    typer.echo(table(rows))
    for start in range(0, len(rows), len(FACTORS)):
        part = rows[start : start + len(FACTORS)]
        typer.echo(f"{part[0].name.split()[0]}: time grows as FLOPs^{exponent(part):.2f}")
    typer.echo(f"written: {write(rows, f'scaling-{preset}', out)}")


def exponent(rows: Sequence[Row]) -> float:
    """d log time / d log FLOPs between the first and the last row."""
    first, last = rows[0], rows[-1]
    work = [row.tflops * row.ms_per_step for row in (first, last)]
    return math.log(last.ms_per_step / first.ms_per_step) / math.log(work[1] / work[0])


if __name__ == "__main__":
    typer.run(main)
