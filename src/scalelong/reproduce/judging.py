"""Rules by which numbers of several seeds become checks. Differences count only beyond the spread over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from scalelong.stability.statements import Check

Values = Mapping[str, Sequence[float]]


def clearly_below(low: Sequence[float], high: Sequence[float]) -> bool:
    """Every seed of the one lies below every seed of the other."""
    return max(low) < min(high)


def below(values: Values, better: str, worse: str, where: str | None = None) -> Check:
    """Whether one variant lies clearly below another, with both ranges shown."""
    found = f"{better} {show(values[better])}, {worse} {show(values[worse])}"
    return Check(where or f"{better} against {worse}", clearly_below(values[better], values[worse]), found)


def luck(won: int, lost: int) -> float:
    """How often a fair coin, thrown won + lost times, shows heads `won` times or more: the sign test."""
    n = won + lost
    return sum(math.comb(n, k) for k in range(won, n + 1)) / 2**n


def show(values: Sequence[float]) -> str:
    """Mean and range over seeds."""
    mean = sum(values) / len(values)
    return f"{mean:.4g} ({min(values):.4g} … {max(values):.4g})" if len(values) > 1 else f"{mean:.4g}"
