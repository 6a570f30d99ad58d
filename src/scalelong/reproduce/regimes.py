"""Beyond the paper: which of depth × learning rate × batch × scaling diverge, spike or train. One picture."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from itertools import accumulate, product
from typing import Any

from scalelong.comparison import DIGITS_SETTINGS
from scalelong.data.store import Store
from scalelong.report.runs import read_run
from scalelong.reproduce.drawing import panels
from scalelong.reproduce.judging import luck
from scalelong.reproduce.plan import Data, Folders, Plan, Reproduction, Variant
from scalelong.stability.statements import Check, Statement
from scalelong.training.log import divergence

DEPTHS, RATES, BATCHES = (4, 12, 20), ("3e-3", "1e-2", "3e-2", "1e-1"), (8, 32)
# A constant ½ is where the gates of LS begin: what it does as well is not theirs.
NAMES = {"none": "none", "½": "uniform:0.5", "CS": "cs:0.7", "LS": "ls", "skip-norm": "skip-norm"}
OUTCOMES = ("trains", "spikes", "diverges", "never learns")
# One batch of 8 easily has twice the loss of another by its noise levels alone; means over 30 do not.
_WINDOW, _RISE, _LOST = 30, 1.5, 0.5
_CHANCE = 0.05
_RULE = (
    "More cells (depth, rate, batch, seed) are mended than spoilt, by so many that a coin would do as well with a "
    "probability below 5 %, divided by the number of scalings, as each of them has its chance. Cells of one seed "
    "and depth share their first weights, so that the coin is thrown once for all of them (sign-flip test)."
)


def variants() -> tuple[Variant, ...]:
    """The whole grid."""
    return tuple(
        Variant(
            f"{name}, {depth}, {rate}, {batch}",
            (
                f"model.scaling={scaling}",
                f"model.changes.num_layers={depth}",
                f"train.lr={rate}",
                f"train.batch_size={batch}",
            ),
        )
        for depth, rate, batch, (name, scaling) in product(DEPTHS, RATES, BATCHES, NAMES.items())
    )


def outcome(losses: list[float], diverged: bool) -> str:
    """What the losses of all steps show, by their means over 30 steps; predicting nothing has the loss 1.

    Spikes: a mean rose to 1.5 times the lowest before it. Diverges: not finite, or risen like that and above ½ in
    the end. Never learns: above ½ in the end without ever having been much better.
    """
    if diverged or not losses or not all(map(math.isfinite, losses)):
        return "diverges"
    means = [statistics.fmean(losses[i : i + _WINDOW]) for i in range(0, len(losses), _WINDOW)]
    if means[-1] > _LOST:
        return "diverges" if means[-1] > _RISE * min(means) else "never learns"
    lowest = accumulate(means, min)
    return "spikes" if any(mean > _RISE * low for mean, low in zip(means, lowest, strict=True)) else "trains"


def collect(folders: Folders, store: Store) -> Data:
    """The outcome of every run."""
    cells = []
    for name, runs in folders.items():
        scaling, depth, rate, batch = name.split(", ")
        for folder in runs:
            run, bad = read_run(folder), divergence(folder)
            losses = run.series("loss")[1]
            cells.append(
                {
                    "scaling": scaling,
                    "depth": int(depth),
                    "lr": rate,
                    "batch": int(batch),
                    "seed": run.config.train.seed,
                    "outcome": outcome(losses, bad is not None),
                    "last loss": statistics.median(losses[-10:]) if losses else None,
                    "diverged at": bad["step"] if bad is not None else None,
                }
            )
    return {"cells": cells}


def draw(data: Data) -> Any:
    """One panel per scaling: rows are depth and batch, columns the learning rate; a cell has a mark per seed."""
    cells = data["cells"]
    names = list(dict.fromkeys(cell["scaling"] for cell in cells))
    rates = list(dict.fromkeys(cell["lr"] for cell in cells))
    rows = sorted({(cell["batch"], cell["depth"]) for cell in cells})
    seeds = sorted({cell["seed"] for cell in cells})
    colours = dict(zip(OUTCOMES, ("#4c9f70", "#e8b04a", "#b3392f", "#6b5b73"), strict=True))
    figure, axes = panels(len(names), width=3.4, height=3.6)
    for place, name in zip(axes, names, strict=True):
        for cell in (c for c in cells if c["scaling"] == name):
            beside = (seeds.index(cell["seed"]) + 0.5) / len(seeds) - 0.5
            x, y = rates.index(cell["lr"]) + 0.8 * beside, rows.index((cell["batch"], cell["depth"]))
            place.scatter(x, y, marker="s", s=135 / max(3, len(seeds)), color=colours[cell["outcome"]])
        place.set_xticks(range(len(rates)), rates)
        place.set_yticks(range(len(rows)), [f"batch {b}, depth {d}" if place is axes[0] else "" for b, d in rows])
        place.set(title=name, xlabel="learning rate", xlim=(-0.5, len(rates) - 0.5), ylim=(-0.6, len(rows) - 0.4))
    for name in OUTCOMES:
        axes[-1].scatter([], [], marker="s", color=colours[name], label=name)
    figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=4)
    return figure


def judge(data: Data) -> Statement:
    """What each scaling wins and loses against the unscaled net in the same cell."""
    trains = {
        (c["scaling"], c["depth"], c["lr"], c["batch"], c["seed"]): c["outcome"] == "trains" for c in data["cells"]
    }
    names = dict.fromkeys(key[0] for key in trains if key[0] != "none")
    checks = []
    for name in names:
        pairs, balances = [], Counter[tuple[int, int]]()
        for (_, depth, *rest, seed), plain in ((key, t) for key, t in trains.items() if key[0] == "none"):
            scaled = trains[(name, depth, *rest, seed)]
            pairs.append((plain, scaled))
            balances[depth, seed] += scaled - plain
        won, lost = pairs.count((False, True)), pairs.count((True, False))
        fail = sum(not plain for plain, _ in pairs)
        nets = list(balances.values())
        chance, reverse, limit = luck(nets), luck([-net for net in nets]), _CHANCE / len(names)
        found = (
            f"it mends {won} of {fail} cells that fail, and spoils {lost} of {len(pairs) - fail} others; by luck: "
        )
        found += f"{reverse:.2g}, clearly the other way round" if reverse < limit else f"{chance:.2g}"
        checks.append(Check(f"the scaling is {name}", chance < limit, found))
    return Statement(name="regimes", claim=REPRODUCTION.claim, rule=_RULE, checks=checks)


REPRODUCTION = Reproduction(
    name="regimes",
    title="Regimes: where skip scaling buys stability",
    claim="Skip scaling widens the range of depth, learning rate and batch in which a net trains.",
    small=Plan(
        preset="digits",
        settings=(
            *DIGITS_SETTINGS,
            "train.steps=300",
            "train.sample_every=300",
            "train.checkpoint_every=300",
            "train.log_every=1",
        ),
        variants=variants(),
        seeds=(0, 1, 2),
        judging=None,
    ),
    full=None,
    collect=collect,
    draw=draw,
    judge=judge,
)
