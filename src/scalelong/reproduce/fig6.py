"""Fig. 6: quality with small batches and deep nets."""

from __future__ import annotations

from typing import Any

from scalelong.data.store import Store
from scalelong.reproduce.drawing import draw_values, panels
from scalelong.reproduce.judging import below
from scalelong.reproduce.plan import Data, Folders, Reproduction, Variant, full, scalings, small
from scalelong.reproduce.running import last, quality
from scalelong.stability.statements import Statement

_RULE = (
    "In a setting, CS and LS both end clearly below none and below 1/√2: every seed of the one below every seed of "
    "the other."
)


def crossed(settings: dict[str, tuple[str, ...]]) -> list[Variant]:
    """Every scaling in every setting; the recipe's own setting has no changes."""
    return [v.also(name, *changes) if changes else v for name, changes in settings.items() for v in scalings()]


SMALL = {
    "batch 32, depth 12": (),
    "batch 8": ("train.batch_size=8",),
    "depth 16": ("model.changes.num_layers=16",),
}
FULL = {
    "batch 128, depth 12": (),
    "batch 64": ("train.batch_size=64",),
    "batch 32": ("train.batch_size=32",),
    "depth 16": ("model.changes.num_layers=16",),
}


def collect(folders: Folders, store: Store) -> Data:
    """The last quality of every run, by setting."""
    found = quality(folders)
    values: dict[str, dict[str, list[float]]] = {}
    for name, runs in last(found["curves"]).items():
        scaling, _, setting = name.partition(", ")
        values.setdefault(setting or "the recipe's own", {})[scaling] = runs
    return {"measure": found["measure"], "values": values}


def draw(data: Data) -> Any:
    """One panel per setting. (The paper prints this figure without numbers.)"""
    figure, axes = panels(len(data["values"]))
    for place, (setting, values) in zip(axes, data["values"].items(), strict=True):
        draw_values(place, values, setting, data["measure"])
    return figure


def judge(data: Data) -> Statement:
    """In each setting."""
    checks = [
        below(values, name, other, f"the setting is {setting}")
        for setting, values in data["values"].items()
        for name in ("CS", "LS")
        for other in ("none", "1/√2")
    ]
    return Statement(name="fig6", claim=REPRODUCTION.claim, rule=_RULE, checks=checks)


REPRODUCTION = Reproduction(
    name="fig6",
    title="Fig. 6: small batches, deep nets",
    claim="With small batches and deep nets CS and LS end better than 1/√2 and than none.",
    small=small(crossed(SMALL)),
    full=full(crossed(FULL)),
    collect=collect,
    draw=draw,
    judge=judge,
)
