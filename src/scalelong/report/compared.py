"""Runs beside each other: a table of numbers by scaling, with their spread over seeds, and what it shows.

A number that is not finite is shown as such and concludes nothing; a run that diverged counts as infinite.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from scalelong.report.runs import Run, has_quality, quality_key, ran_together, set_apart
from scalelong.training.ema import of_first_weights

Groups = dict[str, list[Run]]
_Value = TypeVar("_Value")
_RARE = 0.1  # of comparisons: what chance shows more often is no finding


def summary_rows(groups: Groups) -> list[dict[str, str]]:
    """One row per scaling: what the terminal and the page show of runs that came to their end."""
    return [
        {
            "scaling": scaling,
            "seeds": str(len(runs)),
            "loss": show([training_loss(run) for run in runs]),
            **_held_out(groups, scaling),
            **_quality(groups, scaling),
            "gradient norm": show([run.last("gradient norm", over=10) for run in runs]),
            "its oscillation": show([run.last("oscillation", "gradient norm") for run in runs]),
            **_step_time(groups, scaling),
        }
        for scaling, runs in groups.items()
    ]


def show(values: Sequence[float | None], digits: int = 4, lost: str = "not finite") -> str:
    """Mean and half the range over seeds, and how many are `lost`; what was not logged is a dash."""
    known = [value for value in values if value is not None]
    finite = [value for value in known if math.isfinite(value)]
    if not known:
        return "–"
    if not finite:
        return lost
    mean, half = spread(finite)
    told = f"{mean:.{digits}g} ± {half:.2g}" if len(finite) > 1 else f"{mean:.{digits}g}"
    others = len(known) - len(finite)
    return f"{told}, {lost} in {others} of {len(known)}" if others else told


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the range over seeds: with two or three seeds a deviation would say more than is known."""
    return sum(values) / len(values), (max(values) - min(values)) / 2


def _held_out(groups: Groups, scaling: str) -> dict[str, str]:
    """The loss on held-out images, and how much of it is the scaling: its difference to none, seed by seed."""
    if not any(held_out_loss(run) is not None for runs in groups.values() for run in runs):
        return {}
    return {
        "held-out loss": show([held_out_loss(run) for run in groups[scaling]]),
        "minus none's": show(differences_to_none(groups, scaling, held_out_loss), digits=2),
    }


def _quality(groups: Groups, scaling: str) -> dict[str, str]:
    every = [run for runs in groups.values() for run in runs]
    if not has_quality(every):
        return {}
    key, name = quality_key(every)
    return {name: show([run.last("quality", key) for run in groups[scaling]])}


def _step_time(groups: Groups, scaling: str) -> dict[str, str]:
    if ran_together([run for runs in groups.values() for run in runs]):
        return {}
    seconds = [run.last("seconds_per_step", over=10) for run in groups[scaling]]
    return {"ms per step": show([None if s is None else 1000 * s for s in seconds])}


def held_out_loss(run: Run) -> float | None:
    """The last one."""
    return run.last("held out", "loss")


def training_loss(run: Run) -> float | None:
    """The mean of the last ten log lines."""
    return run.last("loss", over=10)


def differences_to_none(groups: Groups, scaling: str, value_of: Callable[[Run], float | None]) -> list[float]:
    """Seed by seed, where both were logged; none for no scaling itself."""
    pairs = _beside_none(groups, scaling, value_of)
    return [found - plain for found, plain in pairs if found is not None and plain is not None]


def _beside_none(groups: Groups, scaling: str, value_of: Callable[[Run], _Value]) -> list[tuple[_Value, _Value]]:
    """Seed by seed, a scaling's value and that of none."""
    none = _plain_of(groups, scaling)
    if scaling == none:
        return []
    plain, found = _by_seed(groups.get(none, []), value_of), _by_seed(groups[scaling], value_of)
    return [(found[seed], plain[seed]) for seed in found if seed in plain]


def _plain_of(groups: Groups, scaling: str) -> str:
    """What a scaling is told against: none at the same placement, or else at the paper's."""
    placed = "none" + scaling.removeprefix(groups[scaling][0].config.model.scaling)
    return placed if placed in groups else "none"


def _by_seed(runs: list[Run], value_of: Callable[[Run], _Value]) -> dict[int, _Value]:
    """Empty where a seed has several runs, which differ in something else."""
    seeds = [run.config.train.seed for run in runs]
    if len(set(seeds)) < len(seeds):
        return {}
    return {seed: value_of(run) for seed, run in zip(seeds, runs, strict=True)}


def finding(groups: Groups) -> str:
    """What a comparison shows: which scalings differ from none beyond the spread over seeds.

    About the held-out loss where every run that came to its end has it, or else the loss; empty where nothing
    stands beside none.
    """
    runs = [run for group in groups.values() for run in group]
    ended = [run for run in runs if not run.divergence]
    if why := _set_apart(runs):
        return f"Nothing is concluded: {why}."
    held_out = all(held_out_loss(run) is not None for run in ended)
    measure, loss = (held_out_loss, "held-out loss") if held_out else (training_loss, "loss")

    def value_of(run: Run) -> float | None:
        return math.inf if run.divergence else measure(run)

    found = {scaling: differences_to_none(groups, scaling, value_of) for scaling in groups}
    concluded = conclude({scaling: values for scaling, values in found.items() if values}, loss)
    return f"{concluded}{_of_first_weights(ended)}" if concluded and held_out else concluded


def _set_apart(runs: Sequence[Run]) -> str:
    """Why runs cannot be told against each other, if they cannot."""
    if apart := set_apart(list(runs)):
        return f"the runs differ in more than scaling and seed, in {'; '.join(apart)}"
    if len(steps := sorted({run.step for run in runs if not run.divergence})) > 1:
        return f"the runs are not equally far, at steps {steps[0]:,} to {steps[-1]:,}"
    return ""


def _of_first_weights(runs: Sequence[Run]) -> str:
    """What is judged is an average: one that has hardly moved says nothing of the training."""
    told = {of_first_weights(run.config.train, None, run.step) for run in runs} - {""}
    return f" Beware: the averages that were judged are {' or '.join(sorted(told))}." if told else ""


def conclude(differences: dict[str, list[float]], loss: str) -> str:
    """The sentences, from each scaling's differences to none, seed by seed.

    >>> conclude({"ls": [-0.1, 0.1]}, "loss")
    'No difference to none in loss is larger than the spread over 2 seeds: none is shown.'
    """
    told = {scaling: values for scaling, values in differences.items() if all(map(math.isfinite, values))}
    untold = [
        f"Of {scaling} nothing is concluded: with {_not_finite(values)} of {len(values)} seeds its {loss}, or that "
        "of none, is not finite."
        for scaling, values in differences.items()
        if scaling not in told
    ]
    return " ".join([*filter(None, [_conclude_finite(told, loss)]), *untold])


def _not_finite(values: Sequence[float]) -> int:
    return sum(not math.isfinite(value) for value in values)


def _conclude_finite(differences: dict[str, list[float]], loss: str) -> str:
    if not differences:
        return ""
    seeds = min(map(len, differences.values()))
    if seeds == 1:
        return f"Whether a scaling differs from none in {loss} cannot be told from one seed, which has no spread."
    chances = {
        scaling: by_chance(seeds, len(differences), _ratio(values))
        for scaling, values in differences.items()
        if beyond_spread(values)
    }
    if not chances:
        return f"No difference to none in {loss} is larger than the spread over {seeds} seeds: none is shown."

    def told(scalings: Sequence[str]) -> str:
        changes = _listed([f"{scaling} {_change(differences[scaling], loss)}" for scaling in scalings])
        chance = max(chances[scaling] for scaling in scalings)
        share = f"{chance:.0%}" if chance >= 0.01 else "less than 1%"
        return (
            f"{changes}, beyond the spread over {seeds} seeds (chance alone shows as much of one scaling at least "
            f"in {share} of comparisons)"
        )

    shown = [scaling for scaling, chance in chances.items() if chance <= _RARE]
    seen = [scaling for scaling in chances if scaling not in shown]
    same = [scaling for scaling in differences if scaling not in chances]
    sentences = [f"Against none, {told(shown)}."] if shown else []
    if seen:
        enough = next(more for more in itertools.count(seeds) if by_chance(more, len(differences)) <= _RARE)
        sentences.append(f"Seen, but not shown: {told(seen)}; {enough} seeds would tell.")
    if same:
        sentences.append(f"Of {_listed(same)} no difference is shown.")
    return " ".join(sentences)


def by_chance(seeds: int, scalings: int = 1, ratio: float = 1.0) -> float:
    """How often the mean difference of one scaling at least is larger than `ratio` times the range over seeds where
    none has an effect: losses are normal and independent, and all scalings told against the same runs without."""
    ratios = _ratios_by_chance(seeds, scalings)
    return 1 - float(np.searchsorted(ratios, ratio, side="right")) / len(ratios)


@functools.cache
def _ratios_by_chance(seeds: int, scalings: int) -> NDArray[np.float64]:
    draw = np.random.default_rng(0).standard_normal((40_000, 1 + scalings, seeds))
    differences = draw[:, 1:] - draw[:, :1]
    return np.sort((abs(differences.mean(2)) / np.ptp(differences, 2)).max(1))


def _ratio(differences: Sequence[float]) -> float:
    width = max(differences) - min(differences)
    return abs(spread(differences)[0]) / width if width else math.inf


def beyond_spread(differences: Sequence[float]) -> bool:
    """The mean difference is larger than the range of the differences over seeds, all of them finite."""
    if not all(map(math.isfinite, differences)):
        return False
    return abs(spread(differences)[0]) > max(differences) - min(differences)


def _change(differences: list[float], loss: str) -> str:
    mean, half = spread(differences)
    return f"{'lowers' if mean < 0 else 'raises'} the {loss} by {abs(mean):.2g} ± {half:.1g}"


def changes_by_noise(groups: Groups) -> dict[str, list[list[float]]]:
    """By how much of none's each scaling changes the held-out loss, for each seed by stretch, least noise first."""
    return {
        scaling: [
            [ours / plain - 1 for ours, plain in zip(*pair, strict=True)]
            for pair in _beside_none(groups, scaling, _by_noise)
            if all(pair)
        ]
        for scaling in groups
    }


def _by_noise(run: Run) -> list[float]:
    """The last one; empty where it was not logged."""
    rows: list[list[float]] = [
        row["held out"]["by noise"] for row in run.rows if "by noise" in row.get("held out", {})
    ]
    return rows[-1] if rows else []


def finding_by_noise(groups: Groups, lost: Groups) -> str:
    """At which noise levels scalings differ, if none of their runs was `lost`, nor of those without scaling."""
    every = [run for runs in (*groups.values(), *lost.values()) for run in runs]
    if _set_apart(every):
        return ""
    whole = {
        scaling: rows
        for scaling, rows in changes_by_noise(groups).items()
        if scaling not in lost and _plain_of({**lost, **groups}, scaling) not in lost
    }
    return conclude_by_noise(whole)


def conclude_by_noise(changes: dict[str, list[list[float]]]) -> str:
    """At which noise levels, 0 for none to 1 for all, a scaling changes the loss beyond the spread over seeds."""
    several = {scaling: rows for scaling, rows in changes.items() if len(rows) > 1}
    if not several:
        return ""
    stretches = len(next(iter(several.values()))[0])
    seeds = min(map(len, several.values()))
    told = "; ".join(f"{scaling} {_where(rows)}" for scaling, rows in several.items())
    count = sum(beyond_spread(values) for rows in several.values() for values in zip(*rows, strict=True))
    every = stretches * len(several)
    chance = (
        f"by chance alone {by_chance(seeds) * every:.2g} of {every} stretches would, and neighbours go together"
    )
    if count <= by_chance(seeds) * every:
        beyond = f"differ from none's beyond the spread over {seeds} seeds"
        return f"{count} of {every} stretches {beyond}; {chance}: nothing is shown."
    return f"Beyond the spread over {seeds} seeds, the loss against none's: {told} ({chance})."


def _where(rows: Sequence[Sequence[float]]) -> str:
    """`rows` has one for each seed."""
    if lost := sum(_not_finite(row) > 0 for row in rows):
        return f"cannot be told, as it is not finite with {lost} of {len(rows)} seeds"
    stretches = list(zip(*rows, strict=True))
    means = [spread(values)[0] if beyond_spread(values) else 0.0 for values in stretches]
    parts = []
    for word, sign in (("lower", -1), ("higher", 1)):
        places = [i for i, mean in enumerate(means) if sign * mean > 0]
        if places:
            sizes = sorted({_percent(abs(means[i])) for i in places}, key=float)
            by = f"{sizes[0]} … {sizes[-1]}" if len(sizes) > 1 else sizes[0]
            parts.append(f"{word} at {_listed(_ranges(places, len(means)))} (by {by}%)")
    return f"is {' and '.join(parts)}" if parts else "shows no difference"


def _percent(share: float) -> str:
    """Two digits, and those before the point."""
    return f"{100 * share:.2g}" if share < 0.1 else f"{100 * share:.0f}"


def _ranges(places: Sequence[int], count: int) -> list[str]:
    """Stretches next to each other as one.

    >>> _ranges([0, 1, 3], 4)
    ['0 … 0.5', '0.75 … 1']
    """
    begins = [i for i in places if i - 1 not in places]
    ends = [i for i in places if i + 1 not in places]
    return [f"{begin / count:.3g} … {(end + 1) / count:.3g}" for begin, end in zip(begins, ends, strict=True)]


def _listed(parts: list[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
