"""Run folders, read: what was logged, what they have in common and what sets them apart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from scalelong.config import RunConfig, from_dict, to_dict
from scalelong.training.log import METRICS, divergence_in, read_metrics

_COMPARED = ("model.scaling", "model.placement", "train.seed")


@dataclass(frozen=True)
class Record:
    """The log of a training, whoever's it was."""

    rows: list[dict[str, Any]]

    def series(self, *path: str) -> tuple[list[int], list[float]]:
        """(steps, values) of a logged number: `series("loss")`, `series("signals", "skip norm/0")`."""
        steps, values = [], []
        for row in self.rows:
            value: Any = row
            for key in path:
                value = value.get(key) if isinstance(value, dict) else None
            if isinstance(value, (int, float)):
                steps.append(row["step"])
                values.append(float(value))
        return steps, values

    def last(self, *path: str, over: int = 1) -> float | None:
        """The mean of the last `over` values, NaN where one of them is; None where nothing was logged."""
        values = self.series(*path)[1][-over:]
        return sum(values) / len(values) if values else None


@dataclass(frozen=True)
class Run(Record):
    """One run folder, read."""

    folder: Path
    config: RunConfig
    environment: dict[str, Any]

    @property
    def scaling(self) -> str:
        """Its scaling, with the placement where that is not the paper's."""
        placement = self.config.model.placement
        return self.config.model.scaling + ("" if placement == "concat" else f" at {placement}")

    @property
    def step(self) -> int:
        """How far its log goes."""
        return max(row["step"] for row in self.rows)

    @property
    def divergence(self) -> str:
        """Why it ended on a step that was not finite; empty where it did not."""
        bad = divergence_in(self.rows)
        return bad["error"] if bad else ""

    @property
    def name(self) -> str:
        """Among others of a comparison."""
        return f"{self.scaling} with seed {self.config.train.seed}"

    def noted(self, file: str) -> dict[str, Any]:
        """One of the notes in its folder, data.json or began.json; empty where it has none."""
        path = self.folder / file
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        return found

    @property
    def grid(self) -> Path | None:
        """The newest picture of samples."""
        pictures = sorted((self.folder / "samples").glob("*.png"))
        return pictures[-1] if pictures else None


def read_run(folder: Path) -> Run:
    """Read a run folder; what is missing is named."""
    try:
        config = from_dict(RunConfig, json.loads((folder / "config.json").read_text(encoding="utf-8")))
        environment = json.loads((folder / "environment.json").read_text())
        rows = read_metrics(folder)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(
            f"{folder} is no run folder: it has no {Path(error.filename).name}. "
            f"scalelong train RECIPE --out {folder} makes one."
        ) from error
    except ValueError as error:
        raise ValueError(f"{folder}: config.json or environment.json is not as train wrote it ({error})") from error
    if not all(isinstance(row, dict) and "step" in row for row in rows):
        raise ValueError(f"{folder / METRICS} is not as train wrote it: every line has a step.")
    if not rows:
        raise ValueError(f"{folder} has logged nothing yet; let it train a little first.")
    return Run(rows, folder, config, environment)


def by_scaling(runs: list[Run]) -> dict[str, list[Run]]:
    """Runs of the same scaling together, in the order in which scalings first come."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.scaling, []).append(run)
    return groups


def set_apart(runs: Sequence[Run]) -> list[str]:
    """What differs between runs besides scaling and seed: `train.lr (0.001, 0.003)`, images, first weights."""
    flat = [dict(_flattened(to_dict(run.config))) | {"first weights": _first_weights(run)} for run in runs]
    data = [run.noted("data.json") for run in runs]
    if all(data):  # or it was not recorded, in older runs
        for settings, about in zip(flat, data, strict=True):
            settings["the images"] = f"{about['source']} {_in_short(about['sha256'])}"
    names = dict.fromkeys(name for settings in flat for name in settings if name not in _COMPARED)
    values = {
        name: list(dict.fromkeys(str(settings.get(name, "the preset's")) for settings in flat)) for name in names
    }
    return [f"{name} ({', '.join(found)})" for name, found in values.items() if len(found) > 1]


def _first_weights(run: Run) -> str:
    began = run.noted("began.json")
    return f"{began['how']} {began['source']} {began['step'] or ''}".strip() if began else "drawn"


def _in_short(checksums: Mapping[str, str]) -> str:
    return hashlib.sha256(" ".join(sorted(checksums.values())).encode()).hexdigest()[:8]


def _flattened(settings: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{where}{name}.")
        else:
            yield f"{where}{name}", value


def quality_key(runs: list[Run]) -> tuple[str, str]:
    """(name in the log, name to show) of the runs' Fréchet distance."""
    on_inception = any(run.series("quality", "fid")[0] for run in runs)
    return ("fid", "FID") if on_inception else ("pixel_fid", "pixel FID")


def has_quality(runs: list[Run]) -> bool:
    """Whether the samples of any run were judged."""
    return any(run.series("quality", quality_key(runs)[0])[0] for run in runs)


def ran_together(runs: list[Run]) -> bool:
    """Whether any two trained at the same time, by the times of their files: each then slowed the other.

    Copied folders may have lost these times, and then seem to; a time per step that is left out misleads nobody.
    """
    spans = sorted(span for run in runs if (span := _span(run.folder)) is not None)
    return any(begins < ended for (_, ended), (begins, _) in pairwise(spans))


def _span(folder: Path) -> tuple[float, float] | None:
    """When a run wrote its first file that is still there, and the last line of its log."""
    if not (folder / METRICS).is_file():
        return None
    written = [file.stat().st_mtime for file in folder.rglob("*") if file.is_file()]
    return min(written), (folder / METRICS).stat().st_mtime
