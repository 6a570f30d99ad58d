"""κ from short runs: a grid of κ, halved round by round while the runs that stay grow twice as long.

Runs are run folders (`comparison.py`): a probe that was killed goes on where it was, as each round's choice is
computed again from their logs. Runs of one seed share first weights, images, times and noise, so κ is judged by
differences to no scaling, seed by seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scalelong.comparison import Member, beginning_of, diverged, forget_compiled, members
from scalelong.config import RunConfig, with_overrides
from scalelong.data.store import open_store
from scalelong.report.compared import beyond_spread
from scalelong.skips.spec import CS
from scalelong.training.log import read_metrics
from scalelong.training.signals import oscillation_index

KAPPAS = (1.0, 0.95, 0.9, 0.8, 0.7, 0.5)
SEEDS = (0, 1, 2)
_LOG_EVERY = 10


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which κ (1 is no scaling, and stays in every round as the reference), with which seeds, how long."""

    kappas: tuple[float, ...] = KAPPAS
    seeds: tuple[int, ...] = SEEDS
    steps: int = 100  # of the first round
    rounds: int = 3

    def __post_init__(self) -> None:
        if len(set(self.kappas)) < len(self.kappas) or not all(0 < kappa <= 1 for kappa in self.kappas):
            raise ValueError(f"the κ to try are different numbers in (0, 1], got {self.kappas!r}.")
        if 1.0 not in self.kappas or len(self.kappas) < 2:
            raise ValueError(
                f"a probe compares with no scaling, so κ = 1 is one of two or more, got {self.kappas!r}."
            )
        if len(set(self.seeds)) < 2:
            raise ValueError(f"a spread needs at least two different seeds, got {self.seeds!r}.")
        if self.steps < 4 * _LOG_EVERY or self.rounds < 1:
            raise ValueError(
                f"a round has at least {4 * _LOG_EVERY} steps, and there is at least one, got {self.steps} steps "
                "and "
                f"{self.rounds} rounds."
            )

    def sizes(self) -> list[tuple[int, int]]:
        """(steps, number of κ) of each round."""
        found, count = [], len(self.kappas)
        for number in range(self.rounds):
            found.append((self.steps * 2**number, count))
            count = max(2, -(-count // 2))
        return found


@dataclass(frozen=True, kw_only=True)
class Score:
    """One κ in one round, over seeds: means over the second half of the steps."""

    kappa: float
    spec: str
    steps: int
    losses: list[float]
    oscillations: list[float]  # index of the gradient norm
    differences: list[float]  # loss less that of no scaling, seed by seed; no number where both diverged

    @property
    def loss(self) -> float:
        """The mean over seeds."""
        return sum(self.losses) / len(self.losses)

    @property
    def beyond_spread(self) -> bool:
        """The mean difference is larger than the range over seeds.

        Where runs diverged, all seeds must lie on one side, and those that did not pass the rule among themselves.
        """
        if not (all(d > 0 for d in self.differences) or all(d < 0 for d in self.differences)):
            return False
        finite = [d for d in self.differences if math.isfinite(d)]
        return not finite or beyond_spread(finite)


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """All rounds, the verdict and the spec that it leads to."""

    rounds: list[list[Score]]
    verdict: str
    spec: str

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        rounds = [[asdict(s) | {"loss": s.loss, "beyond_spread": s.beyond_spread} for s in r] for r in self.rounds]
        return {"rounds": rounds, "verdict": self.verdict, "spec": self.spec}


def probe(
    base: RunConfig,
    plan: Plan,
    out: Path,
    train: Callable[[list[Member]], list[bool]],
    init: str | None = None,
) -> ProbeResult | None:
    """Run all rounds; `train` brings members to their last step. None when it was stopped on the way.

    All runs begin with the weights of `init`, where it is given, and are of its network.
    """
    kappas, rounds = list(plan.kappas), []
    for steps, count in plan.sizes():
        kappas = kept(plan.kappas, kappas, count)
        group = round_members(base, kappas, plan.seeds, steps, out, init)
        waiting = [member for member in group if _reached(member.folder) < steps]
        if waiting and not all(train(waiting)):
            return None
        scores = score_round(group, steps, plan.seeds)
        rounds.append(scores)
        kappas = ranked(scores)
    return judge(rounds)


def ranked(scores: Sequence[Score]) -> list[float]:
    """The κ of a round, the lowest loss first."""
    return [score.kappa for score in sorted(scores, key=lambda score: score.loss)]


def kept(kappas: Sequence[float], best_first: Sequence[float], count: int) -> list[float]:
    """Which κ go on: the best, and no scaling always."""
    return [kappa for kappa in kappas if kappa in best_first[:count] or kappa == 1]


def round_members(
    base: RunConfig,
    kappas: Sequence[float],
    seeds: Sequence[int],
    steps: int,
    out: Path,
    init: str | None = None,
) -> list[Member]:
    """The runs of a round; they differ from those of other rounds in their length alone."""
    settings = [
        f"train.steps={steps}",
        f"train.log_every={_LOG_EVERY}",
        f"train.sample_every={10**9}",
        "train.keep_checkpoints=1",
    ]
    return members(with_overrides(base, settings), [spec_of(kappa) for kappa in kappas], seeds, out, init=init)


def train_member(member: Member, data: Path) -> bool:
    """Train one; a run that diverges, which its log says, has lost."""
    from scalelong import experiment

    forget_compiled()
    try:
        return experiment.train(
            member.config, open_store(data), member.folder, logger="none", begin=beginning_of(member)
        )
    except FloatingPointError:
        return True


def score_round(group: Sequence[Member], steps: int, seeds: Sequence[int]) -> list[Score]:
    """What the logs say about the second half of a round, one score per κ."""
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for member in group:
        found.setdefault(member.scaling, {})[member.seed] = _window(member.folder, steps)
    reference = found["none"]
    return [
        Score(
            kappa=1.0 if scaling == "none" else float(scaling.removeprefix("cs:")),
            spec=scaling,
            steps=steps,
            losses=[by_seed[seed][0] for seed in seeds],
            oscillations=[by_seed[seed][1] for seed in seeds],
            differences=[by_seed[seed][0] - reference[seed][0] for seed in seeds],
        )
        for scaling, by_seed in found.items()
    ]


def judge(rounds: list[list[Score]]) -> ProbeResult:
    """The lowest loss of the last round wins only where its difference to no scaling is beyond the spread."""
    last = sorted(rounds[-1], key=lambda score: score.loss)
    if all(math.isinf(loss) for score in last for loss in score.losses):
        return ProbeResult(rounds=rounds, verdict="every run diverged: take a lower train.lr", spec="none")
    reference = next(score.loss for score in last if score.spec == "none")
    better = [score for score in last if score.beyond_spread and score.loss < reference]
    worse = [score.spec for score in last if score.beyond_spread and score.loss > reference]
    also = f"; worse beyond the spread: {', '.join(worse)}" if worse else ""
    if not better:
        found = "no κ is better than no scaling" if worse else "no difference"
        verdict = f"{found} beyond the spread over seeds{also}{_lost(last)}"
        return ProbeResult(rounds=rounds, verdict=verdict, spec="none")
    others = [score for score in last if score.spec not in ("none", better[0].spec)]
    return ProbeResult(rounds=rounds, verdict=_told(better[0]) + also + _lost(others), spec=better[0].spec)


def _lost(scores: Sequence[Score]) -> str:
    """Who diverged in some seeds."""
    counts = {score.spec: sum(map(math.isinf, score.losses)) for score in scores}
    seeds = len(scores[0].losses) if scores else 0
    return "".join(f"; {spec} diverged in {lost} of {seeds} seeds" for spec, lost in counts.items() if lost)


def _told(best: Score) -> str:
    """By how much the best is better; where no scaling diverged there is no number for it."""
    finite = [d for d in best.differences if math.isfinite(d)]
    if not finite:
        return f"{best.spec} trains, and no scaling diverges in every seed"
    mean, half = sum(finite) / len(finite), (max(finite) - min(finite)) / 2
    lost = len(best.differences) - len(finite)
    also = f"; in {lost} of {len(best.differences)} seeds no scaling diverges" if lost else ""
    return f"{best.spec} changes the loss by {mean:+.2g} ± {half:.1g} against no scaling, beyond the spread{also}"


def spec_of(kappa: float) -> str:
    """κ = 1 is no scaling."""
    return "none" if kappa == 1 else str(CS(kappa))


def _reached(folder: Path) -> float:
    from scalelong.experiment import last_step

    return math.inf if diverged(folder) else last_step(folder)


def _window(folder: Path, steps: int) -> tuple[float, float]:
    """(loss, oscillation) over the steps of (steps/2, steps]; infinite where the run ended before."""
    rows = [row for row in read_metrics(folder) if "loss" in row and steps / 2 < row["step"] <= steps]
    if not rows or rows[-1]["step"] < steps:
        return math.inf, math.inf
    losses, norms = [row["loss"] for row in rows], [row["gradient norm"] for row in rows]
    return sum(losses) / len(losses), oscillation_index(norms)
