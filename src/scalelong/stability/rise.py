"""A loss that rises slowly: by 2 % a step it is tenfold after 116 steps, and never far from what it just was.

So its level, the mean logarithm of the last `STEPS` losses, is compared with the lowest level of the run. It rings
where that has doubled, and where a loss that scatters from step to step would not reach it by chance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

STEPS = 30
DOUBLED = math.log(2)
STRANGE = 10.0  # standard errors of a level: from the lowest to the highest of a million steps there are some nine
_SCATTER = 300  # steps whose distances from the level before them tell how much a loss scatters
_SCATTER_EVERY = 25


class Rise:
    """Takes a run's losses and says when their level has left the lowest one behind."""

    def __init__(self) -> None:
        self.seen = 0
        self.lowest = math.inf
        self._losses = np.zeros(STEPS)  # logarithms, in a ring
        self._distances = np.zeros(_SCATTER)  # of a loss from the level before it, in a ring
        self._error = math.inf  # the standard error of a level

    def update(self, loss: float, *, may_ring: bool) -> tuple[float, float] | None:
        """(times the lowest level, standard errors above it) where it rings; from there on that is the lowest."""
        if not 0 < loss < math.inf:
            return None
        new = math.log(loss)
        if self.seen >= STEPS:
            self._distances[(self.seen - STEPS) % _SCATTER] = abs(new - self._losses.mean())
        self._losses[self.seen % STEPS] = new
        self.seen += 1
        known = self.seen - STEPS
        if known < _SCATTER_EVERY:
            return None
        if known % _SCATTER_EVERY == 0:
            self._error = 1.4826 * float(np.median(self._distances[:known])) / math.sqrt(STEPS)
        level = float(self._losses.mean())
        rise = level - self.lowest
        if rise > max(DOUBLED, STRANGE * self._error) and may_ring:
            self.lowest = level
            return math.exp(rise), rise / self._error if self._error else math.inf
        self.lowest = min(self.lowest, level)
        return None

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        numbers = {"seen": self.seen, "lowest": self.lowest, "error": self._error}
        return numbers | {"losses": self._losses.tolist(), "distances": self._distances.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.seen, self.lowest, self._error = state["seen"], state["lowest"], state["error"]
        self._losses[:], self._distances[:] = state["losses"], state["distances"]
