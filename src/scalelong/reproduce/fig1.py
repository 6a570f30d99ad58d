"""Fig. 1: the norm of hidden features as training goes on, by scaling and depth."""

from __future__ import annotations

from typing import Any

from scalelong.data.store import Store
from scalelong.reproduce.drawing import draw_curves, draw_printed, panels
from scalelong.reproduce.judging import below
from scalelong.reproduce.plan import Data, Folders, Reproduction, full, scalings, small
from scalelong.reproduce.running import curves, last
from scalelong.stability.statements import Statement

DEPTHS = (12, 16)
PAPER = {  # read off at 30k steps; which layer is not stated
    12: {"none": 2.0e4, "1/√2": 1.4e4, "CS": 1.0e4, "LS": 1.05e4},
    16: {"none": 5.5e4, "1/√2": 3.6e4, "CS": 2.3e4, "LS": 2.1e4},
}
_RULE = (
    "At a depth, the norm of the main path as it meets the outermost skip, mean of the last ten observations, is "
    "smaller with CS and with LS than without: every seed of the one below every seed of the other. A "
    "run that diverged counts as infinite."
)


def variants() -> list[Any]:
    """Every scaling at both depths; depth 12 is the recipes' own."""
    deep = [v.also("depth 16", "model.changes.num_layers=16") for v in scalings()]
    return [*scalings(), *deep]


def collect(folders: Folders, store: Store) -> Data:
    """The norm at each depth."""
    found = curves(folders, "signals", "main norm/0")
    return {
        str(depth): {_plain(name): runs for name, runs in found.items() if _depth(name) == depth}
        for depth in DEPTHS
    }


def draw(data: Data) -> Any:
    """Ours as curves, the paper's 30k steps beside them."""
    figure, axes = panels(4)
    for place, depth in enumerate(DEPTHS):
        draw_curves(axes[2 * place], data[str(depth)], "‖h‖ at the outermost merge")
        axes[2 * place].set_title(f"ours, depth {depth}")
        draw_printed(axes[2 * place + 1], PAPER[depth], f"paper, depth {depth}, 30k steps", "‖h‖")
    return figure


def judge(data: Data) -> Statement:
    """Both depths, both methods."""
    checks = []
    for depth in DEPTHS:
        values = last(data[str(depth)], over=10)
        checks += [below(values, name, "none", f"the depth is {depth}") for name in ("CS", "LS")]
    return Statement(name="fig1", claim=REPRODUCTION.claim, rule=_RULE, checks=checks)


def _depth(name: str) -> int:
    return 16 if name.endswith("depth 16") else 12


def _plain(name: str) -> str:
    return name.split(",")[0]


REPRODUCTION = Reproduction(
    name="fig1",
    title="Fig. 1: norms of hidden features",
    claim="Skip scaling keeps hidden features smaller through training.",
    small=small(variants()),
    full=full(variants(), "train.steps=30000"),
    collect=collect,
    draw=draw,
    judge=judge,
)
