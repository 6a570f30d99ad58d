"""Timing: contenders take turns in one run, and a figure is the median of their rounds."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
MONITOR_RESULTS = Path(__file__).parents[1] / "results" / "monitor"  # not of throughput: rows of another kind


@dataclass
class Contender:
    """Something that does steps on batches of images. `start` builds it and returns the step."""

    name: str
    scaling: str
    batch: int
    flops_per_image: float
    start: Callable[[], Callable[[], None]]


@dataclass(frozen=True)
class Row:
    """One line of a result file."""

    name: str
    scaling: str
    batch: int
    ms_per_step: float
    spread_ms: float
    images_per_s: float
    tflops: float
    peak_tflops: float
    memory_gib: float
    hardware: str
    torch: str


def race(contenders: Sequence[Contender], *, rounds: int, steps: int, warmup: int = 3) -> list[Row]:
    """Time all contenders in turns: `rounds` rounds of `steps` steps each."""
    ready = [_start(contender, warmup) for contender in contenders]
    peak = matmul_ceiling()
    times: list[list[float]] = [[] for _ in contenders]
    for _ in range(rounds):
        for (step, _), found in zip(ready, times, strict=True):
            found.append(time_steps(step, steps))
    rows = []
    for contender, (_, memory), found in zip(contenders, ready, times, strict=True):
        ms = statistics.median(found)
        rate = contender.batch / ms * 1e3
        rows.append(
            Row(
                name=contender.name,
                scaling=contender.scaling,
                batch=contender.batch,
                ms_per_step=round(ms, 4),
                spread_ms=round(max(found) - min(found), 4),
                images_per_s=round(rate, 1),
                tflops=round(rate * contender.flops_per_image / 1e12, 6),
                peak_tflops=round(peak, 3),
                memory_gib=round(memory, 2),
                hardware=hardware(),
                torch=torch.__version__,
            )
        )
    return rows


def _start(contender: Contender, warmup: int) -> tuple[Callable[[], None], float]:
    """Build it and warm it up; memory is the most it held beyond what was there before."""
    before = 0
    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    step = contender.start()
    for _ in range(warmup):
        step()
    if not torch.cuda.is_available():
        return step, 0.0
    torch.cuda.synchronize()
    return step, (torch.cuda.max_memory_allocated() - before) / 2**30


def time_steps(step: Callable[[], None], steps: int) -> float:
    """Milliseconds per step."""
    if torch.cuda.is_available():
        step()  # clocks and caches as in a long run
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps * 1e3


def matmul_ceiling() -> float:
    """TFLOP/s of a large matrix product on random numbers: what arithmetic can reach here at most."""
    on_gpu = torch.cuda.is_available()
    size, dtype, device = (8192, torch.bfloat16, "cuda") if on_gpu else (1024, torch.float32, "cpu")
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = min(time_steps(lambda: a @ b, 10) for _ in range(3))
    return 2 * size**3 / best / 1e9


def hardware(*, cpu: bool = False) -> str:
    """The GPU's name, or the processor's kind and threads."""
    if torch.cuda.is_available() and not cpu:
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def write(rows: Sequence[Row], name: str, folder: Path = RESULTS) -> Path:
    """A dated result file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{date.today().isoformat()}-{name}.json"
    file.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return file


def _spread(row: Row) -> str:
    """What was measured once has none."""
    return f"{row.spread_ms:.2f}" if row.spread_ms else "–"


def table(rows: Sequence[Row]) -> str:
    """The rows for a terminal."""
    return "\n".join([heading(), *(cells(row) for row in rows)])


def heading(*first: str) -> str:
    """Of a table of rows, with columns of its own before them."""
    names = [
        *first, "what", "scaling", "batch", "ms/step (spread)", "images/s", "TFLOP/s", "of ceiling", "GiB"
    ]  # fmt: skip
    return f"| {' | '.join(names)} |\n{'|---' * len(names)}|"


def cells(r: Row, *first: str) -> str:
    """A row of it."""
    numbers = [f"{r.ms_per_step:.2f} ({_spread(r)})", f"{r.images_per_s:,.0f}", f"{r.tflops:.3g}"]
    shares = [f"{r.tflops / r.peak_tflops:.0%}", f"{r.memory_gib:.1f}"]
    return f"| {' | '.join([*first, r.name, r.scaling, str(r.batch), *numbers, *shares])} |"


def read(file: Path) -> list[Row]:
    """A result file's rows."""
    rows: list[dict[str, Any]] = json.loads(file.read_text())
    return [Row(**row) for row in rows]
