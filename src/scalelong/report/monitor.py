"""The page of a `StabilityMonitor`: what it wrote, drawn."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scalelong.report import figures
from scalelong.report.page import Section, write_page
from scalelong.report.runs import Record
from scalelong.training.log import read_metrics


def write_monitor_report(folder: Path, out: Path, about: str = "", if_none: str = "None.") -> None:
    """Write the page for what a monitor has written so far, `about` a model; `if_none`: where no alarm rang."""
    record = Record(read_metrics(folder))
    events = list(_events(record))
    alarms = Section(
        "Alarms",
        "A signal that grew as never before in this training, or a step that was not finite: dashed lines."
        if events
        else if_none,
        rows=events,
    )
    drawn = [section for section in _sections(record) if section.svg]
    title = f"Stability of {folder.resolve().name}"
    write_page(
        title, f"{about} {_lead(record)}".strip(), [alarms, *drawn], out, f'StabilityMonitor(model, "{folder}")'
    )


def _lead(record: Record) -> str:
    steps = [row["step"] for row in record.rows]
    if not record.series("loss")[0]:
        return f"Nothing was observed yet: the training ended {f'at step {steps[-1]}' if steps else 'at once'}."
    pace = _shown(1000 * record.last("seconds_per_step", over=10), ".3g")
    loss, norm = _shown(record.last("loss"), ".4g"), _shown(record.last("gradient norm"), ".3g")
    oscillation = _shown(record.last("oscillation", "gradient norm"), ".2f")
    return (
        f"{steps[-1]:,} steps, {pace} ms each. Loss {loss}, gradient norm {norm}, its oscillation index "
        f"{oscillation} (Σ|x_i - x_(i-1)| / Σ|x_i| over the last 20 looks)."
    )


def _shown(number: float, form: str) -> str:
    """A dash for what was not logged, or cannot be told yet."""
    return "–" if math.isnan(number) else format(number, form)


def _events(record: Record) -> Iterator[dict[str, str]]:
    for row in record.rows:
        if "alarm" in row:
            a: dict[str, Any] = row["alarm"]
            where = f" of {a['layer']}" if a["layer"] else ""
            more = f"; also {', '.join(a['others'][:5])}" if a["others"] else ""
            yield {
                "step": str(a["step"]),
                "what": f"{a['signal']}{where} at {a['factor']:.3g} times its usual value{more}",
            }
        if "nonfinite" in row:
            bad = row["nonfinite"]
            yield {"step": str(row["step"]), "what": f"the {bad['what']} is not finite; {bad['culprit']}"}


def _sections(record: Record) -> list[Section]:
    one = {"": [record]}
    marks = [row["step"] for row in record.rows if "alarm" in row or "nonfinite" in row]

    def curve(heading: str, text: str, *path: str) -> Section:
        return Section(
            heading, text, figures.curves(one, path or (heading.lower(),), heading.lower(), log=True, marks=marks)
        )

    def blocks(kind: str) -> dict[str, tuple[str, str]]:
        names = {key: None for row in record.rows for key in row.get("signals", {}) if key.startswith(f"{kind}/")}
        return {name.partition("/")[2]: ("signals", name) for name in names}

    noise = {key: ("loss by noise", key) for row in record.rows for key in row.get("loss by noise", {})}
    skip_panels = (
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
    return [
        curve("Loss", "Mean since the last look."),
        Section("Loss by noise level", "By timestep, from dark to light.", figures.lines(record, noise, "loss")),
        curve("Gradient norm", "Of all parameters, as the monitor saw them."),
        curve("Weight norm", "Of all parameters."),
        *(Section(h, t, figures.per_skip(one, key, label)) for h, t, key, label in skip_panels),
        Section(
            "Updates",
            "‖Δw‖ / ‖w‖ of each block in one step.",
            figures.lines(record, blocks("update"), "update / weight"),
        ),
        Section(
            "Outputs", "Root mean square of each block's output.", figures.lines(record, blocks("output"), "RMS")
        ),
    ]
