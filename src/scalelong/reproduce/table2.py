"""Table 2: parts of the gate: its ratio, its activation, and a scalar or IE in its place."""

from __future__ import annotations

from scalelong.reproduce.drawing import draw_beside
from scalelong.reproduce.judging import below
from scalelong.reproduce.plan import Data, Reproduction, Variant, full, small
from scalelong.reproduce.running import final_quality
from scalelong.stability.statements import Statement

PAPER = {"LS": 3.01, "r = 4": 3.06, "r = 8": 3.10, "ELU": 3.08, "Mish": 3.08, "scalar": 3.46, "IE": 3.09}
SPECS = {
    "LS": "ls",
    "r = 4": "ls:ratio=4",
    "r = 8": "ls:ratio=8",
    "ELU": "ls:act=elu",
    "Mish": "ls:act=mish",
    "scalar": "scalar",
    "IE": "ie",
}
_RULE = (
    "LS (r = 16, ReLU, squeeze-excite) ends clearly below the alternative: every seed of the one below every seed "
    "of the other."
)


def variants() -> list[Variant]:
    """LS as published, and six changes of it."""
    return [Variant(name, (f"model.scaling={spec}",)) for name, spec in SPECS.items()]


def judge(data: Data) -> Statement:
    """LS against each alternative."""
    checks = [below(data["values"], "LS", name) for name in data["values"] if name != "LS"]
    return Statement(name="table2", claim=REPRODUCTION.claim, rule=_RULE, checks=checks)


REPRODUCTION = Reproduction(
    name="table2",
    title="Table 2: ablations of LS",
    claim="r = 16, ReLU and squeeze-excite are the best choices.",
    small=small(variants()),
    full=full(variants()),
    collect=final_quality,
    draw=lambda data: draw_beside(data, PAPER),
    judge=judge,
)
