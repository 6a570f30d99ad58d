"""Run folders as tables of numbers, grouped by scaling, with their spread over seeds, and what they show."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from scalelong.config import RunConfig, from_dict, to_dict
from scalelong.training.log import METRICS, read_metrics

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

    def last(self, *path: str, over: int = 1) -> float:
        """The mean of the last `over` values; NaN where nothing was logged."""
        values = self.series(*path)[1][-over:]
        return sum(values) / len(values) if values else math.nan


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


def read_run(folder: Path, *, may_be_empty: bool = False) -> Run:
    """Read a run folder; what is missing is named. `may_be_empty`: a run that has logged nothing is one too."""
    try:
        config = from_dict(RunConfig, json.loads((folder / "config.json").read_text(encoding="utf-8")))
        environment = json.loads((folder / "environment.json").read_text())
        rows = read_metrics(folder)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(
            f"{folder} is no run folder: it has no {Path(error.filename).name}. "
            f"scalelong train --out {folder} makes one."
        ) from error
    except ValueError as error:
        raise ValueError(f"{folder}: config.json or environment.json is not as train wrote it ({error})") from error
    if not all(isinstance(row, dict) and "step" in row for row in rows):
        raise ValueError(f"{folder / METRICS} is not as train wrote it: every line has a step.")
    if not rows and not may_be_empty:
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


def spread(values: list[float]) -> tuple[float, float]:
    """Mean, and half the range over seeds: with two or three seeds a deviation would say more than is known."""
    finite = [v for v in values if not math.isnan(v)]
    if not finite:
        return math.nan, math.nan
    return sum(finite) / len(finite), (max(finite) - min(finite)) / 2


def quality_key(runs: list[Run]) -> tuple[str, str]:
    """(name in the log, name to show) of the runs' Fréchet distance."""
    on_inception = any(run.series("quality", "fid")[0] for run in runs)
    return ("fid", "FID") if on_inception else ("pixel_fid", "pixel FID")


def has_quality(runs: list[Run]) -> bool:
    """Whether the samples of any run were judged."""
    return any(run.series("quality", quality_key(runs)[0])[0] for run in runs)


def _quality(groups: dict[str, list[Run]], scaling: str) -> dict[str, str]:
    every = [run for runs in groups.values() for run in runs]
    if not has_quality(every):
        return {}
    key, name = quality_key(every)
    return {name: _show([run.last("quality", key) for run in groups[scaling]])}


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


def _step_time(groups: dict[str, list[Run]], scaling: str) -> dict[str, str]:
    if ran_together([run for runs in groups.values() for run in runs]):
        return {}
    return {"ms per step": _show([1000 * run.last("seconds_per_step", over=10) for run in groups[scaling]])}


def _held_out(groups: dict[str, list[Run]], scaling: str) -> dict[str, str]:
    """The loss on held-out images, and how much of it is the scaling: its difference to none, seed by seed."""
    if not any(run.series("held out", "loss")[0] for runs in groups.values() for run in runs):
        return {}
    return {
        "held-out loss": _show([run.last("held out", "loss") for run in groups[scaling]]),
        "less that of none": _show(differences_to_none(groups, scaling, held_out_loss)),
    }


def differences_to_none(
    groups: dict[str, list[Run]], scaling: str, value_of: Callable[[Run], float]
) -> list[float]:
    """Seed by seed; none for no scaling itself."""
    runs = groups[scaling]
    none = "none" + scaling.removeprefix(runs[0].config.model.scaling)  # at the same placement
    if scaling == none:
        return []
    plain, found = _by_seed(groups.get(none, groups.get("none", [])), value_of), _by_seed(runs, value_of)
    return [found[seed] - plain[seed] for seed in found if seed in plain]


def held_out_loss(run: Run) -> float:
    """The last one."""
    return run.last("held out", "loss")


def training_loss(run: Run) -> float:
    """The mean of the last ten log lines."""
    return run.last("loss", over=10)


def _by_seed(runs: list[Run], value_of: Callable[[Run], float]) -> dict[int, float]:
    """Empty where a seed has several runs, which differ in something else."""
    seeds = [run.config.train.seed for run in runs]
    if len(set(seeds)) < len(seeds):
        return {}
    return {seed: value_of(run) for seed, run in zip(seeds, runs, strict=True)}


def summary_rows(groups: dict[str, list[Run]]) -> list[dict[str, str]]:
    """One row per scaling: what the terminal and the page show."""
    rows = []
    for scaling, runs in groups.items():
        rows.append(
            {
                "scaling": scaling,
                "seeds": str(len(runs)),
                "loss": _show(list(map(training_loss, runs))),
                **_held_out(groups, scaling),
                **_quality(groups, scaling),
                "gradient norm": _show([r.last("gradient norm", over=10) for r in runs]),
                "its oscillation": _show([r.last("oscillation", "gradient norm") for r in runs]),
                **_step_time(groups, scaling),
            }
        )
    return rows


def _show(values: list[float]) -> str:
    """One value has no spread."""
    mean, half = spread(values)
    if math.isnan(mean):
        return "–"
    return f"{mean:.4g} ± {half:.2g}" if len(values) > 1 else f"{mean:.4g}"


def finding(groups: dict[str, list[Run]]) -> str:
    """What a comparison shows: which scalings differ from none beyond the spread over seeds.

    About the held-out loss where every run has it, or else the loss; empty where nothing stands beside none.
    """
    runs = [run for group in groups.values() for run in group]
    if apart := set_apart(runs):
        return f"Nothing is concluded: the runs differ in more than scaling and seed, in {'; '.join(apart)}."
    held_out = not any(math.isnan(held_out_loss(run)) for run in runs)
    value_of, loss = (held_out_loss, "held-out loss") if held_out else (training_loss, "loss")
    found = {scaling: differences_to_none(groups, scaling, value_of) for scaling in groups}
    return conclude({scaling: values for scaling, values in found.items() if values}, loss)


def conclude(differences: dict[str, list[float]], loss: str) -> str:
    """The sentence, from each scaling's differences to none, seed by seed.

    >>> conclude({"ls": [-0.1, 0.1]}, "loss")
    'No scaling differs from none in loss beyond the spread over 2 seeds.'
    """
    if not differences:
        return ""
    seeds = min(map(len, differences.values()))
    if seeds == 1:
        return f"Whether a scaling differs from none in {loss} cannot be told from one seed, which has no spread."
    clear = {scaling: values for scaling, values in differences.items() if beyond_spread(values)}
    if not clear:
        return f"No scaling differs from none in {loss} beyond the spread over {seeds} seeds."
    same = [scaling for scaling in differences if scaling not in clear]
    rest = f"; {_listed(same)} {'does' if len(same) == 1 else 'do'} not differ" if same else ""
    changes = _listed([f"{scaling} {_change(values, loss)}" for scaling, values in clear.items()])
    several = ", to one at least of several more often" if len(differences) > 1 else ""
    share = f"{BY_CHANCE[seeds]:.0%}" if seeds in BY_CHANCE else ""
    chance = f" Chance alone does as much to {share} of scalings{several}." if share else ""
    return f"Against none, {changes}, beyond the spread over {seeds} seeds{rest}.{chance}"


# How often `beyond_spread` holds for differences that are noise, normal and independent, by the number of seeds.
BY_CHANCE = {2: 0.295, 3: 0.081, 4: 0.021}


def beyond_spread(differences: Sequence[float]) -> bool:
    """The mean difference is larger than the range of the differences over seeds."""
    return abs(spread(list(differences))[0]) > max(differences) - min(differences)


def _change(differences: list[float], loss: str) -> str:
    mean, half = spread(differences)
    return f"{'lowers' if mean < 0 else 'raises'} the {loss} by {abs(mean):.2g} ± {half:.1g}"


def _listed(parts: list[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
