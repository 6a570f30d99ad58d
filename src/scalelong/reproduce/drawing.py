"""The paper's kinds of pictures: curves with a band over seeds, and values beside the printed numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from scalelong.reproduce.plan import Data

COLOURS = {"none": "C3", "1/√2": "C1", "CS": "C0", "LS": "C2", "CS reversed": "C4", "skip-norm": "C6"}
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.use": True,
}


def panels(count: int, *, width: float = 4.2, height: float = 3.2) -> tuple[Any, Sequence[Any]]:
    """A row of axes."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width * count, height))
        axes = figure.subplots(1, count, squeeze=False)
    return figure, axes[0]


def draw_curves(axes: Any, found: Data, ylabel: str, *, log: bool = True) -> None:
    """One line per variant: the mean over seeds, and their range as a band; a gap where a value is no number. A run
    that diverged, whose last value is infinite, is a thin line that ends in a cross, and in no mean."""
    for name, runs in found.items():
        colour = colour_of(name)
        lost, whole = ([run for run in runs if has_diverged(run) is it_has] for it_has in (True, False))
        for run in lost:
            steps, values = run["steps"][:-1], run["values"][:-1]
            axes.plot(steps, values, color=colour, lw=0.7, ls="--")
            axes.plot(steps[-1:], values[-1:], "x", color=colour)
        points = [dict(zip(run["steps"], run["values"], strict=True)) for run in whole]
        steps = sorted(set.intersection(*map(set, points))) if points else []
        table = np.array([[run[step] for step in steps] for run in points]).reshape(len(points), len(steps))
        if steps:
            axes.fill_between(steps, table.min(0), table.max(0), color=colour, alpha=0.2, lw=0)
        if runs:
            told = f"{name} ({len(lost)} diverged)" if lost else name
            axes.plot(steps, table.mean(0) if steps else [], color=colour, label=told, lw=1.4)
    axes.set(xlabel="step", ylabel=ylabel, **({"yscale": "log"} if log else {}))
    several = any(len(runs) > 1 for runs in found.values())
    axes.legend(frameon=False, fontsize=8, title="mean and range over seeds" if several else None, title_fontsize=8)


def has_diverged(run: Data) -> bool:
    """Whether a curve ends so; a value on the way that is no number was only not to be had."""
    return bool(run["values"][-1:] == [math.inf])


def draw_values(axes: Any, values: Mapping[str, Sequence[float]], title: str, ylabel: str) -> None:
    """One column per variant: a dot for each seed, a bar at the mean of those that did not diverge."""
    for place, (name, seeds) in enumerate(values.items()):
        finite = [value for value in seeds if math.isfinite(value)]
        colour = colour_of(name, place)
        axes.plot([place] * len(finite), finite, "o", ms=5, color=colour, alpha=0.7)
        if finite:
            mean = sum(finite) / len(finite)
            axes.plot([place - 0.3, place + 0.3], [mean, mean], color=colour, lw=2)
        if lost := len(seeds) - len(finite):
            style = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "top", "fontsize": 8}
            axes.text(place, 0.99, f"{lost} diverged", color=colour, **style)
    axes.set_xticks(range(len(values)), list(values), rotation=25, ha="right")
    if any(len(seeds) > 1 for seeds in values.values()):
        ylabel += " (a dot is a seed)"
    axes.set(title=title, ylabel=ylabel, xlim=(-0.6, len(values) - 0.4))
    axes.margins(y=0.2)


def draw_printed(axes: Any, printed: Mapping[str, float], title: str, ylabel: str) -> None:
    """The paper's numbers in the same form."""
    draw_values(axes, {name: [value] for name, value in printed.items()}, title, ylabel)


def draw_beside(data: Data, printed: Mapping[str, float]) -> Any:
    """The values of every variant, ours beside the paper's on CIFAR-10."""
    figure, axes = panels(2)
    draw_values(axes[0], data["values"], "ours", data["measure"])
    draw_printed(axes[1], printed, "paper, CIFAR-10, U-ViT-S/2", "FID-50k")
    return figure


def colour_of(name: str, place: int = 0) -> str:
    """A scaling has its colour in every picture; other variants take one that no scaling has, by their place."""
    others = [f"C{i}" for i in range(10) if f"C{i}" not in COLOURS.values()]
    return COLOURS.get(name.split(",")[0], others[place % len(others)])
