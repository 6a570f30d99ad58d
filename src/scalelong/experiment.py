"""A run from data to samples: read this first.

store ─▶ loader ─▶ noise process ─▶ backbone ⟵ skips (the method)
                        fit: step → guard → optimiser → EMA → signals → checkpoint
                                                 ▼
                                              sampler
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from scalelong.config import RunConfig, resolved_for, to_dict
from scalelong.data.contexts import kept_text
from scalelong.data.prepare import digits_folder, open_data
from scalelong.data.store import Store
from scalelong.runs.assembly import build_model, fitted_to, loader_for, num_classes, process_of
from scalelong.runs.beginning import Beginning, Branch, Weights, as_begun, beginning_in
from scalelong.runs.claim import claimed
from scalelong.runs.data import data_of
from scalelong.runs.drawing import (
    autoencoder_of,
    check_drawing,
    draw,
    drawn,
    encode_prompts,
    encoder_of,
    for_sampling,
    labels_like,
    noise_is_all,
    sampling_precision,
    with_autoencoder,
)
from scalelong.runs.events import Figures, Judge, Walk, events_of
from scalelong.runs.folder import LoadedRun, check_folder, last_step, load_run, open_run, read_config, run_config
from scalelong.runs.pictures import write_grid
from scalelong.training.fit import Fit, Progress
from scalelong.training.guard import NonFiniteError
from scalelong.training.log import NoLog, RunLog
from scalelong.training.sharding import is_sharded
from scalelong.training.step import Stepper
from scalelong.training.trackers import check_logger
from scalelong.world import World, default_device, joined, local_device, usable_device

# The parts of `runs/` are asked for here too: a run is trained, loaded and drawn from by one name.
__all__ = [
    "Beginning",
    "Branch",
    "Figures",
    "Judge",
    "LoadedRun",
    "Walk",
    "Weights",
    "as_begun",
    "autoencoder_of",
    "beginning_in",
    "build_model",
    "check_drawing",
    "check_folder",
    "data_of",
    "default_device",
    "digits_folder",
    "draw",
    "drawn",
    "encode_prompts",
    "encoder_of",
    "fitted_to",
    "for_sampling",
    "labels_like",
    "last_step",
    "load_run",
    "loader_for",
    "noise_is_all",
    "num_classes",
    "open_data",
    "process_of",
    "read_config",
    "run_config",
    "sampling_precision",
    "train",
    "usable_device",
    "with_autoencoder",
    "write_grid",
]


def train(
    config: RunConfig,
    store: Store,
    out: Path,
    *,
    device: str | None = None,
    show: Callable[[Progress], None] = lambda progress: None,
    judges: Sequence[Judge] = (),
    logger: str = "tensorboard",
    stop_after_s: float = math.inf,
    begin: Beginning = Beginning(),  # noqa: B008 - a frozen value
) -> bool:
    """Train a model into the folder `out`, or go on with the run that is there. True when it is done.

    `begin` says where a new run takes its weights from: `Weights(...)` or `Branch(...)`; by default they are drawn.
    After `stop_after_s` seconds it is saved and stops; the same call goes on. What `judges` find about the averaged
    weights on the way is logged. `logger` is tensorboard, wandb (both) or none; metrics.jsonl is always written.
    """
    check_logger(logger)
    until = time.monotonic() + stop_after_s
    device = local_device(usable_device(device))
    _free(device)  # what a run before that ended in an error still holds
    with joined(device) as world:
        done = _train(config, store, out, world, device, show, judges, logger, until, begin)
    _free(device)
    return done


def _free(device: str) -> None:
    """Free a GPU's memory now: what compiled code, graphs and errors still hold, and not when Python looks."""
    if device != "cpu":
        gc.collect()


def _train(
    config: RunConfig,
    store: Store,
    out: Path,
    world: World,
    device: str,
    show: Callable[[Progress], None],
    judges: Sequence[Judge],
    logger: str,
    until: float,
    begin: Beginning,
) -> bool:
    begin = beginning_in(out, begin)
    config = fitted_to(begin.fitted(config), store)
    config = replace(config, train=resolved_for(config.train, device, world.size))
    check_drawing(config)
    text = kept_text(store) if config.data.condition == "text" else None
    data, begin = data_of(config, store), as_begun(begin, out)
    if world.is_first:
        check_folder(config, out, text, data)
        begin.check(config, text, data)
        autoencoder_of(config, device)  # found before the first step, not at the first preview
    if config.train.parallel == "fsdp" and world.size == 1:
        warnings.warn(
            "train.parallel=fsdp shares weights out over several processes; this one has them all.", stacklevel=3
        )
    # Shards go to the device block by block: the whole model need not fit there.
    model = begin.model(config, "cpu" if is_sharded(config.train, world) else device)
    loader = loader_for(config, store, device)
    fit = Fit(config, Stepper(model, process_of(config), loader, config.train, world), out)
    # Last: settings that cannot be leave no folder behind.
    with claimed(out) if world.is_first else contextlib.nullcontext():
        begins_at = 0
        if world.is_first:
            begin.record(out, config.model.preset)
            open_run(config, out, text, data)
            begins_at = begin.enter(out)
        world.wait()
        resumed_at = fit.resume()
        if resumed_at < begins_at:  # the step 0 of a branch would be one from scratch
            raise ValueError(f"{out} has no whole copy of what it begins with; give the same command again.")
        if len({int(step) for step in world.gather(torch.tensor([resumed_at], device=device))}) > 1:
            raise ValueError(f"the processes found different checkpoints in {out}; all must see the same folder.")
        log = RunLog(out, resumed_at, logger, to_dict(config)) if world.is_first else NoLog()
        events = events_of(config, fit, log, judges, text.context if text else None)
        with log:
            try:
                return fit.run(log, show=show, events=events, until=until)
            except NonFiniteError as error:
                log.write(error.step + 1, nonfinite=error.as_dict())  # the update that was not made
                raise
