"""Rules by which numbers of several seeds become checks. Differences count only beyond the spread over seeds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from scalelong.stability.statements import Check

Values = Mapping[str, Sequence[float]]


def clearly_below(low: Sequence[float], high: Sequence[float]) -> bool:
    """Every seed of the one lies below every seed of the other; what is no number lies nowhere."""
    return not any(map(math.isnan, (*low, *high))) and max(low) < min(high)


def below(values: Values, better: str, worse: str, where: str | None = None) -> Check:
    """Whether one variant lies clearly below another, with both ranges shown; one seed alone cannot tell."""
    low, high = values[better], values[worse]
    holds = told_by(min(low, high, key=len), clearly_below(low, high))
    remark = ""
    if nowhere := sum(map(math.isnan, (*low, *high))):
        holds, remark = None, f"; {nowhere} of {len(low) + len(high)} are no numbers"
    elif holds is None:
        remark = "; one seed has no spread"
    elif not holds:
        remark = "; clearly the other way round" if clearly_below(high, low) else "; the ranges overlap"
    found = f"{better} {show(low)}, {worse} {show(high)}{remark}"
    return Check(where or f"{better} against {worse}", holds, found)


def told_by(seeds: Sequence[Any], holds: bool) -> bool | None:
    """What several seeds show; one seed alone cannot tell."""
    return holds if len(seeds) > 1 else None


def luck(balances: Sequence[int]) -> float:
    """How often a fair coin, thrown for the sign of each balance, makes their sum as large or larger."""
    sums = Counter({0: 1})
    for size in map(abs, balances):
        reached = {total for sum_ in sums for total in (sum_ - size, sum_ + size)}
        sums = Counter({total: sums[total - size] + sums[total + size] for total in reached})
    return sum(count for total, count in sums.items() if total >= sum(balances)) / sums.total()


def show(values: Sequence[float]) -> str:
    """Mean and range over seeds."""
    if any(map(math.isnan, values)):
        return ", ".join(f"{value:.4g}" for value in values)
    mean = sum(values) / len(values)
    return f"{mean:.4g} ({min(values):.4g} … {max(values):.4g})" if len(values) > 1 else f"{mean:.4g}"
