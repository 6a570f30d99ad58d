"""How fast samples are drawn: `python -m benchmarks.sampling cifar10-uvit-s --num 50000`.

Weights are fresh ones: what a network predicts does not change how long it takes.
"""

from __future__ import annotations

from functools import partial
from itertools import count
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.measure import RESULTS, Contender, race, table, write
from benchmarks.throughput import flops, recipe
from scalelong import experiment
from scalelong.config import RunConfig, with_overrides


def main(
    preset: Annotated[str, typer.Argument(help="A recipe of scalelong train.")] = "cifar10-uvit-s",
    num: Annotated[int, typer.Option(help="Images in all.")] = 50_000,
    batch: Annotated[int, typer.Option(help="Images at once.")] = 500,
    steps: Annotated[int, typer.Option(help="Network evaluations per image.")] = 50,
    out: Annotated[Path, typer.Option(help="Where the result file goes.")] = RESULTS,
) -> None:
    """Draw images with DPM-Solver++, print a table and write a dated result file."""
    size = experiment.build_model(recipe(preset), "meta").config  # type: ignore[union-attr]
    shape = [f"model.changes.sample_size={size.sample_size}", f"model.changes.in_channels={size.in_channels}"]  # type: ignore[union-attr]
    config = with_overrides(recipe(preset), shape)
    contender = Contender(
        name=f"samples, {steps} evaluations",
        scaling="none",
        batch=batch,
        flops_per_image=flops(config) / 3 * steps,
        start=partial(_start, config, num, batch, steps),
    )
    rows = race([contender], rounds=1, steps=max(1, num // batch), warmup=1)
    typer.echo(table(rows))
    typer.echo(f"{num:,} images: {num / rows[0].images_per_s:.1f} s")
    typer.echo(f"written: {write(rows, f'sampling-{preset}', out)}")


def _start(config: RunConfig, num: int, batch: int, steps: int):  # type: ignore[no-untyped-def]
    model = experiment.build_model(config, experiment.default_device())
    network = experiment.for_sampling(model, num * steps)
    number = count()

    def step() -> None:
        experiment.draw(config, network, batch, first=next(number) * batch, steps=steps)

    return step


if __name__ == "__main__":
    typer.run(main)
