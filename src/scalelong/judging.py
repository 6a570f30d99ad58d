"""What is found out about averaged weights as a run trains: quality of samples, loss on held-out images."""

from __future__ import annotations

import math
import warnings
from typing import Any

from torch import nn

from scalelong import experiment
from scalelong.config import RunConfig, resolved_for
from scalelong.data.contexts import text_of
from scalelong.data.store import Store
from scalelong.experiment import Figures, Judge, Walk
from scalelong.held_out import HeldOut, check_like
from scalelong.metrics.evaluate import quality_of, reference_of, statistics_folder
from scalelong.metrics.features import Features
from scalelong.world import rank_and_size

QUALITY, HELD_OUT = "quality", "held out"
SEED = 1  # the grids show those of seed 0


def judge_quality(
    config: RunConfig,
    store: Store,
    features: Features,
    *,
    num: int,
    steps: int | None = None,
    every: int | None = None,
) -> Judge:
    """FID and the like: `num` samples, drawn as the run draws, against all of the data.

    The figures of pixels are named so, as they compare with nothing in the literature.
    """
    config = experiment.fitted_to(config, store)
    steps = steps or config.sampling.steps
    on_pixels = features.name == "pixels"
    reference = reference_of(store, features, None if on_pixels else statistics_folder())
    context = text_of(store).context() if config.data.condition == "text" else None
    labels = experiment.labels_like(store, range(num)) if config.data.condition == "class" else None
    networks: dict[nn.Module, nn.Module] = {}  # built once: averages are swapped into the same model

    def figures_of(model: nn.Module, walk: Walk) -> Figures:
        if model not in networks:
            networks[model] = experiment.for_sampling(model, num * steps)
        how: dict[str, Any] = {"seed": SEED, "steps": steps, "context": context, "labels": labels, "progress": walk}
        samples = experiment.drawn(config, networks[model], range(num), batch=500, **how)
        try:
            found = quality_of(samples, reference, features, "")
            figures = {"fid": found.fid, "kid": found.kid, "precision": found.precision, "recall": found.recall}
        except FloatingPointError as error:  # of samples; the training may come back from there
            warnings.warn(f"samples are judged as not finite: {error}", stacklevel=1)
            figures = dict.fromkeys(("fid", "kid", "precision", "recall"), math.nan)
        return {f"pixel_{name}" if on_pixels else name: value for name, value in figures.items()}

    return Judge(QUALITY, figures_of, every, f"{num} samples of {steps} steps, {features.name}")


def judge_held_out(
    config: RunConfig, store: Store, held_out: Store, device: str, *, num: int, every: int | None = None
) -> Judge:
    """The loss on `num` images of another store than that of the training, in bf16 where the training is."""
    config = experiment.fitted_to(config, store)
    check_like(config, store, held_out)
    processes = rank_and_size()[1]
    share = config.train.batch_size // (processes * config.train.accumulate)
    bf16 = resolved_for(config.train, device, processes).precision == "bf16"
    batch = max(1, min(250, share))  # as many as a step sees at once: no more memory than it takes
    asked = HeldOut(config, held_out, device=device, num=num, batch=batch, bf16=bf16)
    about = f"{asked.images} images of {held_out.checksum[:12]}, by noise{', bf16' if bf16 else ''}"

    def figures_of(model: nn.Module, walk: Walk) -> Figures:
        found = asked.measure(model, lambda starts, count: walk(starts))
        return {"loss": found.loss, "by noise": found.by_noise}

    return Judge(HELD_OUT, figures_of, every, about)
