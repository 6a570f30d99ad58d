"""Fig. 3c: quality against extra noise on the network's input."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from scalelong import experiment
from scalelong.comparison import diverged
from scalelong.config import RunConfig
from scalelong.data.store import Store
from scalelong.metrics.evaluate import quality_of, reference_of
from scalelong.metrics.features import features_named
from scalelong.reproduce.drawing import colour_of, panels
from scalelong.reproduce.judging import below
from scalelong.reproduce.plan import Data, Folders, Reproduction, full, scalings, small
from scalelong.stability.statements import Statement

LEVELS = (0.0, 0.1, 0.2, 0.4)
LOST = [math.inf] * len(LEVELS)  # of a run that diverged: its weights draw nothing
_RULE = (
    "What the largest extra noise adds to the distance is smaller with CS and LS than with none: every seed of the "
    "one below every seed of the other. A run that diverged counts as infinite."
)


class Disturbed(nn.Module):
    """A network whose input gets normal noise of a given size at every evaluation."""

    def __init__(self, network: nn.Module, size: float) -> None:
        super().__init__()
        self.network, self.size = network, size
        self.generator = torch.Generator(next(network.parameters()).device).manual_seed(0)

    def forward(self, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The network's answer to the disturbed input."""
        noise = torch.randn(sample.shape, generator=self.generator, device=sample.device, dtype=sample.dtype)
        return self.network(sample + self.size * noise, *args, **kwargs)


def collect(folders: Folders, store: Store) -> Data:
    """Samples of every run at every level."""
    config = experiment.read_config(next(iter(folders.values()))[0])
    small_images = config.model.preset == "digits"
    num, steps = (512, 20) if small_images else (10_000, 50)
    features = features_named("pixels" if small_images else "inception", None, experiment.default_device())
    reference = reference_of(store, features)

    def distances(run: experiment.LoadedRun) -> list[float]:
        network = experiment.for_sampling(run.model, len(LEVELS) * num * steps)
        return [distance(run.config, Disturbed(network, size)) for size in LEVELS]

    def distance(config: RunConfig, network: nn.Module) -> float:
        samples = experiment.drawn(config, network, range(num), batch=256, seed=1, steps=steps)
        try:
            return quality_of(samples, reference, features, "").fid
        except FloatingPointError:  # noise was too much for it
            return math.inf

    curves = {}
    for name, runs in folders.items():
        curves[name] = [LOST if diverged(folder) else distances(experiment.load_run(folder)) for folder in runs]
    return {"measure": "pixel FID" if small_images else "FID-10k", "levels": list(LEVELS), "curves": curves}


def draw(data: Data) -> Any:
    """The distance at each level, and what the noise added to it; a line is a seed."""
    figure, axes = panels(2)
    for name, runs in data["curves"].items():
        for number, run in enumerate(runs):
            label = name if number == 0 else None
            if not any(map(math.isfinite, run)):
                label = f"{name}, diverged"
            axes[0].plot(data["levels"], run, "o-", ms=3, color=colour_of(name), label=label)
            axes[1].plot(data["levels"], [v - run[0] for v in run], "o-", ms=3, color=colour_of(name), label=label)
    axes[0].set(xlabel="extra noise on every input", ylabel=data["measure"])
    axes[1].set(xlabel="extra noise on every input", ylabel="added by the noise")
    axes[0].legend(frameon=False, fontsize=8)
    return figure


def added(run: list[float]) -> float:
    """What the largest noise adds; a run that diverged has no distance to add to."""
    return run[-1] - run[0] if math.isfinite(run[0]) and math.isfinite(run[-1]) else math.inf


def judge(data: Data) -> Statement:
    """By how much extra noise worsens samples."""
    values = {name: [added(run) for run in runs] for name, runs in data["curves"].items()}
    checks = [below(values, name, "none", f"the scaling is {name}") for name in ("CS", "LS")]
    return Statement(name="fig3c", claim=REPRODUCTION.claim, rule=_RULE, checks=checks)


REPRODUCTION = Reproduction(
    name="fig3c",
    title="Fig. 3c: robustness to noise on the input",
    claim="Extra noise on the input worsens samples less with CS and LS.",
    small=small(scalings()),
    full=full(scalings()),
    collect=collect,
    draw=draw,
    judge=judge,
)
