"""The paper's kinds of pictures: curves with a band over seeds, and values beside the printed numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
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
    """One line per variant: the mean over seeds, and their range as a band. A run that diverged is a thin line that
    ends in a cross, and in no mean."""
    for name, runs in found.items():
        colour = colour_of(name)
        lost = [run for run in runs if not all(map(math.isfinite, run["values"]))]
        for run in lost:
            points = [(s, v) for s, v in zip(run["steps"], run["values"], strict=True) if math.isfinite(v)]
            axes.plot(*zip(*points, strict=True) if points else ([], []), color=colour, lw=0.7, ls="--")
            axes.plot(*zip(*points[-1:], strict=True) if points else ([], []), "x", color=colour)
        told = f"{name} ({len(lost)} diverged)" if lost else name
        whole = [run for run in runs if run not in lost]
        steps = sorted(set.intersection(*(set(run["steps"]) for run in whole))) if whole else []
        table = [[dict(zip(run["steps"], run["values"], strict=True))[s] for run in whole] for s in steps]
        if not table:
            if lost:
                axes.plot([], [], color=colour, label=told)
            continue
        axes.plot(steps, [sum(row) / len(row) for row in table], color=colour, label=told, lw=1.4)
        axes.fill_between(steps, list(map(min, table)), list(map(max, table)), color=colour, alpha=0.2, lw=0)
    axes.set(xlabel="step", ylabel=ylabel, **({"yscale": "log"} if log else {}))
    several = any(len(runs) > 1 for runs in found.values())
    axes.legend(frameon=False, fontsize=8, title="mean and range over seeds" if several else None, title_fontsize=8)


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
