"""A statement of the paper under test: what was found where, and the verdict that a fixed rule makes of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

Row = dict[str, Any]


@dataclass(frozen=True)
class Check:
    """Whether a statement was seen to hold under one condition, None if that cannot be told, and the numbers."""

    where: str
    holds: bool | None
    found: str


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A claim, the rule that decides it, what was found, and the measured rows behind it."""

    name: str
    claim: str
    rule: str
    checks: list[Check]
    remark: str = ""
    rows: list[Row] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """holds, holds only where …, does not hold, or not judged."""
        return verdict(self.checks)

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self) | {"verdict": self.verdict}


def told(holds: bool, *numbers: float) -> bool | None:
    """What a rule says of numbers that are finite; of others it says nothing."""
    return holds if all(map(math.isfinite, numbers)) else None


def statement_from(data: dict[str, Any]) -> Statement:
    """The way back from `as_dict`; the verdict follows from the checks again."""
    values = {key: value for key, value in data.items() if key != "verdict"}
    return Statement(**values | {"checks": [Check(**check) for check in values["checks"]]})


def verdict(checks: Sequence[Check]) -> str:
    """A condition counts as met when every check under it holds; a check that cannot be told does not.

    >>> verdict([Check("A", True, ""), Check("B", False, "")])
    'holds only where A'
    """
    if all(check.holds is None for check in checks):
        return "not judged"
    met = {check.where: all(c.holds for c in checks if c.where == check.where) for check in checks}
    if all(met.values()):
        return "holds"
    if not any(met.values()):
        return "does not hold"
    return "holds only where " + "; or where ".join(where for where, holds in met.items() if holds)


@dataclass(frozen=True)
class Line:
    """y ≈ slope · x + offset by least squares, and how much of y's variance it explains."""

    slope: float
    offset: float
    r2: float

    def at(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The line's values."""
        return self.slope * x + self.offset


def fit_line(x: Sequence[float], y: Sequence[float]) -> Line:
    """Ordinary least squares; R² is 0 for a y that does not vary, and none of it a number where a point is none."""
    xs, ys = np.asarray(x, float), np.asarray(y, float)
    if not (np.isfinite(xs).all() and np.isfinite(ys).all()):
        return Line(math.nan, math.nan, math.nan)
    slope, offset = np.polyfit(xs, ys, 1)
    total = ((ys - ys.mean()) ** 2).sum()
    left = ((ys - slope * xs - offset) ** 2).sum()
    return Line(float(slope), float(offset), float(1 - left / total) if total else 0.0)
