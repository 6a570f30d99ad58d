"""What is made as a run trains: pictures, what post-hoc averages are made of, what judges find."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from scalelong.config import RunConfig
from scalelong.data.contexts import Context
from scalelong.runs.assembly import build_model
from scalelong.runs.drawing import draw
from scalelong.runs.folder import SAMPLES
from scalelong.runs.pictures import write_grid
from scalelong.training import checkpoint
from scalelong.training.ema import EMA, default_rate
from scalelong.training.fit import Event, Fit
from scalelong.training.log import NoLog, RunLog, read_metrics
from scalelong.training.posthoc import SNAPSHOTS
from scalelong.training.sharding import gather_into

Walk = Callable[[Iterable[Any]], Iterable[Any]]
Figures = Mapping[str, float | list[float]]


@dataclass(frozen=True)
class Judge:
    """What is found out about a run's averaged weights as it trains.

    `figures_of` gets the model with each of the averages, and a function to walk over things with, which ends it
    when the run is asked to stop. Its figures are logged in a group called `name`, those of the settled average
    under their plain names as well. `every` is a number of steps; by default, whenever pictures are drawn.
    """

    name: str
    figures_of: Callable[[nn.Module, Walk], Figures]
    every: int | None = None
    about: str = ""  # what was asked, logged with the figures: asked otherwise, a run that is done is judged again


def events_of(
    config: RunConfig,
    fit: Fit,
    log: RunLog | NoLog,
    judges: Sequence[Judge],
    context: Context | None,
) -> list[Event]:
    """What is made as a run trains: pictures, what post-hoc averages are made of, figures of quality."""
    out = fit.folder
    first = fit.world.is_first

    @functools.cache
    def plain_model() -> nn.Module:
        return build_model(config, str(fit.stepper.loader.device))

    @contextlib.contextmanager
    def averaged(ema: EMA) -> Iterator[nn.Module | None]:
        """The model with an average, in the first process. One in parts lends them to a plain one there."""
        if not fit.stepper.sharded:
            with ema.applied_to(fit.model) if first else contextlib.nullcontext() as model:
                yield model
            return
        model = plain_model() if first else None
        gather_into(model, ema.weights)
        yield model

    def settled() -> EMA:
        rate = default_rate(list(config.train.ema_rates), fit.step)
        return next(ema for ema in fit.emas if ema.rate == rate)

    def grid_of(step: int) -> Path:
        return out / SAMPLES / f"step-{step:09d}.png"

    def save_grid(step: int) -> None:
        with averaged(settled()) as model:
            if model is not None:
                try:
                    images = draw(config, model, 16, seed=0, context=context, progress=fit.points)
                except FloatingPointError as error:  # of samples: what the training does is the guard's matter
                    warnings.warn(f"no picture at step {step}: {error}", stacklevel=1)
                    return
                write_grid(images, grid_of(step))

    def keep_snapshot(step: int) -> None:
        tensors = {power.name: power.weights for power in fit.stepper.powers}
        fit.write(SNAPSHOTS, tensors, {"step": step}, keep=1_000_000)

    def no_snapshot(step: int) -> bool:
        return not checkpoint.folder_of(out / SNAPSHOTS, step).is_dir()

    def write_judgement(judge: Judge, step: int) -> None:
        found: dict[str, Any] = {"of": judge.about, "ema": settled().rate}
        for ema in fit.emas:
            with averaged(ema) as model:
                figures: Figures = judge.figures_of(model, fit.points) if model is not None else {}
            found |= {f"{name} at {ema.rate}": value for name, value in figures.items()}
            found |= figures if ema is settled() else {}
        log.write(step, **{judge.name: found})

    def no_judgement(judge: Judge, step: int) -> bool:
        judged = [row[judge.name] for row in read_metrics(out) if row["step"] == step and judge.name in row]
        return not any(found.get("of", judge.about) == judge.about for found in judged)

    events = [Event(config.train.sample_every, save_grid, lambda step: not grid_of(step).is_file())]
    if config.train.posthoc_every:
        events.append(Event(config.train.posthoc_every, keep_snapshot, no_snapshot))
    for judge in judges:
        lacking = functools.partial(no_judgement, judge)
        events.append(
            Event(judge.every or config.train.sample_every, functools.partial(write_judgement, judge), lacking)
        )
    return events
