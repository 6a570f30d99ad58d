"""Rules by which numbers of several seeds become checks. Differences count only where the seeds' ranges part."""

from __future__ import annotations

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


def show(values: Sequence[float]) -> str:
    """Mean and range over seeds."""
    mean = sum(values) / len(values)
    return f"{mean:.4g} ({min(values):.4g} … {max(values):.4g})" if len(values) > 1 else f"{mean:.4g}"
