"""Fig. 7: what the gates of LS have learned, averaged over 30 noise inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from scalelong import experiment
from scalelong.comparison import diverged
from scalelong.data.random import Stream
from scalelong.data.store import Store
from scalelong.reproduce.drawing import panels
from scalelong.reproduce.judging import told_by
from scalelong.reproduce.plan import Data, Folders, Reproduction, full, scalings, small
from scalelong.skips.apply import scaling_of
from scalelong.stability.statements import Check, Statement

INPUTS = 30
BAND = (0.5, 0.95)  # the paper's range of κ
_RULE = (
    "A line through the logarithms of the gates falls with i in every seed, at least like the paper's largest κ, "
    "0.95; every gate but the outermost, where CS has 1, lies between κ^i of its smallest and largest. "
    "A run that diverged has no gates, and counts against both."
)


def collect(folders: Folders, store: Store) -> Data:
    """The mean gate of each skip, outermost first, of every run; None of one that diverged."""
    runs = folders["LS"]
    return {"gates": [None if diverged(folder) else mean_gates(experiment.load_run(folder)) for folder in runs]}


@torch.no_grad()
def mean_gates(run: experiment.LoadedRun) -> list[float]:
    """Over 30 inputs of pure noise and times of the training's own distribution."""
    handle, process = scaling_of(run.model), experiment.process_of(run.config)
    assert handle is not None
    device = next(run.model.parameters()).device
    size, channels = run.config.model.changes["sample_size"], run.config.model.changes["in_channels"]
    indices = torch.arange(INPUTS, device=device)
    noise = Stream(0, "gates").normal(indices, (channels, size, size))
    times = process.to(device).timesteps(Stream(0, "times").uniform(indices))
    found: dict[int, float] = {}
    hooks = [
        scale.register_forward_hook(lambda _m, _a, gate, i=i: found.__setitem__(i, gate.float().mean().item()))
        for i, scale in enumerate(handle.scales)
    ]
    try:
        run.model(noise, times)
    finally:
        for hook in hooks:
            hook.remove()
    return [found[i] for i in sorted(found)]


def draw(data: Data) -> Any:
    """Gates over the skip's index, in the band of CS."""
    figure, (axes,) = panels(1)
    trained = [gates for gates in data["gates"] if gates is not None]
    index = np.arange(len(trained[0]) if trained else 0)
    axes.fill_between(index, BAND[0] ** index, BAND[1] ** index, alpha=0.15, lw=0, label="CS, κ from 0.5 to 0.95")
    for seed, gates in enumerate(trained):
        axes.plot(index, gates, "o-", color="C2", ms=4, alpha=0.8, label="LS" if seed == 0 else None)
    axes.set(xlabel="skip (0 = outermost)", ylabel="mean gate", ylim=(0, 1.05))
    axes.legend(frameon=False, fontsize=8)
    return figure


def judge(data: Data) -> Statement:
    """Decay, and the band."""
    seeds = data["gates"]
    trained = [gates for gates in seeds if gates is not None]
    slopes = [_slope(gates) for gates in trained]
    inside = [BAND[0] ** i <= gate <= BAND[1] ** i for gates in trained for i, gate in enumerate(gates) if i > 0]
    fitted = "κ fitted: " + ", ".join(f"{np.exp(slope):.3f}" for slope in slopes)
    lost = f"; {len(seeds) - len(trained)} diverged" if len(trained) < len(seeds) else ""
    falls = not lost and all(slope <= np.log(BAND[1]) for slope in slopes)  # not so of a slope that is no number
    return Statement(
        name="fig7",
        claim=REPRODUCTION.claim,
        rule=_RULE,
        checks=[
            Check("the decay is meant", told_by(seeds, falls), fitted + lost),
            Check(
                "the band is meant",
                told_by(seeds, not lost and all(inside)),
                f"{sum(inside)} of {len(inside)} gates inside{lost}",
            ),
        ],
    )


def _slope(gates: list[float]) -> float:
    """Of a line through the logarithms; none where a gate is shut or no number."""
    logarithms = np.log(gates, where=np.asarray(gates) > 0, out=np.full(len(gates), np.nan))
    return float(np.polyfit(range(len(gates)), logarithms, 1)[0]) if np.isfinite(logarithms).all() else float("nan")


REPRODUCTION = Reproduction(
    name="fig7",
    title="Fig. 7: learned gates",
    claim="The gates that LS learns decay about exponentially with i, inside the band of CS.",
    small=small(scalings(["LS"])),
    full=full(scalings(["LS"])),
    collect=collect,
    draw=draw,
    judge=judge,
)
