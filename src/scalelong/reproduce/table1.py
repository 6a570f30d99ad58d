"""Table 1: quality of the four scalings. `--full` is its CIFAR-10 row for U-ViT-S/2."""

from __future__ import annotations

from typing import Any

from scalelong.data.store import Store
from scalelong.reproduce.drawing import draw_printed, draw_values, panels
from scalelong.reproduce.judging import below
from scalelong.reproduce.plan import Data, Folders, Reproduction, full, scalings, small
from scalelong.reproduce.running import last, quality
from scalelong.stability.statements import Statement

PAPER = {
    "CIFAR-10, UNet 36M": (3.17, 3.14, 3.05, 3.07),
    "CIFAR-10, U-ViT-S/2": (3.11, 3.11, 2.98, 3.01),
    "CelebA 64, U-ViT-S": (2.87, 3.15, 2.78, 2.73),
    "ImageNet 64, UNet 144M": (3.77, 3.66, 3.48, 3.39),
    "ImageNet 64, U-ViT-M/4": (5.85, 5.80, 5.68, 5.75),
    "ImageNet 64, U-ViT-L/4": (4.26, 4.20, 3.83, 4.08),
    "COCO, UNet": (7.32, 7.19, 7.04, 6.89),
    "COCO, U-ViT-S/2": (5.95, 5.88, 5.77, 5.60),
}
_NAMES = ("none", "1/√2", "CS", "LS")
_RULE = "A scaling ends clearly below none: every seed of the one below every seed of the other."


def collect(folders: Folders, store: Store) -> Data:
    """The last quality of every run."""
    found = quality(folders)
    return {"measure": found["measure"], "values": last(found["curves"])}


def draw(data: Data) -> Any:
    """Ours beside the paper's row for the same net."""
    figure, axes = panels(2)
    draw_values(axes[0], data["values"], "ours", data["measure"])
    printed = dict(zip(_NAMES, PAPER["CIFAR-10, U-ViT-S/2"], strict=True))
    draw_printed(axes[1], printed, "paper, CIFAR-10, U-ViT-S/2", "FID-50k")
    return figure


def judge(data: Data) -> Statement:
    """Each scaling against none."""
    checks = [below(data["values"], name, "none", f"the scaling is {name}") for name in ("1/√2", "CS", "LS")]
    return Statement(name="table1", claim=REPRODUCTION.claim, rule=_RULE, checks=checks)


REPRODUCTION = Reproduction(
    name="table1",
    title="Table 1: FID of the scalings",
    claim="CS and LS have better FID than 1/√2 and none, on every dataset and backbone.",
    small=small(scalings()),
    full=full(scalings()),
    collect=collect,
    draw=draw,
    judge=judge,
)
