"""Table 1: quality of the four scalings. `--full` is its CIFAR-10 row for U-ViT-S/2."""

from __future__ import annotations

from typing import Any

from scalelong.reproduce.drawing import draw_beside
from scalelong.reproduce.judging import below
from scalelong.reproduce.plan import Data, Reproduction, full, scalings, small
from scalelong.reproduce.running import final_quality
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
_RULE = "It ends clearly below none and below 1/√2: every seed of the one below every seed of the other."


def draw(data: Data) -> Any:
    """Beside the paper's row for the same net."""
    return draw_beside(data, dict(zip(_NAMES, PAPER["CIFAR-10, U-ViT-S/2"], strict=True)))


def judge(data: Data) -> Statement:
    """Both methods against both others."""
    checks = [
        below(data["values"], name, other, f"the scaling is {name}")
        for name in ("CS", "LS")
        for other in ("none", "1/√2")
    ]
    return Statement(name="table1", claim=REPRODUCTION.claim, rule=_RULE, checks=checks)


REPRODUCTION = Reproduction(
    name="table1",
    title="Table 1: FID of the scalings",
    claim="CS and LS have better FID than 1/√2 and none, on every dataset and backbone.",
    small=small(scalings()),
    full=full(scalings()),
    collect=final_quality,
    draw=draw,
    judge=judge,
)
