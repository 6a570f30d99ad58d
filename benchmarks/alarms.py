"""Does the monitor warn in time, and only then? `python -m benchmarks.alarms` runs `benchmarks.faults` and tells.

A row per run: when the alarm rang and for what, when the loss passed ten times its median, and the steps between.
"""

from __future__ import annotations

import json
import math
import tempfile
import warnings
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track

from benchmarks import fault_sets, faults
from benchmarks.measure import MONITOR_RESULTS, hardware
from scalelong import StabilityMonitor

SETS = {
    "tuned": fault_sets.TUNED,
    "slow": fault_sets.SLOW,
    "held out": fault_sets.HELD_OUT,
    "healthy": fault_sets.HEALTHY,
    "healthy, held out": fault_sets.HEALTHY_HELD_OUT,
    "healthy, new": fault_sets.HEALTHY_NEW,
    "healthy, last": fault_sets.HEALTHY_LAST,
    "scan": fault_sets.SCAN,
    "edge": fault_sets.EDGE,
    "recipe": fault_sets.RECIPE,
    "healthy, recipe": fault_sets.HEALTHY_RECIPE,
    "healthy, recipe, new": fault_sets.HEALTHY_RECIPE_NEW,
    "healthy, recipe, last": fault_sets.HEALTHY_RECIPE_LAST,
    "healthy, recipe, final": fault_sets.HEALTHY_RECIPE_FINAL,
    "healthy, recipe, after": fault_sets.HEALTHY_RECIPE_AFTER,
}


def main(
    sets: Annotated[str, typer.Option(help=f"Which, by semicolons: {'; '.join(SETS)}.")] = ";".join(SETS),
    out: Annotated[Path, typer.Option(help="Where the result file goes.")] = MONITOR_RESULTS,
) -> None:
    """Run the faults and the healthy runs under the monitor, print a table and write a dated result file."""
    chosen = [(name, run) for name in sets.split(";") for run in SETS[name.strip()]]
    rows = []
    for name, run in track(chosen, "runs"):
        rows.append({"set": name, **watch(run)})
        typer.echo(table(rows[-1:]).splitlines()[-1])
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"{date.today().isoformat()}-alarms.json"
    about = {"hardware": hardware(cpu=True), "torch": torch.__version__}
    file.write_text(json.dumps([row | about for row in rows], indent=1, ensure_ascii=False) + "\n")
    typer.echo(f"written: {file}")


def watch(run: faults.Run) -> dict[str, Any]:
    """One run under the monitor at its defaults. It ends at a non-finite loss."""
    training = faults.Training(run)
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        monitor = StabilityMonitor(training.model, folder, on_nonfinite="warn", logger="none", report=False)
        with monitor:
            for _, loss, each, timesteps in training.steps():
                losses.append(loss.item())
                monitor.step(loss, timesteps=timesteps, losses=each)
                if not math.isfinite(losses[-1]):
                    break
    alarm = monitor.alarms[0] if monitor.alarms else None
    passed = faults.first_passing(losses, run.onset)
    return {
        "run": run.name,
        "steps": len(losses),
        "alarm": alarm.step if alarm else None,
        "because": f"{alarm.signal} of {alarm.layer}".removesuffix(" of ") if alarm else None,
        "passes ten times": passed,
        "lead": passed - alarm.step if alarm and passed else None,
        "alarms": len(monitor.alarms),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """For a terminal or a page."""
    columns = ("set", "run", "alarm", "because", "passes ten times", "lead")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join("–" if row[c] is None else str(row[c]) for c in columns) + " |" for row in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
