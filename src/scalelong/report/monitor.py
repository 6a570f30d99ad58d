"""The page of one `StabilityMonitor`, or of several side by side: what they wrote, drawn."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from scalelong.report import figures
from scalelong.report.page import Section, write_page
from scalelong.report.runs import Record
from scalelong.training.log import ALARM_LEARNT, BAD_STEPS, LEVEL, METRICS, WATCHED, read_metrics

_Paths = dict[str, tuple[str, str]]  # where numbers are in a log, by what they are called in a figure


@dataclass(frozen=True)
class Watched(Record):
    """What one monitor has written so far."""

    folder: Path
    model: str  # in words
    alarm_learns_steps: int
    alarm_learnt_steps: int  # when it was closed

    @property
    def events(self) -> list[dict[str, str]]:
        """Alarms, and steps that were not finite."""
        return list(_events(self))

    @property
    def step(self) -> int:
        """How far the log goes."""
        return max((row["step"] for row in self.rows), default=0)

    @property
    def bad_steps(self) -> int:
        """How many were not finite; of a loop that was killed, at least those that were told."""
        return max(sum(row.get(BAD_STEPS, 0) for row in self.rows), sum("nonfinite" in row for row in self.rows))

    @property
    def learnt(self) -> int:
        """Of how many steps the alarm knew."""
        return self.alarm_learnt_steps or int(self.last(ALARM_LEARNT) or 0)

    @property
    def alarms(self) -> str:
        """How many rang, or why none did."""
        rang = sum("alarm" in row for row in self.rows)
        return str(rang) if rang or self.learnt > self.alarm_learns_steps else "none could ring yet"


def is_watched(folder: Path) -> bool:
    """Whether a monitor wrote it, and no run of ours."""
    return (folder / WATCHED).is_file()


def read_watched(folder: Path) -> Watched:
    """A monitor's folder."""
    about: dict[str, Any] = json.loads((folder / WATCHED).read_text(encoding="utf-8"))
    rows = read_metrics(folder) if (folder / METRICS).is_file() else []
    return Watched(rows, folder, **about)


def write_monitor_report(folder: Path, out: Path, command: str) -> None:
    """Write the page about one monitor's training."""
    one = read_watched(folder)
    learns = one.alarm_learns_steps
    silent = (
        "None."
        if one.learnt > learns
        else f"None could ring: the alarm learns what is usual in its first {learns} steps, and saw {one.learnt}."
    )
    told = "A signal that grew as never before in this training, or a step that was not finite: dashed lines."
    alarms = Section("Alarms", told if one.events else silent, rows=one.events)
    title = f"Stability of {folder.resolve().name}"
    write_page(title, f"{one.model} {_lead(one)}", [alarms, *_sections({"": one})], out, command)


def write_monitors_report(folders: Sequence[Path], out: Path, command: str) -> list[dict[str, str]]:
    """Write the page about several trainings side by side; returns its table."""
    named = {name: read_watched(folder) for name, folder in zip(_told_apart(folders), folders, strict=True)}
    rows = [_row(name, one) for name, one in named.items()]
    events = [{"training": name, **event} for name, one in named.items() for event in one.events]
    told = "A signal that grew as never before in its training, or a step that was not finite."
    alarms = Section("Alarms", told if events else "None.", rows=events)
    title, lead = f"Stability of {', '.join(named)}", f"{len(named)} trainings, each watched by a monitor."
    write_page(title, lead, [alarms, *_sections(named)], out, command, rows=rows, note=_NOTE)
    return rows


_NOTE = (
    "Loss and gradient norm: mean of the last ten lines. Oscillation: the index Σ|x_i - x_(i-1)| / Σ|x_i| over the "
    "last 20. Each is one training: with another seed it may differ by more than these do."
)


def _row(name: str, one: Watched) -> dict[str, str]:
    return {
        "training": name,
        "step": f"{one.step:,}",
        "loss": _shown(one.last("loss", over=10), ".4g"),
        "gradient norm": _shown(one.last("gradient norm", over=10), ".3g"),
        "its oscillation": _shown(one.last("oscillation", "gradient norm"), ".2f"),
        "alarms": one.alarms,
        "steps not finite": f"{one.bad_steps:,}",
        "model": one.model,
    }


def _told_apart(folders: Sequence[Path]) -> list[str]:
    """Their names, with as many of the folders above as it takes."""
    parts = [folder.resolve().parts for folder in folders]
    longest = max(map(len, parts))
    names = (["/".join(part[-depth:]) for part in parts] for depth in range(1, longest + 1))
    found = next((tried for tried in names if len(set(tried)) == len(tried)), None)
    if found is None:
        raise ValueError(f"a page has each training once, got {', '.join(map(str, folders))}.")
    return found


def _lead(record: Watched) -> str:
    steps = [row["step"] for row in record.rows]
    if not record.series("loss")[0]:
        return f"Nothing was observed yet: the training ended {f'at step {steps[-1]}' if steps else 'at once'}."
    pace = _shown(record.last("seconds_per_step", over=10), ".3g", 1000)
    loss, norm = _shown(record.last("loss"), ".4g"), _shown(record.last("gradient norm"), ".3g")
    oscillation = _shown(record.last("oscillation", "gradient norm"), ".2f")
    bad = f" Steps that were not finite: {record.bad_steps:,}." if record.bad_steps else ""
    return (
        f"{steps[-1]:,} steps, {pace} ms each.{bad} Loss {loss}, gradient norm {norm}, its oscillation index "
        f"{oscillation} (Σ|x_i - x_(i-1)| / Σ|x_i| over the last 20 looks)."
    )


def _shown(number: float | None, form: str, times: float = 1) -> str:
    """A dash for what was not logged, or cannot be told yet."""
    if number is None:
        return "–"
    return format(times * number, form) if math.isfinite(number) else "not finite"


def _events(record: Record) -> Iterator[dict[str, str]]:
    for row in record.rows:
        if "alarm" in row:
            a: dict[str, Any] = row["alarm"]
            where, usual = (f" of {a['layer']}" if a["layer"] else ""), "usual"
            if a["signal"] == LEVEL:
                usual = "lowest"
            more = f"; also {', '.join(a['others'][:5])}" if a["others"] else ""
            yield {
                "step": str(a["step"]),
                "what": f"{a['signal']}{where} at {a['factor']:.3g} times its {usual} value{more}",
            }
        if "nonfinite" in row:
            bad = row["nonfinite"]
            yield {"step": str(row["step"]), "what": f"the {bad['what']} is not finite; {bad['culprit']}"}
        if "output" in row:
            yield {"step": str(row["step"]), "what": row["output"]}


def _sections(named: Mapping[str, Watched]) -> list[Section]:
    """Those that have something to show. Lines of one training are marked where an alarm rang; what has a line per
    block or noise level has a section for each training."""
    groups = {name: [one] for name, one in named.items()}
    alone = next(iter(named.values())) if len(named) == 1 else None
    marks = [int(event["step"]) for event in alone.events] if alone else []

    def curve(heading: str, text: str) -> Section:
        drawn = figures.curves(groups, (heading.lower(),), heading.lower(), log=True, marks=marks)
        return Section(heading, text, drawn)

    def each(
        heading: str, text: str, paths: Callable[[Record], dict[str, tuple[str, str]]], label: str
    ) -> list[Section]:
        return [
            Section(f"{heading}: {name}" if name else heading, text, figures.lines(one, paths(one), label))
            for name, one in named.items()
        ]

    skips = [
        Section(heading, text, figures.per_skip(groups, key, label), panels=alone is None)
        for heading, text, key, label in _AT_SKIPS
    ]
    found = [
        curve("Loss", "Mean since the last look."),
        *each("Loss by noise level", "By timestep, from dark to light.", _noise_levels, "loss"),
        curve("Gradient norm", "Of all parameters, as the monitor saw them."),
        curve("Weight norm", "Of all parameters."),
        *skips,
        *each("Updates", "‖Δw‖ / ‖w‖ of each block in one step.", partial(_blocks, "update"), "update / weight"),
        *each("Outputs", "Root mean square of each block's output.", partial(_blocks, "output"), "RMS"),
    ]
    return [section for section in found if section.svg]


_AT_SKIPS = (
    (
        "Feature norms at the skips",
        "Of each skip as it meets the main path. Dark is outermost.",
        "skip norm",
        "norm",
    ),
    ("Gradient norms at the skips", "Of the block that merges each skip.", "merge gradient", "gradient norm"),
    ("Skip against main path", "The skip's norm over that of the main path.", "skip to main", "skip / main"),
    ("Coefficients", "What each skip is multiplied by; a gate's mean.", "coefficient", "coefficient"),
)


def _noise_levels(record: Record) -> _Paths:
    names = {key for row in record.rows for key in row.get("loss by noise", {})}
    return {key: ("loss by noise", key) for key in sorted(names, key=_lowest)}


def _lowest(level: str) -> float:
    """Of a range, such as `0 to 100`; the times that were no numbers come last."""
    low, to, _ = level.partition(" to ")
    return float(low) if to else math.inf


def _blocks(kind: str, record: Record) -> _Paths:
    names = {key: None for row in record.rows for key in row.get("signals", {}) if key.startswith(f"{kind}/")}
    return {name.partition("/")[2]: ("signals", name) for name in names}
