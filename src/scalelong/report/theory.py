"""The theory as sections of a page, from what `theory --json` prints: figure, checks, verdict."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scalelong.report.figures import drawn
from scalelong.report.page import Section
from scalelong.training.log import from_json

Statement = dict[str, Any]
_HOLDS = {True: "yes", False: "no", None: "–"}


def theory_sections(statements: Sequence[Statement]) -> list[Section]:
    """One section per statement."""
    return [
        Section(
            statement["name"],
            statement["claim"],
            _FIGURES[statement["name"]](statement) if statement["name"] in _FIGURES else "",
            panels=len({row.get("where") for row in statement["rows"]}) > 1,
            verdict=f"Verdict: {statement['verdict']}.",
            rows=[
                {"where": check["where"], "holds": _HOLDS[check["holds"]], "found": check["found"]}
                for check in statement["checks"]
            ],
            note=f"Rule: {statement['rule']} {statement['remark']}",
        )
        for statement in statements
    ]


def read_theory(file: Path) -> list[Statement]:
    """What `scalelong theory --json` printed."""
    try:
        statements: list[Statement] = from_json(json.loads(file.read_text(encoding="utf-8")))["statements"]
        for statement in statements:
            _ = [statement[key] for key in ("name", "claim", "rule", "checks", "verdict", "rows", "remark")]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not what scalelong theory --json prints ({error}).") from error
    return statements


def _lemma(statement: Statement) -> str:
    def draw(axes: Any) -> None:
        rows = statement["rows"]
        names = list(dict.fromkeys(row["process"] for row in rows))
        for colour, data in enumerate(dict.fromkeys(row["data"] for row in rows)):
            mine = [row for row in rows if row["data"] == data]
            places = [names.index(row["process"]) for row in mine]
            axes.plot(places, [row["measured"] for row in mine], "o", color=f"C{colour}", label=f"measured, {data}")
        closed = {row["process"]: row["closed_form"] for row in rows}
        axes.plot(range(len(names)), [closed[n] for n in names], "k_", ms=26, label="closed form, 1 - ⅔ E ᾱ")
        axes.set_xticks(range(len(names)), names)
        axes.set(ylabel="E‖x_t‖² / m", xlim=(-0.6, len(names) - 0.4))

    return drawn([draw])


def _features(statement: Statement) -> str:
    widest = max(row["width"] for row in statement["rows"])
    rows = [row for row in statement["rows"] if row["width"] == widest]
    return _scatter(rows, "‖x_t‖² Σκ² / m", "‖h_i‖² / m", _line_of(statement, str(widest)))


def _gradients(statement: Statement) -> str:
    return _scatter(statement["rows"], "ℓ ‖x_t‖² Σκ² / m", "‖∇ℓ‖²", _line_of(statement))


def _line_of(statement: Statement, *path: str) -> Callable[[str, float], float]:
    def at(where: str, x: float) -> float:
        found = statement["numbers"][where]
        for key in path:
            found = found[key]
        return float(found.get("c1", found.get("c")) * x + found.get("c2", found.get("c3")))

    return at


def _scatter(rows: list[Any], xlabel: str, ylabel: str, line: Callable[[str, float], float]) -> str:
    """A panel per net: the mean of each setting, its 5 … 95 % band where there is one, and the fitted line."""

    def panel(where: str) -> Callable[[Any], None]:
        mine = [row for row in rows if row["where"] == where]

        def draw(axes: Any) -> None:
            for colour, kind in enumerate(("none", "uniform", "1/sqrt2", "cs", "cs-reversed")):
                points = [row for row in mine if row["scaling"].split(":")[0] == kind]
                x, y = [p["x"] for p in points], [p["y"] for p in points]
                axes.plot(x, y, ".", ms=4, color=f"C{colour}", label=kind)
                if points and "band" in points[0]:
                    axes.vlines(
                        x, *zip(*(p["band"] for p in points), strict=True), color=f"C{colour}", alpha=0.15, lw=1
                    )
            ends = [min(row["x"] for row in mine), max(row["x"] for row in mine)]
            axes.plot(ends, [line(where, x) for x in ends], "k-", lw=1, label="fitted line")
            axes.set(title=where, xlabel=xlabel, ylabel=ylabel)

        return draw

    return drawn([panel(where) for where in dict.fromkeys(row["where"] for row in rows)])


def _gain(statement: Statement) -> str:
    def panel(where: str, found: dict[str, Any]) -> Callable[[Any], None]:
        def draw(axes: Any) -> None:
            keys = [key for key in next(iter(found.values())) if not key.startswith("m0")]
            for colour, key in enumerate(keys):
                values = [numbers[key] for numbers in found.values()]
                axes.plot(range(len(values)), values, "o-", color=f"C{colour}", label=key.replace("_", " "))
            axes.set_xticks(range(len(found)), list(found), rotation=20)
            axes.set(title=where, ylabel="gain", yscale="log")

        return draw

    return drawn([panel(where, found) for where, found in statement["numbers"].items()])


def _direction(statement: Statement) -> str:
    def draw(axes: Any) -> None:
        pairs = [row["pair"] for row in statement["rows"]]
        ratio = [row["cs-reversed"] / row["cs"] for row in statement["rows"]]
        axes.plot(pairs, ratio, "o-", label="reversed / CS")
        axes.axhline(1, color="k", lw=0.8)
        derived = statement["numbers"]["derived"]
        axes.axvline(derived, color="C1", lw=1, ls=":", label=f"equal in expectation, {derived:.3f}")
        axes.set(xlabel="gain of a pair of blocks (root mean square)", ylabel="gain of the net, reversed / CS")

    return drawn([draw])


def ratio_figure(found: dict[str, Any]) -> str:
    """The distribution of ‖ε‖²/‖x_t‖² by its quantiles, and the κ of each value."""

    def draw(axes: Any) -> None:
        shares = [float(share) for share in found["quantiles"]]
        axes.plot(list(found["quantiles"].values()), shares, "o-", ms=3, label="share below")
        for colour, (name, value) in enumerate(
            (
                (f"ratio of means, {found['ratio_of_means']:.2f}", found["ratio_of_means"]),
                (f"mean of the ratio, {found['mean']:.2f}", found["mean"]),
                (f"97 % quantile, {found['high']['sum']:.2f}", found["high"]["sum"]),
                ("paper's 5", 5.0),
            ),
            1,
        ):
            axes.axvline(value, color=f"C{colour}", lw=1, label=name)
        axes.set(xlabel="‖ε‖² / ‖x_t‖²", ylabel="share of images below", ylim=(0, 1))

    return drawn([draw])


_FIGURES: dict[str, Callable[[Statement], str]] = {
    "Lemma 3.2": _lemma,
    "Thm 3.1": _features,
    "Thm 3.3": _gradients,
    "Thm 3.4": _gain,
    "Direction of CS": _direction,
    "κ from data": lambda statement: ratio_figure(statement["numbers"]),
}
