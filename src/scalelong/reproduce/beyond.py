"""Beyond the paper: skip-norm, which brings every skip to one size, against none, CS and LS."""

from __future__ import annotations

from typing import Any

from scalelong.reproduce.drawing import draw_values, panels
from scalelong.reproduce.judging import below
from scalelong.reproduce.plan import Data, Reproduction, Variant, full, scalings, small
from scalelong.reproduce.running import final_quality
from scalelong.stability.statements import Statement

_NAME = "skip-norm"
_RULE = "skip-norm ends clearly below the other: every seed of the one below every seed of the other."


def variants() -> list[Variant]:
    """The paper's two methods, the plain net, and ours."""
    return [*scalings(["none", "CS", "LS"]), Variant(_NAME, (f"model.scaling={_NAME}",))]


def draw(data: Data) -> Any:
    """The values of every variant; the paper has none of ours."""
    figure, (axes,) = panels(1)
    draw_values(axes, data["values"], "", data["measure"])
    return figure


def judge(data: Data) -> Statement:
    """Ours against each."""
    others = [name for name in data["values"] if name != _NAME]
    checks = [below(data["values"], _NAME, other, f"the other is {other}") for other in others]
    return Statement(name="beyond", claim=REPRODUCTION.claim, rule=_RULE, checks=checks)


REPRODUCTION = Reproduction(
    name="beyond",
    title="Beyond the paper: skip-norm",
    claim="Ours, not the paper's: skips of one size are better than plain ones, and than those of CS and LS.",
    small=small(variants()),
    full=full(variants()),
    collect=final_quality,
    draw=draw,
    judge=judge,
)
