"""Table 2: parts of the gate: its ratio, its activation, and a scalar or IE in its place."""

from __future__ import annotations

from typing import Any

from scalelong.data.store import Store
from scalelong.reproduce.drawing import draw_printed, draw_values, panels
from scalelong.reproduce.judging import below
from scalelong.reproduce.plan import Data, Folders, Reproduction, Variant, full, small
from scalelong.reproduce.running import last, quality
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


def collect(folders: Folders, store: Store) -> Data:
    """The last quality of every run."""
    found = quality(folders)
    return {"measure": found["measure"], "values": last(found["curves"])}


def draw(data: Data) -> Any:
    """Ours beside the paper's."""
    figure, axes = panels(2)
    draw_values(axes[0], data["values"], "ours", data["measure"])
    draw_printed(axes[1], PAPER, "paper, CIFAR-10, U-ViT-S/2", "FID-50k")
    return figure


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
    collect=collect,
    draw=draw,
    judge=judge,
)
