"""The figures of a report, as SVG text. Each takes runs grouped by scaling; the range over seeds is a band."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from scalelong.report.runs import Record

Groups = Mapping[str, Sequence[Record]]
_STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
    "figure.constrained_layout.use": True,
}


def curves(
    groups: Groups, path: Sequence[str], ylabel: str, *, log: bool = False, marks: Sequence[int] = ()
) -> str:
    """One line per scaling, and a dashed one at each of the steps `marks`; empty where no run has logged it."""
    if not any(run.series(*path)[0] for runs in groups.values() for run in runs):
        return ""
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(6, 3.2))
        for colour, (scaling, runs) in enumerate(groups.items()):
            _band(axes, runs, path, f"C{colour}", scaling)
        for step in marks:
            axes.axvline(step, color="crimson", ls="--", lw=0.8)
        axes.set(xlabel="step", ylabel=ylabel)
        if log:
            _scale_by_log(axes)
        if any(groups):
            axes.legend(frameon=False)
        return _svg(figure)


def lines(record: Record, paths: Mapping[str, Sequence[str]], ylabel: str) -> str:
    """Several numbers of one training, by label, from dark to light; empty where none was logged."""
    found = {label: record.series(*path) for label, path in paths.items()}
    found = {label: series for label, series in found.items() if series[0]}
    if not found:
        return ""
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(6, 3.2))
        for i, (label, (steps, values)) in enumerate(found.items()):
            axes.plot(
                steps, values, color=plt.get_cmap("viridis")(0.9 * i / max(1, len(found) - 1)), label=label, lw=1
            )
        axes.set(xlabel="step", ylabel=ylabel)
        _scale_by_log(axes)
        figure.legend(frameon=False, fontsize=7, loc="outside right center")
        return _svg(figure)


def per_skip(groups: Groups, signal: str, ylabel: str, *, log: bool = True) -> str:
    """One small plot per scaling, one line per skip, from the outermost (dark) to the innermost (light)."""
    if not any(_skips(runs, signal) for runs in groups.values()):
        return ""
    with plt.rc_context(_STYLE):
        figure, panels = plt.subplots(
            1, len(groups), figsize=(2.5 * len(groups) + 1, 2.8), sharey=True, squeeze=False
        )
        for axes, (scaling, runs) in zip(panels[0], groups.items(), strict=True):
            indices = _skips(runs, signal)
            for i in indices:
                colour = plt.get_cmap("viridis")(0.9 * i / max(1, len(indices) - 1))
                _band(axes, runs, ("signals", f"{signal}/{i}"), colour, f"skip {i}")
            axes.set(title=scaling, xlabel="step")
            if log:
                _scale_by_log(axes)
        panels[0][0].set_ylabel(ylabel)
        handles, labels = panels[0][-1].get_legend_handles_labels()
        figure.legend(handles, labels, frameon=False, fontsize=8, loc="outside right center")
        return _svg(figure)


def coefficients(groups: Groups) -> str:
    """The coefficient of each skip at the end of training; empty where no run has any."""
    if not any(_skips(runs, "coefficient") for runs in groups.values()):
        return ""
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(6, 3))
        for colour, (scaling, runs) in enumerate(groups.items()):
            indices = _skips(runs, "coefficient")
            for run in runs if indices else []:
                values = [run.last("signals", f"coefficient/{i}") for i in indices]
                label = scaling if run is runs[0] else None
                axes.plot(indices, values, "o-", ms=3, color=f"C{colour}", label=label, alpha=0.8)
        axes.set(xlabel="skip (0 = outermost)", ylabel="coefficient", ylim=(0, None))
        axes.legend(frameon=False)
        return _svg(figure)


def drawn(panels: Sequence[Callable[[Any], None]]) -> str:
    """A figure of panels, two in a row, each drawn by a function that gets its axes; a legend in each."""
    columns, rows = min(2, len(panels)), -(-len(panels) // 2)
    with plt.rc_context(_STYLE):
        size = (6 if len(panels) == 1 else 8, 3.2 * rows)
        figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False)
        for draw, place in zip(panels, axes.flat, strict=False):
            draw(place)
            place.legend(frameon=False, fontsize=8)
        return _svg(figure)


def _band(axes: Any, runs: Sequence[Record], path: Sequence[str], colour: Any, label: str) -> None:
    found = [run.series(*path) for run in runs]
    found = [(steps, values) for steps, values in found if steps]
    if not found:
        return
    common = sorted(set.intersection(*(set(steps) for steps, _ in found)))
    table = [[dict(zip(steps, values, strict=True))[s] for s in common] for steps, values in found]
    mean = [sum(column) / len(column) for column in zip(*table, strict=True)]
    axes.plot(common, mean, color=colour, label=label, lw=1.2)
    lowest, highest = ([f(column) for column in zip(*table, strict=True)] for f in (min, max))
    axes.fill_between(common, lowest, highest, color=colour, alpha=0.2, lw=0)


def _scale_by_log(axes: Any) -> None:
    """Unless there is nothing that has a logarithm."""
    if any(0 < value < math.inf for line in axes.lines for value in line.get_ydata()):
        axes.set_yscale("log")


def _skips(runs: Sequence[Record], signal: str) -> list[int]:
    names = {key for run in runs for row in run.rows for key in row.get("signals", {})}
    return sorted(int(name.rsplit("/", 1)[1]) for name in names if name.startswith(f"{signal}/"))


def _svg(figure: Any) -> str:
    stream = io.StringIO()
    figure.savefig(stream, format="svg")
    plt.close(figure)
    text = stream.getvalue()
    return text[text.index("<svg") :]
