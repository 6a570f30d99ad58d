"""The figures of a report, as SVG text. Each takes runs grouped by scaling; the range over seeds is a band."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from scalelong.report.runs import Record

Groups = Mapping[str, Sequence[Record]]
_STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
    "figure.constrained_layout.use": True,
}
_REM_PER_INCH = 46 / 6  # one scale for all figures of a page, or their letters would differ in size
_FEW = 8  # points; a line through fewer is marked at each, and one point alone is to be seen
_NARROW = 3.0  # values within this factor of each other are as clear without a logarithm


def curves(
    groups: Groups,
    path: Sequence[str],
    ylabel: str,
    *,
    log: bool = False,
    marks: Sequence[int] = (),
    lost: Groups = MappingProxyType({}),
) -> str:
    """One line per scaling, and a dashed one at each of the steps `marks`; empty where no run has logged it.

    Runs that were `lost` are thin lines of their scaling's colour that end in a cross.
    """
    if not any(run.series(*path)[0] for runs in (*groups.values(), *lost.values()) for run in runs):
        return ""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure((6, 3.2))
        for colour, (scaling, runs) in enumerate(groups.items()):
            _band(axes, runs, path, f"C{colour}", scaling)
        for scaling, runs in lost.items():
            own = f"C{list(groups).index(scaling)}" if scaling in groups else "0.5"
            for run in runs:
                _line_to_its_end(axes, run, path, own, "" if scaling in groups else scaling)
        for step in marks:
            axes.axvline(step, color="crimson", ls="--", lw=0.8)
        axes.set(xlabel="step", ylabel=ylabel)
        axes.locator_params(axis="x", integer=True, min_n_ticks=1)
        if log:
            _scale_by_log([axes])
        if any(groups) or lost:
            axes.legend(frameon=False)
        return _svg(figure)


def lines(record: Record, paths: Mapping[str, Sequence[str]], ylabel: str) -> str:
    """Several numbers of one training, by label, from dark to light; empty where none was logged."""
    found = {label: record.series(*path) for label, path in paths.items()}
    found = {label: series for label, series in found.items() if series[0]}
    if not found:
        return ""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure((6, 3.2))
        for i, (label, (steps, values)) in enumerate(found.items()):
            colour = matplotlib.colormaps["viridis"](0.9 * i / max(1, len(found) - 1))
            axes.plot(steps, values, _style(steps), ms=3, color=colour, label=label, lw=1)
        axes.set(xlabel="step", ylabel=ylabel)
        axes.locator_params(axis="x", integer=True, min_n_ticks=1)
        _scale_by_log([axes])
        figure.legend(frameon=False, fontsize=7, loc="outside right center")
        return _svg(figure)


def per_skip(groups: Groups, signal: str, ylabel: str, *, log: bool = True) -> str:
    """One small plot per scaling, one line per skip, from the outermost (dark) to the innermost (light)."""
    if not any(_skips(runs, signal) for runs in groups.values()):
        return ""
    with matplotlib.rc_context(_STYLE):
        size = (max(6, 2.5 * len(groups) + 1), 2.8)
        figure, panels = _figure(size, 1, len(groups), sharey=True, squeeze=False)
        for axes, (scaling, runs) in zip(panels[0], groups.items(), strict=True):
            indices = _skips(runs, signal)
            for i in indices:
                colour = matplotlib.colormaps["viridis"](0.9 * i / max(1, len(indices) - 1))
                _band(axes, runs, ("signals", f"{signal}/{i}"), colour, f"skip {i}")
            axes.set(title=scaling, xlabel="step")
            axes.locator_params(axis="x", integer=True, min_n_ticks=1)
        if log:
            _scale_by_log(panels[0])
        panels[0][0].set_ylabel(ylabel)
        handles, labels = panels[0][-1].get_legend_handles_labels()
        figure.legend(handles, labels, frameon=False, fontsize=8, loc="outside right center")
        return _svg(figure)


def coefficients(groups: Groups) -> str:
    """The coefficient of each skip at the end, mean and range over seeds; empty where no run has any."""
    if not any(_skips(runs, "coefficient") for runs in groups.values()):
        return ""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure((6, 3))
        for colour, (scaling, runs) in enumerate(groups.items()):
            indices = _skips(runs, "coefficient")
            if indices:
                table = [[_last(run, f"coefficient/{i}") for i in indices] for run in runs]
                _mean_and_range(axes, indices, table, "o-", f"C{colour}", scaling)
        axes.set(xlabel="skip (0 = outermost)", ylabel="coefficient")
        axes.set_ylim(bottom=0, top=1.05 * axes.dataLim.ymax)
        axes.locator_params(axis="x", integer=True, min_n_ticks=1)
        axes.legend(frameon=False)
        return _svg(figure)


def changes(table: Mapping[str, Sequence[Sequence[float]]], ylabel: str) -> str:
    """Shares of a change by stretch of the process, a line per scaling; empty where none has any."""
    if not any(table.values()):
        return ""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure((6, 3.2))
        axes.axhline(0, color="0.6", lw=0.8)
        for colour, (scaling, rows) in enumerate(table.items()):
            if rows:
                middles = [(i + 0.5) / len(rows[0]) for i in range(len(rows[0]))]
                shares = [[100 * value for value in row] for row in rows]
                _mean_and_range(axes, middles, shares, "o-", f"C{colour}", scaling)
        axes.set(xlabel="noise level (0 = clean image, 1 = pure noise)", ylabel=ylabel, xlim=(0, 1))
        axes.legend(frameon=False)
        return _svg(figure)


def drawn(panels: Sequence[Callable[[Any], None]]) -> str:
    """A figure of panels, two in a row, each drawn by a function that gets its axes; a legend in each."""
    columns, rows = min(2, len(panels)), -(-len(panels) // 2)
    with matplotlib.rc_context(_STYLE):
        size = (6 if len(panels) == 1 else 8, 3.2 * rows)
        figure, axes = _figure(size, rows, columns, squeeze=False)
        for draw, place in zip(panels, axes.flat, strict=False):
            draw(place)
            place.set_title(textwrap.fill(place.get_title(), 48), fontsize=9)
            place.legend(frameon=False, fontsize=8)
        for place in axes.flat[len(panels) :]:
            place.set_axis_off()
        return _svg(figure)


def _figure(size: tuple[float, float], *grid: int, **how: Any) -> tuple[Any, Any]:
    """A figure and its axes, without pyplot: the backend of whoever asks for a report stays as it is."""
    figure = Figure(figsize=size)
    return figure, figure.subplots(*grid, **how)


def _line_to_its_end(axes: Any, run: Record, path: Sequence[str], colour: str, label: str) -> None:
    steps, values = run.series(*path)
    if steps:
        axes.plot(steps, values, color=colour, lw=0.7, ls="--", label=label or None)
        axes.plot(steps[-1:], values[-1:], marker="x", color=colour)


def _band(axes: Any, runs: Sequence[Record], path: Sequence[str], colour: Any, label: str) -> None:
    found = [run.series(*path) for run in runs]
    found = [(steps, values) for steps, values in found if steps]
    if not found:
        return
    common = sorted(set.intersection(*(set(steps) for steps, _ in found)))
    table = [[dict(zip(steps, values, strict=True))[s] for s in common] for steps, values in found]
    _mean_and_range(axes, common, table, _style(common), colour, label)


def _mean_and_range(
    axes: Any, places: Sequence[float], table: Sequence[Sequence[float]], style: str, colour: Any, label: str
) -> None:
    """A line through the means of the table's columns, and a band from their least to their greatest."""
    columns = list(zip(*table, strict=True))
    axes.plot(places, [sum(c) / len(c) for c in columns], style, ms=3, color=colour, label=label, lw=1.2)
    axes.fill_between(places, list(map(min, columns)), list(map(max, columns)), color=colour, alpha=0.2, lw=0)


def _style(points: Sequence[Any]) -> str:
    return "o-" if len(points) < _FEW else "-"


class _PlainNumbers(LogFormatter):
    """33 and not 3.3 × 10¹; which ticks have a label is decided as ever."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:g}" if super().__call__(x, pos) else ""


def _scale_by_log(panels: Sequence[Any]) -> None:
    """Panels that share an axis; unless there is nothing that has a logarithm, or nothing that needs one."""
    values = [value for axes in panels for line in axes.lines for value in line.get_ydata()]
    positive = [value for value in values if 0 < value < math.inf]
    if not positive or max(positive) <= _NARROW * min(positive):
        return
    for axes in panels:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(_PlainNumbers())
        axes.yaxis.set_minor_formatter(_PlainNumbers())


def _last(run: Record, signal: str) -> float:
    value = run.last("signals", signal)
    return math.nan if value is None else value


def _skips(runs: Sequence[Record], signal: str) -> list[int]:
    names = {key for run in runs for row in run.rows for key in row.get("signals", {})}
    return sorted(int(name.rsplit("/", 1)[1]) for name in names if name.startswith(f"{signal}/"))


def _svg(figure: Any) -> str:
    stream = io.StringIO()
    figure.savefig(stream, format="svg")
    text = stream.getvalue()
    width = f'<svg style="width: {_REM_PER_INCH * figure.get_figwidth():.1f}rem"'
    return width + text[text.index("<svg") + len("<svg") :]
