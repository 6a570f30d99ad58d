"""A run's record: metrics.jsonl, one line per entry, and TensorBoard events where that package is installed."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from scalelong.data.files import write_whole

METRICS = "metrics.jsonl"


class RunLog:
    """Appends to metrics.jsonl. After a resume, lines from beyond the checkpoint are dropped first."""

    def __init__(self, folder: Path, resumed_at: int = 0) -> None:
        self.file = folder / METRICS
        if self.file.is_file():
            kept = [row for row in read_metrics(folder) if row["step"] <= resumed_at]
            write_whole(self.file, "".join(json.dumps(row) + "\n" for row in kept))
        self.stream = self.file.open("a")
        self.board = _tensorboard(folder, resumed_at)

    def write(self, step: int, **values: Any) -> None:
        """One line: the step and its values; groups of values may nest once."""
        self.stream.write(json.dumps({"step": step, **values}) + "\n")
        self.stream.flush()
        for name, value in values.items():
            for key, number in value.items() if isinstance(value, dict) else [("", value)]:
                if self.board is not None and isinstance(number, (int, float)):
                    self.board.add_scalar(f"{name}/{key}" if key else name, number, step)

    def close(self) -> None:
        """Let the files go."""
        self.stream.close()
        if self.board is not None:
            self.board.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a last line that was cut short by a kill is left out."""
    rows = []
    for line in (folder / METRICS).read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def environment() -> dict[str, Any]:
    """Versions, hardware and commit: what a figure from this run has to be quoted with."""
    import diffusers
    import torch

    from scalelong.version import __version__

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "scalelong": __version__,
        "commit": _commit(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "machine": platform.machine(),
        "processor_threads": torch.get_num_threads(),
        "gpu": gpu,
        "command": sys.argv,
    }


def _commit() -> str | None:
    try:
        run = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()


def _tensorboard(folder: Path, resumed_at: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=resumed_at + 1 if resumed_at else None)
