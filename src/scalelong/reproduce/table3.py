"""Table 3: scaling the outputs of blocks instead of the skips."""

from __future__ import annotations

from scalelong.reproduce.drawing import draw_beside
from scalelong.reproduce.judging import below
from scalelong.reproduce.plan import Data, Reproduction, Variant, full, scalings, small
from scalelong.reproduce.running import final_quality
from scalelong.stability.statements import Statement

PAPER = {"CS": 2.98, "LS": 3.01, "stable 0.1": 3.77, "stable 0.3": 3.75, "ReZero": 3.46}
BLOCKS = {"stable 0.1": "stable:0.1", "stable 0.3": "stable:0.3", "ReZero": "rezero"}
_RULE = "CS and LS both end clearly below the alternative: every seed of the one below every seed of the other."


def variants() -> list[Variant]:
    """Skips scaled, or blocks."""
    blocks = [Variant(name, (f"model.changes.block_scaling={spec}",)) for name, spec in BLOCKS.items()]
    return [*scalings(["CS", "LS"]), *blocks]


def judge(data: Data) -> Statement:
    """Both methods against each alternative."""
    checks = [
        below(data["values"], name, other, f"the alternative is {other}")
        for other in BLOCKS
        for name in ("CS", "LS")
    ]
    return Statement(name="table3", claim=REPRODUCTION.claim, rule=_RULE, checks=checks)


REPRODUCTION = Reproduction(
    name="table3",
    title="Table 3: block scaling in the skips' place",
    claim="Scaling skips is better than scaling the outputs of blocks.",
    small=small(variants()),
    full=full(variants()),
    collect=final_quality,
    draw=lambda data: draw_beside(data, PAPER),
    judge=judge,
)
