"""The alarm before divergence: is a signal growing as it never did in this run?

All is in logarithms, so that a factor counts the same at any size. A signal's deviation is the mean of its last 3
values less the median of the 50 before (renewed every few steps). It is compared with the deviations that the same
signal showed before in the same run: the alarm rings where it lies far outside of those (`STRANGE` spreads) and is
large in itself (`LARGE`, an update `LARGE_UPDATE`), so that neither a noisy signal nor a very quiet one rings by
nature. Blocks that hardly take part, as the inner ones of a net that is deep for its data, wake up now and then and
are no danger: a block's gradient, update or output must also be as large as the largest block's usually is, and for
an update its gradient a share of that (`TAKES_PART`). Half-precision outputs have one more rule: growth that leaves
the dtype's range within `SOON` steps. What grows so slowly that it is never strange beside the last 50 steps, the
loss shows by its level (`rise`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scalelong.stability.rise import STEPS, Rise
from scalelong.training.log import LEVEL

Array = NDArray[np.float64]

RECENT = 3
REFERENCE = 50
HISTORY = 300
LEARNING = 150  # steps without an alarm, in which the run shows what is usual
FEW = 30  # values are no history, of a signal that is not seen in every step
STRANGE = 7.0
LARGE = math.log(1.5)
LARGE_UPDATE = math.log(2)  # with a momentum of 0.99 updates wander by half in healthy runs
TAKES_PART = math.log(0.05)  # of the largest block's gradient
QUIET = 0.03  # the least spread that a signal is believed to have
SOON = 50
_GROWING = 1e-3  # per step: what grows less has no overflow to come
_REFERENCE_EVERY = 5  # steps between two medians of the reference,
_USUAL_EVERY = 25  # and between two looks at the whole history: both change slowly


@dataclass(frozen=True)
class Alarm:
    """What rang, where, and by how much."""

    step: int
    signal: str  # loss, gradient, update, output, gate, peak, or LEVEL
    layer: str  # the block, or the skip of a gate; empty for the loss
    factor: float  # the recent mean over the usual value
    score: float  # how many spreads outside of what the run had shown
    others: tuple[str, ...] = ()  # what rang beside it, strangest first

    def __str__(self) -> str:
        where = f" of {self.layer}" if self.layer else ""
        more = f" (and {len(self.others)} more: {', '.join(self.others[:3])})" if self.others else ""
        if self.signal == LEVEL:
            return (
                f"step {self.step}: the {LEVEL}, over {STEPS} steps, is {self.factor:.3g} times its lowest in this "
                f"run ({self.score:.0f} standard errors)"
            )
        if self.signal == "peak":
            return f"step {self.step}: the output{where} grows out of float16's range within {SOON} steps{more}"
        return (
            f"step {self.step}: the {self.signal}{where} is {self.factor:.3g} times what it was in the last "
            f"{REFERENCE} steps, {self.score:.0f} spreads beyond what this run has shown{more}"
        )

    def as_dict(self) -> dict[str, Any]:
        """For a log line."""
        return {**self.__dict__, "others": list(self.others)}


def _places(kind: str, kinds: Sequence[str]) -> NDArray[np.int_]:
    return np.array([i for i, found in enumerate(kinds) if found == kind], dtype=int)


def usual(deviations: Array) -> tuple[Array, Array]:
    """Median and robust spread (1.48 MAD, and never less than `QUIET`) of past deviations, [signals, steps]."""
    centre = median(deviations)
    return centre, 1.4826 * median(np.abs(deviations - centre[:, None])) + QUIET


def median(values: Array) -> Array:
    """The upper median along the last axis: a fraction of the cost of numpy's own."""
    middle = values.shape[-1] // 2
    return np.partition(values, middle, axis=-1)[..., middle]


def steps_to_overflow(logs: Array) -> Array:
    """Steps until growth as over these steps reaches 0, the logarithm of a full range; infinite without growth."""
    half = logs.shape[1] // 2
    growth = (logs[:, half:].mean(axis=1) - logs[:, :half].mean(axis=1)) / half
    return np.where(growth > _GROWING, -logs[:, -1] / np.maximum(growth, _GROWING), np.inf)


class Detector:
    """Learns what is usual in a run, step by step, and says when something is not."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        size = len(self.names)
        self.seen = 0
        self.recent = np.zeros((RECENT, size))  # logarithms of the last steps, oldest first,
        self.before = np.zeros((size, REFERENCE))  # and of those before them, in a ring
        self.deviations = np.zeros((size, HISTORY))
        self._reference = np.zeros(size)
        self._usual = usual(self.deviations)
        self._values = np.zeros(size, dtype=int)  # how many each signal has had
        self._rings_after = np.full(size, LEARNING)  # steps
        self._quiet_until = 0
        self.rise = Rise()  # of the loss, where that is the first
        kinds = [name.partition("/")[0] for name in self.names]
        self._both_ways = np.array([kind == "gate" for kind in kinds])
        self._large = np.array([LARGE_UPDATE if kind == "update" else LARGE for kind in kinds])
        self._peaks = _places("peak", kinds)
        self._gradients, self._updates = _places("gradient", kinds), _places("update", kinds)
        self._outputs = _places("output", kinds)
        self._gradient_of = np.array([self._place_of_gradient(self.names[i]) for i in self._updates], dtype=int)

    def update(self, step: int, values: Sequence[float] | NDArray[np.floating[Any]]) -> Alarm | None:
        """Take a step's values and return the alarm, if it rings. What is not positive and finite was not seen."""
        self._take(np.asarray(values, dtype=np.float64))
        self.seen += 1
        if self.seen % _REFERENCE_EVERY == 0:
            self._reference = median(self.before)
        now = self.recent.mean(axis=0) - self._reference
        may_ring = step >= self._quiet_until
        alarm = self._judge(step, now) if may_ring else None
        if self.names[0] == "loss":
            quiet = alarm is not None or not may_ring or self.seen <= LEARNING
            if risen := self.rise.update(float(values[0]), may_ring=not quiet):
                alarm = Alarm(step, LEVEL, "", *risen)
        self.deviations[:, self.seen % HISTORY] = now
        if self.seen % _USUAL_EVERY == 0:
            self._usual = usual(self.deviations[:, : self.seen + 1])
        if alarm:
            self._quiet_until = step + REFERENCE
        return alarm

    def _take(self, values: Array) -> None:
        """Append the logarithms. An unseen signal keeps its value; its first one stands for all before."""
        there = (values > 0) & (values < np.inf)
        new = np.log(values, out=self.recent[-1].copy(), where=there)
        first = there & (self._values == 0)
        if first.any():
            self.recent[:, first] = new[first]
            self.before[first] = new[first, None]
            self._reference[first] = new[first]
            self._rings_after[first] = self._history_from_here()
        # A signal that is exactly 0, of a gate whose unit is dead, is usual in nothing once it wakes up.
        self._rings_after[values == 0] = self._history_from_here()
        self._values += there
        self.before[:, self.seen % REFERENCE] = self.recent[0]
        self.recent[:-1] = self.recent[1:]
        self.recent[-1] = new

    def _history_from_here(self) -> int:
        """The step after which a signal may ring that begins now; a late one fills a whole history first."""
        return self.seen + HISTORY if self.seen > REFERENCE else self.seen + LEARNING

    def _judge(self, step: int, now: Array) -> Alarm | None:
        centre, spread = self._usual
        score, size = (now - centre) / spread, now.copy()
        for signed in (score, size):
            np.abs(signed, out=signed, where=self._both_ways)
        rings = (score > STRANGE) & (size > self._large)
        half = self._values[self._peaks].any()
        if not (half or rings.any()):  # nearly always; what follows takes as long again
            return None
        for blocks in (self._gradients, self._updates, self._outputs):
            rings[blocks] &= self._is_as_large(blocks, blocks)
        rings[self._updates] &= self._is_as_large(self._gradient_of, self._gradients, TAKES_PART)
        if half:
            rings[self._peaks] |= steps_to_overflow(self._newest(self._peaks, 20)) < SOON
        rings &= (self._rings_after < self.seen) & (self._values > FEW)
        if not rings.any():
            return None
        order = [int(i) for i in np.argsort(-score) if rings[i]]
        signal, _, layer = self.names[order[0]].partition("/")
        others = tuple(self.names[i] for i in order[1:])
        return Alarm(step, signal, layer, math.exp(now[order[0]]), float(score[order[0]]), others)

    def _is_as_large(
        self, blocks: NDArray[np.int_], others: NDArray[np.int_], share: float = 0.0
    ) -> NDArray[np.bool_]:
        """Whether each block is now as large as the largest of the others usually is, or a share of that."""
        seen = others[self._values[others] > FEW]
        usually = self._reference[seen].max(initial=-np.inf)
        return self.recent[:, blocks].mean(axis=0) >= usually + share

    def _place_of_gradient(self, update: str) -> int:
        """Where the gradient of an update's block is; its own place where that is not watched."""
        gradient = update.replace("update/", "gradient/", 1)
        return self.names.index(gradient if gradient in self.names else update)

    def _newest(self, rows: NDArray[np.int_], steps: int) -> Array:
        """The last logarithms of some signals in their order, [rows, steps]."""
        order = np.arange(self.seen - steps + RECENT, self.seen) % REFERENCE
        return np.concatenate([self.before[rows][:, order], self.recent.T[rows]], axis=1)

    def renamed(self, names: Sequence[str]) -> Detector:
        """A detector of these signals, with what this one knows of those that it has; the others begin."""
        new = Detector(names)
        new.seen, new._quiet_until, new.rise = self.seen, self._quiet_until, self.rise
        kept = [name for name in self.names if name in new.names]
        old_places = [self.names.index(name) for name in kept]
        new_places = [new.names.index(name) for name in kept]
        for (name, old), array in zip(self._arrays().items(), new._arrays().values(), strict=True):
            if name == "recent":  # [steps, signals]; of the others signals come first
                array[:, new_places] = old[:, old_places]
            else:
                array[new_places] = old[old_places]
        return new

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        numbers = {"names": self.names, "seen": self.seen, "quiet until": self._quiet_until}
        numbers["rise"] = self.rise.state_dict()
        return numbers | {k: v.tolist() for k, v in self._arrays().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        if state["names"] != self.names:
            raise ValueError(
                f"the saved alarm watched {len(state['names'])} signals, other ones than the {len(self.names)} of "
                "this model; load it into a monitor of the same model, or start a fresh one."
            )
        self.seen, self._quiet_until = state["seen"], state["quiet until"]
        if "rise" in state:  # not in what an earlier version saved
            self.rise.load_state_dict(state["rise"])
        for name, array in self._arrays().items():
            array[...] = state[name]

    def _arrays(self) -> dict[str, NDArray[Any]]:
        centre, spread = self._usual
        return {
            "recent": self.recent,
            "before": self.before,
            "deviations": self.deviations,
            "reference": self._reference,
            "centre": centre,
            "spread": spread,
            "values": self._values,
            "rings after": self._rings_after,
        }
