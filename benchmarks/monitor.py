"""What the monitor costs a plain loop: `python -m benchmarks.monitor digits cifar10-unet`.

One loop (forward, backward, AdamW) with and without a `StabilityMonitor` at its default interval, measured in
three ways:

- pairs: a plain and a monitored step follow each other on the same weights, now the one first and now the other.
  The median of their differences holds all of the cost, and the noise of two whole steps: hence its standard error.
- inside: the time within the monitor's own functions, in the loop, where they find the caches cold. Its median at
  each place of two intervals, averaged over them, with the look and the written line. It is hardly noisy, leaves
  out the few microseconds that torch takes to call a hook, and counts what the optimiser then finds in the caches.
- loop: an interval of plain steps and one of monitored steps follow each other, now the one first and now the
  other, and only the ends of each are timed. On a GPU this alone is what a training loses: the two above wait for
  the device in every step, so that the host's work never overlaps with the device's. A median, as for pairs; and
  beside it the time within the monitor's functions in these intervals, which is what a loop loses where the host
  is the slower of the two, as it is in most eager ones.

On a CPU whole steps are timed by the processor's clock, which a shared machine disturbs less than that on the wall.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import nn

from benchmarks.measure import MONITOR_RESULTS, hardware
from scalelong import StabilityMonitor
from scalelong.backbones.build import build

INTERVAL = 50
WARMUP = 3


def main(
    presets: Annotated[list[str], typer.Argument(help="Networks by name.")],
    batch: Annotated[int, typer.Option(help="Images per step.")] = 64,
    rounds: Annotated[int, typer.Option(help="Intervals of steps for each, two at least.")] = 10,
    interval: Annotated[int, typer.Option(help="The monitor's interval.")] = INTERVAL,
    bf16: Annotated[bool, typer.Option("--bf16", help="Under autocast, as most train on a GPU.")] = False,
    out: Annotated[Path, typer.Option(help="Where the result file goes.")] = MONITOR_RESULTS,
) -> None:
    """Time steps with and without the monitor in turns, print the overhead and write a dated result file."""
    about = {"batch": batch, "bf16": bf16, "interval": interval, "hardware": hardware(), "torch": torch.__version__}
    rows: list[dict[str, Any]] = []
    for preset in presets:
        rows.append({"preset": preset, **measure(preset, batch, rounds * interval, interval, bf16=bf16), **about})
        typer.echo(sentence(rows[-1]))
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"{date.today().isoformat()}-monitor-{'-'.join(presets)}.json"
    file.write_text(json.dumps(rows, indent=1) + "\n")
    typer.echo(f"written: {file}")


Step = Callable[[Callable[[Any], Any]], None]


def measure(preset: str, batch: int, steps: int, interval: int, *, bf16: bool = False) -> dict[str, Any]:
    """Milliseconds of a plain step, and the monitor's in three ways."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build(preset).to(device).train()
    step = training_step(model, batch, device, bf16)
    warmup = min(WARMUP, interval)
    with tempfile.TemporaryDirectory() as folder:
        monitor = StabilityMonitor(
            model,
            folder,
            interval=interval,
            on_alarm=lambda alarm: None,
            report=False,
            first_step=interval
            - warmup,  # the last of the warm-up is a look: a first one loads kernels and writers
        )
        watch = Stopwatch(monitor)
        _run(step, watch, warmup, watched=True)
        plain, more, inside = alternating_steps(step, watch, steps, device)
        blocks = max(2, steps // interval)
        block, block_more, block_inside = alternating_blocks(step, watch, blocks, interval, device)
        watch.attach(True)
        monitor.close()
    pairs, error = median_with_error(more)
    loop, loop_error = median_with_error(block_more)
    return {
        "pairs": len(more),
        "plain_ms": round(statistics.median(plain), 3),
        "pairs_ms": round(pairs, 4),
        "pairs_standard_error_ms": round(error, 4),
        "inside_ms": round(over_the_interval(inside, interval), 4),
        "blocks": len(block_more),
        "loop_plain_ms": round(statistics.median(block), 3),
        "loop_ms": round(loop, 4),
        "loop_standard_error_ms": round(loop_error, 4),
        "loop_inside_ms": round(statistics.median(block_inside), 4),
    }


def alternating_steps(step: Step, watch: Stopwatch, steps: int, device: str) -> tuple[list[float], ...]:
    """Milliseconds of plain steps, what the monitored ones beside them take more, and those inside the monitor."""

    def between(loss: Any) -> None:
        if device == "cuda":  # or a look at the numbers of this step waits for it, and that counts as the monitor's
            torch.cuda.synchronize()
        if watch.attached:
            watch.step(loss)

    plain, more, inside = [], [], []
    for number in range(1, steps + 1):
        times = {}
        watch.spent = 0.0
        for watched in (number % 2 == 0, number % 2 == 1):
            watch.attach(watched)
            started = _now(device)
            step(between)
            times[watched] = (_now(device) - started) * 1e3
        plain.append(times[False])
        more.append(times[True] - times[False])
        inside.append(watch.spent * 1e3)
    return plain, more, inside


def alternating_blocks(
    step: Step, watch: Stopwatch, pairs: int, interval: int, device: str
) -> tuple[list[float], ...]:
    """Milliseconds a step of plain blocks, what the monitored blocks beside them take more, and those inside the
    monitor.

    A block is an interval, so that each monitored one has its look; nothing but that waits for the device.
    """
    plain, more, inside = [], [], []
    for number in range(pairs):
        times = {}
        watch.spent = 0.0
        for watched in (number % 2 == 1, number % 2 == 0):
            started = _now(device)
            _run(step, watch, interval, watched=watched)
            times[watched] = (_now(device) - started) * 1e3 / interval
        plain.append(times[False])
        more.append(times[True] - times[False])
        inside.append(watch.spent * 1e3 / interval)
    return plain, more, inside


def _run(step: Step, watch: Stopwatch, steps: int, *, watched: bool) -> None:
    watch.attach(watched)
    for _ in range(steps):
        step(watch.step if watched else lambda loss: None)


def sentence(row: dict[str, Any]) -> str:
    """A measurement, as shares of a plain step."""
    names = ("pairs_ms", "pairs_standard_error_ms", "inside_ms")
    pairs, error, inside = (row[name] / row["plain_ms"] for name in names)
    names = ("loop_ms", "loop_standard_error_ms", "loop_inside_ms")
    loop, loop_error, loop_inside = (row[name] / row["loop_plain_ms"] for name in names)
    return (
        f"{row['preset']}, batch {row['batch']}: {row['plain_ms']:.1f} ms a plain step; the monitor takes "
        f"{pairs:.2%} ± {error:.2%} of it by {row['pairs']} pairs, {inside:.2%} inside; in a "
        f"loop {loop:.2%} ± {loop_error:.2%} of {row['loop_plain_ms']:.1f} ms by {row['blocks']} pairs of blocks, "
        f"{loop_inside:.2%} inside"
    )


def training_step(model: nn.Module, batch: int, device: str, bf16: bool) -> Step:
    """A step of a plain loop, with a place between the backward pass and the update."""
    config: Any = model.config
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    images = torch.randn(batch, config.in_channels, config.sample_size, config.sample_size, device=device)
    timesteps = torch.randint(0, 1000, (batch,), device=device)

    def step(between: Callable[[Any], Any]) -> None:
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            prediction = model(images, timesteps, return_dict=False)[0]
        loss = F.mse_loss(prediction.float(), images)
        loss.backward()
        between(loss)
        optimiser.step()
        optimiser.zero_grad()

    return step


class Stopwatch:
    """Adds up the seconds within a monitor's hooks and its `step`, and takes the hooks off for a plain step."""

    def __init__(self, monitor: StabilityMonitor) -> None:
        self.spent = 0.0
        self.attached = True
        self.step = self._timed(monitor.step)
        hooks = [(hook.hooks_dict_ref(), hook.id) for hook in (*monitor.pulse._hooks, *monitor._call._hooks)]
        self.hooks = [(place, key, self._timed(place[key])) for place, key in hooks]

    def attach(self, on: bool) -> None:
        """The skips' hooks, put on for a look, are not among them: they stay for the plain step before it."""
        self.attached = on
        for place, key, hook in self.hooks:
            if on:
                place[key] = hook
            else:
                place.pop(key, None)

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            started = time.perf_counter()
            result = function(*args)
            self.spent += time.perf_counter() - started
            return result

        return timed


def median_with_error(values: list[float]) -> tuple[float, float]:
    """The median and its standard error, from the median distance to it, as for normal values."""
    middle = statistics.median(values)
    spread = 1.4826 * statistics.median(abs(v - middle) for v in values)
    return middle, 1.2533 * spread / len(values) ** 0.5


def over_the_interval(values: list[float], interval: int) -> float:
    """The mean over the places of two intervals of their medians: turns are of two and four steps."""
    period = 2 * interval
    return statistics.mean(statistics.median(values[place::period]) for place in range(period))


def _now(device: str) -> float:
    if device != "cuda":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    typer.run(main)
