"""Fig. 5: quality against training steps."""

from __future__ import annotations

import math
from typing import Any

from scalelong.data.store import Store
from scalelong.reproduce.drawing import draw_curves, panels
from scalelong.reproduce.judging import told_by
from scalelong.reproduce.plan import Data, Folders, Reproduction, full, scalings, small
from scalelong.reproduce.running import last, quality
from scalelong.stability.statements import Check, Statement

PAPER_SPEEDUP = 1.5
_RULE = (
    "The steps that training without scaling took, over those after which the scaled run first is as good as that "
    "one at its end, are at least 1.5 in every seed, and the scaled run ends no worse. Never is less than any "
    "number; where only the run without scaling diverged, the other is ahead by more than any. A scaling that "
    "changes nothing ends no worse in half of the seeds, so that chance passes in at most one case of eight with "
    "three seeds."
)


def collect(folders: Folders, store: Store) -> Data:
    """The curves of quality."""
    return quality(folders)


def draw(data: Data) -> Any:
    """The curves, and the steps that each scaling saves: a dot is a seed, the bar the least of them."""
    figure, axes = panels(2)
    draw_curves(axes[0], data["curves"], data["measure"])
    gains = speedups(data)
    for place, values in enumerate(gains.values()):
        finite = [value for value in values if math.isfinite(value)]
        axes[1].plot([place] * len(finite), finite, "ko", ms=4)
        axes[1].bar(place, min(finite, default=0.0), color="C0", alpha=0.4)
        if ahead := len(values) - len(finite):  # by more than any number: only none diverged there
            axes[1].text(place, 0.02, f"∞ ({ahead})", ha="center", transform=axes[1].get_xaxis_transform())
    axes[1].axhline(PAPER_SPEEDUP, color="C3", ls=":", label="paper: at least 1.5")
    axes[1].set_xticks(range(len(gains)), list(gains))
    axes[1].set(ylabel="times fewer steps (0: never)")
    axes[1].legend(frameon=False, fontsize=8)
    return figure


def judge(data: Data) -> Statement:
    """For each method."""
    checks, ends = [], last(data["curves"])
    for name, values in speedups(data).items():
        if name in ("CS", "LS"):
            worse = sum(_rank(end) > _rank(plain) for end, plain in zip(ends[name], ends["none"], strict=True))
            found = f"times fewer steps, seed by seed: {', '.join(f'{v:.2f}' if v else 'never' for v in values)}"
            found += f"; ends worse in {worse} of {len(values)}" if worse else ""
            holds = told_by(values, min(values) >= PAPER_SPEEDUP and not worse)
            checks.append(Check(f"the scaling is {name}", holds, found))
    return Statement(name="fig5", claim=REPRODUCTION.claim, rule=_RULE, checks=checks)


def speedups(data: Data) -> dict[str, list[float]]:
    """Per scaling and seed: the steps of the unscaled run over those to its last quality."""
    plain = data["curves"]["none"]
    return {
        name: [_speedup(run, other) for run, other in zip(runs, plain, strict=True)]
        for name, runs in data["curves"].items()
        if name != "none"
    }


def _rank(value: float) -> float:
    """No number is as bad as one that is infinite."""
    return math.inf if math.isnan(value) else value


def _speedup(run: Data, plain: Data) -> float:
    ends = [_rank(value) for curve in (run, plain) for value in curve["values"][-1:]]
    if math.inf in ends[:1]:
        return 0.0
    if math.inf in ends[1:]:
        return math.inf
    reached = first_reached(run["steps"], run["values"], plain["values"][-1])
    return 0.0 if reached is None else plain["steps"][-1] / reached


def first_reached(steps: list[int], values: list[float], goal: float) -> float | None:
    """Where the straight lines between the points first come down to the goal.

    >>> first_reached([100, 200], [10.0, 6.0], 8.0)
    150.0
    """
    if values and values[0] <= goal:
        return float(steps[0])
    for i in range(1, len(values)):
        if values[i] <= goal < values[i - 1]:
            share = (values[i - 1] - goal) / (values[i - 1] - values[i])
            return steps[i - 1] + share * (steps[i] - steps[i - 1])
    return None


REPRODUCTION = Reproduction(
    name="fig5",
    title="Fig. 5: quality against steps",
    claim="CS and LS reach the quality of the plain net in 1.5 times fewer steps or better.",
    small=small(scalings()),
    full=full(scalings()),
    collect=collect,
    draw=draw,
    judge=judge,
)
