"""`StabilityMonitor`, for anybody's loop: signals, an alarm before divergence, and who made the first NaN."""

from __future__ import annotations

import math
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from scalelong.skips.apply import is_compiled, is_sharded, unwrapped
from scalelong.skips.sites import UnsupportedModelError
from scalelong.stability.alarm import Alarm, Detector
from scalelong.stability.inbox import Inbox
from scalelong.stability.levels import NoiseLevels
from scalelong.stability.pulse import ANY, UNSEEN, Pulse, Values
from scalelong.stability.replay import BAD_INPUT, StepCalls
from scalelong.stability.watched import open_log, write_about
from scalelong.training.guard import NonFiniteError
from scalelong.training.log import ALARM_LEARNT, BAD_STEPS, RunLog
from scalelong.training.signals import Observer, Oscillation, Signals
from scalelong.training.trackers import check_logger

REPORT = "report.html"
_FIRST_STEPS, _ALERT_STEPS = 50, 200  # where a GPU's outputs are seen in every step
_ADVICE = (
    "The monitor has changed nothing. A lower learning rate, a longer warm-up, gradient clipping or bf16 in place "
    "of fp16 may help."
)
_ADVICE_ON_DATA = "The monitor has changed nothing. Look at what this batch is read from, and what is done to it."
_TOO_LONG_WITHOUT = 20  # gradients, in steps
_END_OF_NORMS = "1e19, where float32 ends"  # a norm's squares are summed
_INSIDE_A_GRAPH = (
    "A part of the model was compiled, or is checkpointed with use_reentrant=True, and its hooks are not called; "
    "compile it by torch.compile(model) and give the monitor the result, or checkpoint with use_reentrant=False."
)
_NOT_CALLED = (
    "The model was not seen to train since the last monitor.step: give the monitor what the loop calls "
    "(torch.compile's result), and call monitor.step once per update."
)


class StabilityWarning(UserWarning):
    """An alarm, skips that are not seen, or a non-finite step that the loop was told to go on after."""


class AlarmError(RuntimeError):
    """An alarm in a loop that was to end by it: `on_alarm="raise"`."""

    def __init__(self, alarm: Alarm) -> None:
        self.alarm = alarm
        super().__init__(str(alarm))


class StabilityMonitor:
    """Watches a training loop: `with StabilityMonitor(model, folder) as monitor`, and in it

        loss.backward()
        monitor.step(loss)   # gradients are there, the update is still to come
        optimizer.step()

    Give it the model that the loop calls, plain, compiled or wrapped by DDP. Every step it looks at the loss and at
    each block's gradient, update and output, some of them in turns, as a look is time, and without waiting for a
    GPU; every `interval` steps it writes these and the signals of every skip to metrics.jsonl and
    TensorBoard in `folder`. `close`, or the end of the `with` block, draws report.html, unless `report=False`.

    `on_alarm` is "warn", "raise" or a function that takes the `Alarm`. `on_nonfinite`, for a loss or gradient that
    is not finite, is "raise", "warn" or a function that takes the `NonFiniteError`; only "raise" ends the loop.
    `scaler` is the GradScaler of an fp16 loop: gradients that overflow are its business, while the loss is finite.
    `wait=True` makes a GPU's step wait for the monitor, so that a non-finite one is raised before its update and
    traced to the module; otherwise it is found a step or two later, and named by block if it is one of the steps
    whose outputs are looked at: the first 50, 200 after an alarm, else every fourth. A CPU never has to wait.
    `first_step` is the number of steps already done, for a loop that resumes.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: str | Path = "monitor",
        *,
        interval: int = 50,
        on_alarm: str | Callable[[Alarm], None] = "warn",
        on_nonfinite: str | Callable[[NonFiniteError], None] = "raise",
        logger: str = "tensorboard",
        report: bool = True,
        scaler: Any = None,
        wait: bool = False,
        first_step: int = 0,
        timestep_range: tuple[float, float] = (0, 1000),
    ) -> None:
        _check(model, interval, first_step, on_alarm=on_alarm, on_nonfinite=on_nonfinite)
        check_logger(logger)
        self.levels = NoiseLevels(*timestep_range)
        self.folder = Path(folder)
        self.model = unwrapped(model)
        self._called = model
        self.interval = interval
        self.on_alarm = on_alarm
        self.on_nonfinite = on_nonfinite
        self.scaler = scaler
        self.wait = wait
        self.report = report
        self.steps = self._first_step = first_step
        self.alarms: list[Alarm] = []
        self.skipped_steps = 0  # left out by the GradScaler
        self._bad_steps = 0  # not finite, in a loop that went on; since the last line
        self._told_outputs: set[str] = set()
        self._steps_without = 0  # any gradient, up to now
        with ExitStack() as undone_if_refused:
            self._call = StepCalls(model)
            undone_if_refused.callback(self._call.close)
            self.pulse = Pulse(self.model, self._call)
            undone_if_refused.callback(self.pulse.close)
            self.observer = _observer(self.model, self._call)
            self.log = open_log(self.folder, logger, first_step, self.model)
            undone_if_refused.pop_all()
        self.detector = Detector(self.pulse.names)
        self.oscillation = Oscillation()
        self._inbox = Inbox()
        self._watching = ExitStack()
        weakref.finalize(self, self._watching.close)  # of a monitor that nobody closes: eager runs are for it alone
        self._observing = False
        self._in_trouble = False
        self._told_of_unseen = False
        self._losses: list[float] = []
        self._last: Values = np.empty(0, dtype=np.float32)
        self._closed = False
        self._since = self.steps, time.perf_counter()
        self._arm()

    def step(
        self, loss: Tensor | float, *, timesteps: Tensor | None = None, losses: Tensor | None = None
    ) -> Alarm | None:
        """Once per update, after the backward pass and before the optimiser; returns an alarm that rang.

        With `timesteps` [B] and `losses` per image, the loss is also told by noise level.
        """
        if self._closed:
            raise ValueError("this monitor is closed; make a new one, with first_step= and another folder.")
        if (timesteps is None) != (losses is None):
            raise ValueError("the loss by noise level needs both timesteps= and losses=, the loss of each image.")
        loss = torch.as_tensor(loss, device=self.pulse.parameters[0].device)
        if loss.numel() != 1:
            raise ValueError(
                f"the loss of a step is one number, got a tensor of shape {tuple(loss.shape)}; give its mean, and "
                "the loss of each image as losses= with timesteps=."
            )
        if timesteps is not None and losses is not None:
            self.levels.add(timesteps, losses)
        self.steps += 1
        if self.pulse.was_unfrozen():
            self._watch_unfrozen()
        try:
            rung = self._look(loss)
            if self._observing:
                self._write()
        finally:  # a loop may go on after an error too
            self._call.fresh = False
            self._arm()
        return rung

    def close(self) -> None:
        """Read what is under way, take all hooks off, close the log and draw report.html."""
        if self._closed:
            return
        try:
            self._read(wait=True)
        finally:
            self._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            self.close()
        else:  # what ended the loop is the news, not what the last steps may still show
            self._let_go()

    def state_dict(self) -> dict[str, Any]:
        """What the alarm has learnt, for a checkpoint: numbers and lists. What is under way counts too, and raises
        here rather than be lost with this process."""
        if not self._closed:  # its log is, and an error that ended the loop is the news
            self._read(wait=True)
        return {
            "steps": self.steps,
            "detector": self.detector.state_dict(),
            "oscillation": self.oscillation.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, without learning anew what is usual. What is under way is of steps undone."""
        self._inbox, self._losses, self._in_trouble = Inbox(), [], False
        if self.pulse.was_unfrozen():
            self._watch_unfrozen()
        self.detector.load_state_dict(state["detector"])
        self.oscillation.load(state["oscillation"])
        self.steps = state["steps"]
        self._since = self.steps, time.perf_counter()
        self._arm()

    def lightning_callback(self) -> Any:
        """For `Trainer(callbacks=[...])`."""
        from scalelong.stability.lightning import callback_for

        return callback_for(self)

    def _watch_unfrozen(self) -> None:
        """Watch parameters that were frozen until now; what the alarm has learnt of the others stays."""
        self._read(wait=True)  # what is under way is in the order of the old names
        self.pulse.close()
        self.pulse = Pulse(self.model, self._call, self.pulse.watched)
        self.pulse.arm(self.steps, everything=self._observing)
        self.detector = self.detector.renamed(self.pulse.names)

    def _arm(self) -> None:
        """Put the skips' hooks on, where the coming step is to be observed."""
        self._watching.close()
        coming = self.steps + 1
        self._observing = coming % self.interval == 0
        self.pulse.arm(coming, everything=self._observing, outputs=self._finds_late and self._trouble_is_likely())
        if self._observing and self.observer is not None:
            self.observer.forget()
            self._watching.enter_context(self.observer.watching())
            if is_compiled(self._called):  # a compiled graph calls no hooks
                self._watching.enter_context(torch.compiler.set_stance("force_eager"))

    @property
    def _finds_late(self) -> bool:
        """Whether a step is over when its numbers are read: then only an output seen in it names a NaN's block."""
        return self.pulse.parameters[0].is_cuda and not self.wait

    def _trouble_is_likely(self) -> bool:
        """At the beginning, and for some time after an alarm."""
        since_alarm = self.steps - self.alarms[-1].step if self.alarms else _ALERT_STEPS
        return self.steps - self._first_step < _FIRST_STEPS or since_alarm < _ALERT_STEPS

    def _look(self, loss: Tensor) -> Alarm | None:
        if self.pulse.looking:
            self._inbox.send(self.steps, *self.pulse.take(loss))
            return self._read(wait=self.wait or self._observing, in_step=True)
        return self._judge(self.steps, self.pulse.glance(loss), in_step=True)

    def _read(self, *, wait: bool, in_step: bool = False) -> Alarm | None:
        rung = None
        for step, taken, note in self._inbox.arrived(wait=wait):
            values = self.pulse.read(taken, note)
            self._last = values
            rung = self._judge(step, values, in_step=in_step and step == self.steps) or rung
        return rung

    def _judge(self, step: int, values: Values, *, in_step: bool) -> Alarm | None:
        """`in_step` says that the step's gradients are still there, to be looked at again."""
        if not self.pulse.is_finite(values):
            if in_step:
                self.pulse.look_again(values)
            if self._is_bad(step, values, in_step):
                return None
        self._in_trouble = False
        self._tell_of_outputs(step, values)
        self._tell_of_no_gradients(step, values)
        self._losses.append(float(values[0]))
        if alarm := self.detector.update(step, values):
            self._ring(alarm)
        return alarm

    def _is_bad(self, step: int, values: Values, in_step: bool) -> bool:
        """Whether a step is not finite when looked at again. It is reported, of several in a row the first."""
        if self.pulse.is_finite(values):
            return False
        if self.scaler is not None and math.isfinite(values[0]) and self.scaler.get_scale() > 1:
            self.skipped_steps += 1
            return True
        self._bad_steps += 1
        if not self._in_trouble:
            self._in_trouble = True
            what = "gradient" if math.isfinite(values[0]) else "loss"
            culprit = self._call.trace(what) if in_step else self._late_culprit(step, values)
            advice = _ADVICE_ON_DATA if BAD_INPUT in culprit else _ADVICE
            self._report_bad(NonFiniteError(step, what, culprit, advice))
        return True

    def _tell_of_outputs(self, step: int, values: Values) -> None:
        """A block whose output the loss does not see may be ruined: no end of a loop, but a word, once for each."""
        for block, norm in self.pulse.bad_outputs(values).items():
            if block not in self._told_outputs:
                self._told_outputs.add(block)
                large = "" if math.isnan(norm) else f", or is larger than {_END_OF_NORMS}"
                found = f"the output of {block} is not finite{large}; loss and gradients are finite"
                self.log.write(step, output=found)
                warnings.warn(f"step {step}: {found}.", StabilityWarning, stacklevel=4)

    def _tell_of_no_gradients(self, step: int, values: Values) -> None:
        """Once: no training goes on so for long, but a misplaced call looks like it."""
        self._steps_without = self._steps_without + 1 if self.pulse.is_without_gradients(values) else 0
        if self._steps_without == _TOO_LONG_WITHOUT:
            warnings.warn(
                f"step {step}: every gradient seen in the last {_TOO_LONG_WITHOUT} steps was exactly 0 or not "
                "there. Call monitor.step(loss) after loss.backward() and before optimizer.zero_grad(); if it is, "
                "nothing is being trained.",
                StabilityWarning,
                stacklevel=4,
            )

    def _late_culprit(self, step: int, values: Values) -> str:
        """As far as the numbers tell: the update has been since, and a replay would see other weights."""
        bad = [self.pulse.names[i] for i in np.flatnonzero(~np.isfinite(values))]
        blocks = [name for name in bad if name.startswith("output/")]
        after = f"{self.steps - step} steps later" if step < self.steps else "after its update"
        late = f"it was found {after} (wait=True finds the module, before the update)"
        if blocks:
            return f"the first block with a non-finite output is {blocks[0].partition('/')[2]}; {late}"
        first = self.pulse.telling
        if np.count_nonzero(values[first : first + len(self.pulse.blocks)] != UNSEEN) <= 1:  # a glance at the first
            late = f"outputs, which name the block, were not looked at in this step; {late}"
        large = "" if np.isnan(values).any() else f" (or a norm beyond {_END_OF_NORMS})"
        return f"no block's output was seen to be non-finite, but {', '.join(bad[:3])}{large}; {late}"

    def _report_bad(self, error: NonFiniteError) -> None:
        self.log.write(error.step, nonfinite={"what": error.what, "culprit": error.culprit})
        _tell(self.on_nonfinite, error, error)

    def _ring(self, alarm: Alarm) -> None:
        self.alarms.append(alarm)
        self.log.write(alarm.step, alarm=alarm.as_dict())
        _tell(self.on_alarm, alarm, AlarmError(alarm))

    def _write(self) -> None:
        """A line of everything."""
        since, started = self._since
        seconds = (time.perf_counter() - started) / (self.steps - since)
        self._since = self.steps, time.perf_counter()
        gradients = {f"gradient/{block}": norm for block, norm in self.pulse.gradient_norms().items()}
        main: Signals = {}
        if self._losses or self._bad_steps:  # a loss of bad steps alone is no number
            main["loss"] = sum(self._losses) / len(self._losses) if self._losses else math.nan
            main["gradient norm"] = math.hypot(*gradients.values())
            main["weight norm"] = torch.nn.utils.get_total_norm(self.pulse.parameters).item()
        seen = zip(self.pulse.names, self._last.tolist(), strict=False)
        signals = {name: v for name, v in seen if not v < 0 and name not in ("loss", ANY)} | gradients
        if self.observer is not None:
            self._watching.close()
            if not self.observer.squares:
                self._tell_of_unseen()
            self.observer.measure(blocks=False)
            signals |= self.observer.signals()
        by_noise = self.levels.take()
        more: dict[str, Any] = {"loss by noise": by_noise} if by_noise else {}
        if self.scaler is not None:
            more["skipped steps"] = self.skipped_steps
        self._losses = []
        self.log.write(
            self.steps,
            **main,
            **more,
            **self._counts(),
            seconds_per_step=seconds,
            signals=signals,
            oscillation=self.oscillation.update(main | signals),
        )

    def _counts(self) -> dict[str, int]:
        """Of how many steps the alarm knows, and how many since the last line were not finite."""
        bad, self._bad_steps = self._bad_steps, 0
        return {ALARM_LEARNT: self.detector.seen} | ({BAD_STEPS: bad} if bad else {})

    def _tell_of_unseen(self) -> None:
        """Say once why a line is without the norms at its skips."""
        if self._told_of_unseen:
            return
        self._told_of_unseen = True
        why = _INSIDE_A_GRAPH if self._call.fresh else _NOT_CALLED
        warnings.warn(
            f"step {self.steps}: no skip was seen, and such lines are without the norms at skips. {why}",
            StabilityWarning,
            stacklevel=4,
        )

    def _let_go(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._watching.close()
        self.pulse.close()
        self._call.close()
        if not isinstance(self.log, RunLog):
            return
        if self._bad_steps:
            self.log.write(self.steps, **self._counts())
        self.log.close()
        write_about(self.folder, self.model, self.detector.seen)
        if self.report:
            from scalelong.report.monitor import write_monitor_report

            command = f'StabilityMonitor(model, "{self.folder}")'
            write_monitor_report(self.folder, self.folder / REPORT, command)


def _observer(model: nn.Module, calls: StepCalls) -> Observer | None:
    try:
        return Observer(model, calls.watches)
    except UnsupportedModelError as error:
        warnings.warn(
            f"{error} The monitor goes on without the signals of skips: loss, gradients, updates, outputs.",
            stacklevel=4,
        )
        return None


def _tell(how: Any, what: Any, error: Exception) -> None:
    if how == "raise":
        raise error
    if how == "warn":
        warnings.warn(str(what), StabilityWarning, stacklevel=5)
    else:
        how(what)


def _check(model: Any, interval: int, first_step: int, **reactions: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"the monitor takes the model that the loop calls, got {type(model).__name__}.")
    if is_sharded(model):
        raise ValueError(
            "the model is sharded by FSDP, and norms of its parts are not the model's; monitor takes DDP."
        )
    if not isinstance(interval, int) or interval < 1:
        raise ValueError(f"interval is a number of steps from 1 up, got {interval!r}; the default is 50.")
    if not isinstance(first_step, int) or first_step < 0:
        raise ValueError(f"first_step is the number of steps already done, got {first_step!r}; 0 for a fresh loop.")
    for name, how in reactions.items():
        if how not in ("warn", "raise") and not callable(how):
            raise ValueError(f"{name} is 'warn', 'raise' or a function, got {how!r}.")
