"""A run's record: metrics.jsonl, one line per entry, and the trackers that get the same numbers."""

from __future__ import annotations

import json
import math
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from scalelong.data.files import write_whole
from scalelong.training.trackers import trackers

METRICS = "metrics.jsonl"
# What a StabilityMonitor adds: beside its metrics what it watches, and in their lines of how many steps its alarm
# knows and how many since the line before were not finite.
WATCHED, ALARM_LEARNT, BAD_STEPS = "monitor.json", "alarm learnt", "steps not finite"
LEVEL = "level of the loss"  # the signal that rings where the loss has risen slowly
# JSON has no such numbers: a line holds their names, in quotes, and `read_metrics` gives the numbers back.
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class RunLog:
    """Appends to metrics.jsonl. After a resume, lines from beyond the checkpoint are dropped first.

    `logger` is tensorboard, wandb or none; `config` is what a tracker shows beside the curves.
    """

    def __init__(
        self,
        folder: Path,
        resumed_at: int = 0,
        logger: str = "tensorboard",
        config: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.file = folder / METRICS
        if self.file.is_file():
            kept = [row for row in read_metrics(folder) if row["step"] <= resumed_at]
            write_whole(self.file, "".join(_line(row) for row in kept))
        self.trackers = trackers(logger, folder, resumed_at, config)
        self.stream = self.file.open("a")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self.close(failed=kind is not None)

    def write(self, step: int, **values: Any) -> None:
        """One line: the step and its values; groups of values may nest once."""
        self.stream.write(_line({"step": step, **values}))
        self.stream.flush()
        numbers = {name: value for name, value in _flat(values) if isinstance(value, (int, float))}
        for tracker in self.trackers:
            tracker.log(step, numbers)

    def close(self, failed: bool = False) -> None:
        """Let the files go."""
        self.stream.close()
        for tracker in self.trackers:
            tracker.close(failed)


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(for_json(row), allow_nan=False) + "\n"


def for_json(value: Any) -> Any:
    """For JSON, which has no NaN: with the names of numbers that are not finite in their place."""
    if isinstance(value, Mapping):
        return {key: for_json(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [for_json(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    return value


def from_json(value: Any) -> Any:
    """What `for_json` was given."""
    if isinstance(value, dict):
        return {key: from_json(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [from_json(inner) for inner in value]
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Groups as `group/name`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}/{key}", inner) for key, inner in value.items())
        else:
            yield name, value


class NoLog:
    """What the processes besides the first write to."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def write(self, step: int, **values: Any) -> None:
        """Nothing."""


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a last line that was cut short by a kill is left out."""
    rows = []
    for line in (folder / METRICS).read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            break
        rows.append(from_json(row) if any(f'{name}"' in line for name in _NOT_FINITE) else row)
    return rows


def divergence(folder: Path) -> dict[str, Any] | None:
    """What ended the training in a folder, if a step that was not finite did: its number, what it was and whose."""
    return divergence_in(read_metrics(folder)) if (folder / METRICS).is_file() else None


def divergence_in(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The same, of a log that is read."""
    return rows[-1].get("nonfinite") if rows else None


def environment() -> dict[str, Any]:
    """Versions, hardware and commit: what a figure from this run has to be quoted with."""
    import diffusers
    import torch

    import scalelong
    from scalelong.version import __version__

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "scalelong": __version__,
        "commit": commit_of(Path(scalelong.__file__).parent),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "machine": platform.machine(),
        "processor_threads": torch.get_num_threads(),
        "gpu": gpu,
        "command": [_program(sys.argv[0]), *sys.argv[1:]],
    }


def _program(name: str) -> str:
    """What was called, wherever it lies on this machine."""
    path = Path(name)
    if path.name == "__main__.py":
        return path.parent.name
    return path.name if path.is_absolute() else name


def commit_of(package: Path) -> str | None:
    """The commit of the checkout that holds a package, "-dirty" where it is not as it was then; else None."""
    try:
        # An installed copy may lie in somebody else's repository.
        _git(package, "ls-files", "--error-unmatch", "__init__.py")
        changed = _git(package, "status", "--porcelain", "--", ".")
        return _git(package, "rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
