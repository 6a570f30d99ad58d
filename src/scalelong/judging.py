"""Quality as training goes on: samples of the averaged weights against the data, logged with the losses."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from scalelong import experiment
from scalelong.config import RunConfig
from scalelong.data.contexts import text_of
from scalelong.data.store import Store
from scalelong.metrics.evaluate import batches, quality_of, reference_of, statistics_folder
from scalelong.metrics.features import Features

Judge = Callable[[nn.Module], dict[str, float]]
SEED = 1  # the grids show those of seed 0


def judge_for(config: RunConfig, store: Store, features: Features, *, num: int, steps: int | None = None) -> Judge:
    """A function from a model to its figures: `num` samples, drawn as the run draws, against all of the data.

    The figures of pixels are named so, as they compare with nothing in the literature.
    """
    config = experiment.fitted_to(config, store)
    steps = steps or config.sampling.steps
    on_pixels = features.name == "pixels"
    reference = reference_of(store, features, None if on_pixels else statistics_folder())
    context = text_of(store).context() if config.data.condition == "text" else None
    networks: dict[nn.Module, nn.Module] = {}  # built once: averages are swapped into the same model

    def judge(model: nn.Module) -> dict[str, float]:
        if model not in networks:
            networks[model] = experiment.for_sampling(model, num * steps)
        drawn = (
            experiment.draw(config, networks[model], count, first=first, seed=SEED, steps=steps, context=context)
            for first, count in batches(num, 500)
        )
        found = quality_of(drawn, reference, features, "")
        figures = {"fid": found.fid, "kid": found.kid, "precision": found.precision, "recall": found.recall}
        return {f"pixel_{name}" if on_pixels else name: value for name, value in figures.items()}

    return judge
