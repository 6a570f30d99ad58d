"""Table 4: CS against CS in the reversed direction, as training goes on."""

from __future__ import annotations

from typing import Any

from scalelong.data.store import Store
from scalelong.reproduce.drawing import draw_curves, panels
from scalelong.reproduce.judging import below
from scalelong.reproduce.plan import Data, Folders, Reproduction, Variant, full, scalings, small
from scalelong.reproduce.running import last, quality
from scalelong.stability.statements import Statement

STEPS = list(range(5, 50, 5))  # in thousands, as printed; with the authors' EMA they cannot be right
PAPER = {
    "CS": [85.19, 23.74, 15.36, 11.38, 10.02, 8.61, 7.92, 7.27, 6.65],
    "CS reversed": [67.26, 33.93, 22.78, 16.91, 15.01, 14.01, 12.96, 12.34, 12.26],
}
_RULE = "CS ends clearly below the reversed direction: every seed of the one below every seed of the other."


def variants() -> list[Variant]:
    """Both directions."""
    return [*scalings(["CS"]), Variant("CS reversed", ("model.scaling=cs-reversed:0.7",))]


def collect(folders: Folders, store: Store) -> Data:
    """The curves of quality."""
    return quality(folders)


def draw(data: Data) -> Any:
    """Ours beside the paper's."""
    figure, axes = panels(2)
    draw_curves(axes[0], data["curves"], data["measure"])
    axes[0].set_title("ours")
    printed = {name: [{"steps": [1000 * s for s in STEPS], "values": values}] for name, values in PAPER.items()}
    draw_curves(axes[1], printed, "FID-10k")
    axes[1].set_title("paper, batch 64 (steps as printed)")
    return figure


def judge(data: Data) -> Statement:
    """At the end."""
    checks = [below(last(data["curves"]), "CS", "CS reversed", "at the end")]
    return Statement(name="table4", claim=REPRODUCTION.claim, rule=_RULE, checks=checks)


REPRODUCTION = Reproduction(
    name="table4",
    title="Table 4: the direction of CS",
    claim="Coefficients must fall from the outermost skip to the innermost; reversed, quality is worse.",
    small=small(variants()),
    full=full(variants(), "train.batch_size=64"),
    collect=collect,
    draw=draw,
    judge=judge,
)
