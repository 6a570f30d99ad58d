"""What the monitor costs a plain loop: `python -m benchmarks.monitor digits cifar10-unet`.

One loop (forward, backward, AdamW) with and without a `StabilityMonitor` at its default interval. Turns of the two
follow each other step by step, on the same weights, so that whatever else the machine does hits both alike. A
monitored step is timed with the looks at the interval and the writing of their lines in it. On a CPU the time is
that of the processor, which a shared machine disturbs less than the clock on the wall.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer

from benchmarks.measure import RESULTS, Row, hardware, table, write
from scalelong import StabilityMonitor
from scalelong.backbones.build import build

INTERVAL = 50


def main(
    presets: Annotated[list[str], typer.Argument(help="Networks by name.")],
    batch: Annotated[int, typer.Option(help="Images per step.")] = 64,
    rounds: Annotated[int, typer.Option(help="Intervals of steps for each.")] = 6,
    interval: Annotated[int, typer.Option(help="The monitor's interval.")] = INTERVAL,
    out: Annotated[Path, typer.Option(help="Where the result file goes.")] = RESULTS,
) -> None:
    """Time steps with and without the monitor in turns, and print the overhead."""
    rows = []
    for preset in presets:
        times = measure(preset, batch, rounds * interval, interval)
        share = overhead(times, interval)
        rows += [_row(f"{preset}, {name}", batch, found) for name, found in times.items()]
        typer.echo(f"{preset}: {share:+.2%} with the monitor, interval {interval}")
    typer.echo(table(rows))
    typer.echo(f"written: {write(rows, f'monitor-{presets[0]}', out)}")


def measure(preset: str, batch: int, steps: int, interval: int) -> dict[str, list[float]]:
    """Milliseconds of each step: plain, monitored, and of those the observed ones."""
    model = build(preset).train()
    size, channels = model.config.sample_size, model.config.in_channels
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    images = torch.randn(batch, channels, size, size, device=device)
    timesteps = torch.randint(0, 1000, (batch,), device=device)
    times: dict[str, list[float]] = {"plain": [], "monitored": [], "observed": []}

    def step(monitor: StabilityMonitor | None) -> float:
        started = _now(device)
        loss = F.mse_loss(model(images, timesteps, return_dict=False)[0], images)
        loss.backward()
        if monitor is not None:
            monitor.step(loss)
        optimiser.step()
        optimiser.zero_grad()
        return (_now(device) - started) * 1e3

    with tempfile.TemporaryDirectory() as folder:
        monitor = StabilityMonitor(model, folder, interval=interval, on_alarm=lambda alarm: None, report=False)
        for number in range(1, steps + 1):
            _attach(monitor, False)
            plain = step(None)
            _attach(monitor, True)
            kind = "observed" if number % interval == 0 else "monitored"
            watched = step(monitor)
            if number > 3:
                times[kind].append(watched)
            if number > 3 and kind == "monitored":  # before a look, the skips' hooks wait for it in both
                times["plain"].append(plain)
        monitor.close()
    return times


def overhead(times: dict[str, list[float]], interval: int) -> float:
    """Share of a plain step: the median of what a step takes more than its neighbour, and what a look does."""
    plain = statistics.median(times["plain"])
    between = statistics.median(b - a for a, b in zip(times["plain"], times["monitored"], strict=True))
    look = statistics.median(times["observed"]) - plain
    return (between * (interval - 1) + look) / interval / plain


def _attach(monitor: StabilityMonitor, on: bool) -> None:
    """The plain step runs without a single hook of the monitor."""
    for hook in (*monitor.pulse._hooks, *monitor._call._hooks):
        hooks = hook.hooks_dict_ref()
        if on:
            hooks[hook.id] = _KEPT[hook.id]
        else:
            _KEPT[hook.id] = hooks.pop(hook.id)


_KEPT: dict[int, object] = {}


def _now(device: str) -> float:
    if device != "cuda":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def _row(name: str, batch: int, times: list[float]) -> Row:
    ms = statistics.median(times)
    quarters = statistics.quantiles(times, n=4) if len(times) > 1 else [ms, ms, ms]
    return Row(
        name=name,
        scaling="none",
        batch=batch,
        ms_per_step=round(ms, 4),
        spread_ms=round(quarters[2] - quarters[0], 4),
        images_per_s=round(batch / ms * 1e3, 1),
        tflops=0.0,
        peak_tflops=1.0,
        memory_gib=0.0,
        hardware=hardware(),
        torch=torch.__version__,
    )


if __name__ == "__main__":
    typer.run(main)
