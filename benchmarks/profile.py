"""Where a training step's time goes: `python -m benchmarks.profile cifar10-uvit-s --batch 128`.

torch's profiler over a few steps: its kernels (on a CPU: operators) grouped by what they do, on a GPU the pauses
between them. The last lines say how much of a step, timed without the profiler, they account for, and what the
arithmetic alone would take at the ceiling of a matrix product measured in the same run. With `--sampling` a step is
one evaluation of the network as samples are drawn with it.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.measure import hardware, matmul_ceiling, time_steps
from benchmarks.throughput import flops, random_store, recipe, step_of
from scalelong import experiment
from scalelong.config import RunConfig, with_overrides

PROFILES = Path(__file__).parents[1] / "results" / "profile"
OTHER = "other small kernels"
PAUSES = "pauses between kernels"
_MANY = 1_000_000  # evaluations: worth compiling for
# The first that matches a kernel's name is its group. Compiled kernels carry the names of what they fuse.
GROUPS = {
    "attention": r"attention|flash|fmha|attn",
    "GELU and its bias": r"gelu",
    "convolutions": r"conv|cudnn|implicit|wgrad|dgrad|fprop",
    "matrix products": r"gemm|nvjet|cutlass|cublas|splitk|addmm|::b?mm$|matmul",
    "AdamW, averages, gradient norm": r"adam|multi_tensor|foreach|triton_for_|lerp|linalg_vector_norm",
    "norms, with the sums beside them": r"norm",
    "copies and casts": r"memcpy|memset|copy|_to_copy|::cat$|fill",
}


@dataclass(frozen=True)
class Kernel:
    """All calls of one kernel in one step."""

    name: str
    group: str
    calls: float
    ms: float


def main(
    preset: Annotated[str, typer.Argument(help="A recipe of scalelong train.")] = "cifar10-uvit-s",
    batch: Annotated[int | None, typer.Option(help="Images per step; the recipe's by default.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C")] = None,
    sampling: Annotated[bool, typer.Option("--sampling", help="An evaluation in sampling, not a step.")] = False,
    steps: Annotated[int, typer.Option(help="Steps under the profiler.")] = 3,
    rounds: Annotated[int, typer.Option(help="Turns of ten steps without it.")] = 5,
    out: Annotated[Path, typer.Option(help="Where the result file goes.")] = PROFILES,
) -> None:
    """Profile training steps, print a table by kind of kernel and write a dated result file."""
    sizes = [f"train.batch_size={batch}"] if batch else []
    config = with_overrides(recipe(preset), [*(settings or []), *sizes])
    with tempfile.TemporaryDirectory() as folder:
        store = random_store(Path(folder) / "store", config)
        fitted = experiment.fitted_to(config, store)
        step = evaluation_of(fitted) if sampling else step_of(fitted, store)
        for _ in range(3):  # compiles and captures
            step()
        step_ms = statistics.median(time_steps(step, 10) for _ in range(rounds))
        kernels, pauses_ms = profiled(step, steps)
    passes = 1 if sampling else 3  # forward, and twice its work backward
    kernels_ms = sum(kernel.ms for kernel in kernels)
    result = {
        "preset": preset,
        "what": "evaluation" if sampling else "step",
        "batch": fitted.train.batch_size,
        "step_ms": round(step_ms, 4),
        "accounted": round(kernels_ms / step_ms, 4),
        "pauses_ms": round(pauses_ms, 4),
        "accounted_with_pauses": round((kernels_ms + pauses_ms) / step_ms, 4),
        "arithmetic_ms": round(flops(fitted) / 3 * passes * fitted.train.batch_size / matmul_ceiling() / 1e9, 4),
        "hardware": hardware(),
        "torch": torch.__version__,
        "kernels": [asdict(kernel) for kernel in kernels],
    }
    typer.echo(table(kernels, pauses_ms, step_ms))
    typer.echo(
        f"kernels: {result['accounted']:.1%} of {step_ms:.2f} ms, with the pauses between them "
        f"{result['accounted_with_pauses']:.1%}; the arithmetic alone at the ceiling of a matrix product: "
        f"{result['arithmetic_ms']:.2f} ms"
    )
    out.mkdir(parents=True, exist_ok=True)
    what = "-sampling" if sampling else ""
    file = out / f"{date.today().isoformat()}-{preset}{what}-batch-{fitted.train.batch_size}.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    typer.echo(f"written: {file}")


def evaluation_of(config: RunConfig) -> Callable[[], None]:
    """One call of the network as samples are drawn with it, on a batch of noise."""
    model = experiment.build_model(config, experiment.default_device()).eval()
    network = experiment.for_sampling(model, _MANY)
    device = next(model.parameters()).device
    changes = config.model.changes
    size = changes["sample_size"]
    x = torch.randn(config.train.batch_size, changes["in_channels"], size, size, device=device)
    labels = torch.zeros(len(x), dtype=torch.int64, device=device)
    given = {"class_labels": labels} if config.data.condition == "class" else {}

    @torch.no_grad()
    def evaluate() -> None:
        network(x, torch.full((), 500, device=device), **given)

    return evaluate


def profiled(step: Callable[[], None], steps: int) -> tuple[list[Kernel], float]:
    """What ran on the device during a step, the longest first, and the milliseconds in which nothing did; on a CPU,
    the operators' own time."""
    on_gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        for _ in range(steps):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    kernels = []
    for entry in profiler.key_averages():
        # An annotation spans kernels that are there themselves.
        if entry.is_user_annotation or (entry.device_type == DeviceType.CUDA) != on_gpu:
            continue
        us = entry.self_device_time_total if on_gpu else entry.self_cpu_time_total
        kernels.append(Kernel(entry.key, group_of(entry.key), entry.count / steps, us / 1e3 / steps))
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or []
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    return sorted(kernels, key=lambda kernel: -kernel.ms), pauses(spans) / 1e3 / steps


def pauses(spans: Iterable[tuple[float, float]]) -> float:
    """How long none of some (start, end) lasted, between the first and the last."""
    total, until = 0.0, math.inf
    for start, end in sorted(spans):
        total += max(0.0, start - until)
        until = end if until == math.inf else max(until, end)
    return total


def group_of(name: str) -> str:
    """What a kernel does, by its name."""
    found = (group for group, pattern in GROUPS.items() if re.search(pattern, name, re.IGNORECASE))
    return next(found, OTHER)


def table(kernels: list[Kernel], pauses_ms: float, step_ms: float) -> str:
    """A line per group, with the kernel that takes most of it."""
    lines = ["| part | ms/step | share | calls | most of it |", "|---|---|---|---|---|"]
    sums = {group: sum(k.ms for k in kernels if k.group == group) for group in (*GROUPS, OTHER)}
    for group, ms in sorted(sums.items(), key=lambda item: -item[1]):
        if ms:
            first, *_ = members = [kernel for kernel in kernels if kernel.group == group]
            calls = sum(kernel.calls for kernel in members)
            largest = f"`{first.name[:50]}` {first.ms:.2f}"
            lines.append(f"| {group} | {ms:.2f} | {ms / step_ms:.1%} | {calls:.0f} | {largest} |")
    if pauses_ms:
        lines.append(f"| {PAUSES} | {pauses_ms:.2f} | {pauses_ms / step_ms:.1%} | | |")
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
