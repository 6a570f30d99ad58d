"""The loop: update, average, log, sample, checkpoint; resume from where the newest whole checkpoint is."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scalelong.config import RunConfig
from scalelong.training import checkpoint
from scalelong.training.guard import NonFiniteError
from scalelong.training.log import NoLog, RunLog
from scalelong.training.signals import Oscillation, Signals
from scalelong.training.step import Stepper

CHECKPOINTS = "checkpoints"
_GLANCE_EVERY = 10  # steps
_ONE_PRESS_S = 0.5  # signals this near to each other are one request: a terminal and a launcher may both send it


@dataclass(frozen=True)
class Progress:
    """What a progress bar shows before the first update, where there is one to come, and after each."""

    step: int
    steps: int
    loss: float | None


@dataclass(frozen=True)
class Event:
    """Something made every `interval` steps and at the end: samples and the like."""

    interval: int
    make: Callable[[int], None]  # called in every process: one that holds a part of the weights must lend it
    lacking: Callable[[int], bool]  # whether a run that ended at this step still lacks it


class Fit:
    """A run in progress. Its whole state is the step number and tensors: all randomness derives from the step."""

    def __init__(self, config: RunConfig, stepper: Stepper, folder: Path) -> None:
        self.config = config.train
        self.stepper = stepper
        self.model = stepper.model
        self.folder = folder
        self.world = stepper.world
        self.emas = stepper.emas
        self.oscillation = Oscillation()
        self.recent: list[Tensor] = []  # losses since the last log line
        # To look makes the host wait for a GPU, and then the GPU for the host: only where something is due. A CPU
        # has nothing to wait for; several processes wait in any case, when they ask whether one was told to stop.
        on_cpu = stepper.loader.device.type == "cpu"
        self._look_every = 1 if on_cpu else _GLANCE_EVERY if self.world.size > 1 else None
        self.step = 0
        self.interruption = _Interruption(speaks=self.world.is_first)

    def resume(self) -> int:
        """Load the newest whole checkpoint, if there is one; returns the step it was made at."""
        found = checkpoint.load_latest(self.folder / CHECKPOINTS)
        if found is None:
            return 0
        found.load_into("model", self.model.state_dict())
        for ema in self.stepper.averages:
            found.load_into(ema.name, ema.weights)
        _load_optimiser(self.stepper, found)
        if found.state["scaler"]:  # it is empty but in fp16, which a branch may begin
            self.stepper.scaler.load_state_dict(found.state["scaler"])
        self.oscillation.load(found.state["oscillation"])
        self.recent = [torch.tensor(loss, device=self.stepper.loader.device) for loss in found.state["recent"]]
        self.step = found.step
        return self.step

    def save(self) -> None:
        """Write a checkpoint of the present step."""
        tensors: dict[str, Any] = {"model": self.model.state_dict(), "optimiser": _optimiser_tensors(self.stepper)}
        tensors |= {ema.name: ema.weights for ema in self.stepper.averages}
        state = {
            "step": self.step,
            "scaler": self.stepper.scaler.state_dict(),
            "oscillation": self.oscillation.state(),
            "recent": [loss.item() for loss in self.recent],
        }
        self.write(CHECKPOINTS, tensors, state, self.config.keep_checkpoints)

    def write(self, where: str, tensors: Mapping[str, Mapping[str, Tensor]], state: Any, keep: int) -> None:
        """Write tensors of the run, whole or in parts, as a checkpoint in a folder of it."""
        checkpoint.save(self.folder / where, tensors, state, keep, world=self.world, sharded=self.stepper.sharded)

    def run(
        self,
        log: RunLog | NoLog,
        *,
        show: Callable[[Progress], None] = lambda progress: None,
        events: Sequence[Event] = (),
        until: float = math.inf,
    ) -> bool:
        """Train to the last step. True when done, False when Ctrl-C, SIGTERM or its time ended it after a save.

        Events come after the checkpoint of their step, if there is one, and where one fails it is written; what a
        run that ended there still lacks is made up for first. `until` is a reading of time.monotonic(), looked at
        between steps: one is done in any case, and an event that has begun is finished.
        """
        self.model.train()
        made = True
        with self.interruption:
            if self.step < self.config.steps:
                show(Progress(self.step, self.config.steps, None))
            if self.step:
                made = self._make([event for event in events if self._due(event.interval)], only_lacking=True)
            since, started = self.step, time.perf_counter()
            while self.step < self.config.steps:
                signals = self._update()
                happens = [event for event in events if self._due(event.interval)]
                log_now, save_now = self._due(self.config.log_every), self._due(self.config.checkpoint_every)
                due = bool(log_now or save_now or happens or signals)
                looked = due or (self._look_every is not None and self.step % self._look_every == 0)
                glanced = self.step % _GLANCE_EVERY == 0
                if looked:
                    self._check(self.stepper.check)
                elif glanced:
                    self._check(self.stepper.glance)
                if log_now:
                    self._log(log, signals, (time.perf_counter() - started) / (self.step - since))
                    since, started = self.step, time.perf_counter()
                elif signals:
                    log.write(self.step, signals=signals)
                    self.oscillation.update(signals)
                show(Progress(self.step, self.config.steps, self.stepper.loss.item() if looked else None))
                paused = time.perf_counter()
                # All stop at the same step, so they ask each other, but only at steps where all look or glance.
                stopping = (looked or glanced) and self._stop_asked(until)
                if stopping and not looked:  # a bad step since the last glance is not saved as one that was done
                    self._check(self.stepper.check)
                if save_now or stopping:
                    self.save()
                done = self.step == self.config.steps
                if stopping and not done:  # who asked to stop does not wait for samples: the next start makes them
                    return False
                try:
                    made = self._make(happens)
                except Exception:  # a full disk, or memory: it costs no training
                    if not save_now and self.world.size == 1:
                        self.save()
                    raise
                if happens and not done and self._stop_asked(until):
                    self.save()
                    return False
                started += time.perf_counter() - paused  # a step's time is the step's alone
        return made

    def _stop_asked(self, until: float) -> bool:
        """Of any process: all stop at the same step."""
        return self.world.any(self.interruption.asked or time.monotonic() > until, self.stepper.loader.device)

    def _make(self, events: Sequence[Event], only_lacking: bool = False) -> bool:
        """Whether all were made, and none given up.

        All make them together. The first alone looks what is lacking: it changes that as the others look.
        """
        if not events:  # the processes ask each other at the end
            return True
        given_up = False
        for event in events:
            wanted = self.world.is_first and (not only_lacking or event.lacking(self.step))
            if self.world.any(wanted, self.stepper.loader.device):
                try:
                    event.make(self.step)
                except _Stop:
                    given_up = True
                self.model.train()
            self.world.wait()
        return not self.world.any(given_up, self.stepper.loader.device)

    def points(self, things: Iterable[Any]) -> Iterator[Any]:
        """The same things, for an event to walk over: at each it is given up where a stop was asked for.

        Not where the processes lend each other parts of the weights: the others would wait for the next ones.
        """
        for thing in things:
            if self.interruption.asked and not self.stepper.sharded:
                raise _Stop
            yield thing

    def _due(self, interval: int) -> bool:
        return self.step % interval == 0 or self.step == self.config.steps

    def _update(self) -> Signals:
        observed = (self.step + 1) % self.config.monitor_every == 0
        try:
            self.stepper.update(self.step, observed=observed)
        except NonFiniteError as error:
            self._go_back_to(error.step)
            raise
        self.step += 1
        self.recent.append(self.stepper.loss.clone())
        return self.stepper.signals() if observed else {}

    def _check(self, look: Callable[[], None]) -> None:
        """Look whether all steps so far were finite. If not, save what was good, and raise."""
        try:
            look()
        except NonFiniteError as error:
            self._go_back_to(error.step)
            raise

    def _go_back_to(self, step: int) -> None:
        """The steps from `step` on changed nothing: count them out, and save the good weights."""
        del self.recent[len(self.recent) - (self.step - step) :]
        self.step = step
        self.save()

    def _log(self, log: RunLog | NoLog, signals: Signals, seconds: float) -> None:
        main = {"loss": torch.stack(self.recent).mean().item(), "gradient norm": self.stepper.norm.item()}
        self.recent = []
        log.write(
            self.step,
            images=self.step * self.config.batch_size,
            **main,
            seconds_per_step=seconds,
            signals=signals,
            oscillation=self.oscillation.update(main | signals),
        )


class _Stop(Exception):  # noqa: N818 - a request, no error
    """Ends an event that need not be finished."""


class _Interruption:
    """Turns Ctrl-C and SIGTERM into a request that is looked at between steps; a second Ctrl-C acts at once."""

    def __init__(self, *, speaks: bool) -> None:
        self.speaks = speaks
        self.asked = False
        self.asked_at = 0.0
        self.before: dict[int, Any] = {}

    def __enter__(self) -> _Interruption:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self.before[number] = signal.signal(number, self._ask)
            except ValueError:  # not the main thread: whoever runs this handles signals
                return self
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: Any) -> None:
        if not self.asked:
            self.asked, self.asked_at = True, time.monotonic()
            if self.speaks:
                with contextlib.suppress(RuntimeError):  # the signal came in the middle of another line
                    print("stopping after a checkpoint; Ctrl-C again stops at once, without one.", file=sys.stderr)
        elif number == signal.SIGINT and time.monotonic() - self.asked_at > _ONE_PRESS_S:
            raise KeyboardInterrupt


def _optimiser_tensors(stepper: Stepper) -> dict[str, Tensor]:
    """Adam's moments under the names of their parameters."""
    state = stepper.optimiser.state
    named = stepper.model.named_parameters()
    return {f"{name}/{key}": value for name, p in named for key, value in state[p].items()}


def _load_optimiser(stepper: Stepper, found: checkpoint.Checkpoint) -> None:
    """Make Adam's moments as it would, and fill them. One that has seen no gradient has none yet."""
    saved = found.keys("optimiser")
    for name, p in stepper.model.named_parameters():
        if f"{name}/step" in saved:
            # Moments lie in memory as their parameter does (channels last, say): the fused kernel pairs them so.
            moments = {key: torch.zeros_like(p, requires_grad=False) for key in ("exp_avg", "exp_avg_sq")}
            stepper.optimiser.state[p] = {"step": torch.zeros((), device=p.device), **moments}
    found.load_into("optimiser", _optimiser_tensors(stepper))
