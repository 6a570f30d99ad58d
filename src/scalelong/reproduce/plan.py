"""What a figure or table of the paper needs: runs that share one recipe and differ in what is compared."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalelong.comparison import DIGITS_SETTINGS, Judging, Member
from scalelong.config import with_overrides
from scalelong.data.store import Store
from scalelong.presets import run_preset
from scalelong.stability.statements import Statement

Data = dict[str, Any]
Folders = Mapping[str, Sequence[Path]]  # a variant's name to the folders of its runs, one per seed
SCALINGS = {"none": "none", "1/√2": "1/sqrt2", "CS": "cs:0.7", "LS": "ls"}


@dataclass(frozen=True)
class Variant:
    """One line of a figure, one column of a table: its name, and what it changes of the recipe."""

    name: str
    settings: tuple[str, ...] = ()

    def also(self, name: str, *settings: str) -> Variant:
        """The same with more changes."""
        return Variant(f"{self.name}, {name}", (*self.settings, *settings))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every variant of a recipe with every seed. Plans that ask for the same run share its folder."""

    preset: str
    settings: tuple[str, ...]
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    judging: Judging | None

    def members(self, out: Path) -> list[Member]:
        """The runs, in folders named by what they change."""
        base = with_overrides(run_preset(self.preset), self.settings)
        return [
            Member(
                variant.name,
                seed,
                out / _folder(self.preset, variant, seed),
                with_overrides(base, [*variant.settings, f"train.seed={seed}"]),
                self.judging,
            )
            for seed in self.seeds
            for variant in self.variants
        ]


def scalings(names: Sequence[str] = tuple(SCALINGS)) -> tuple[Variant, ...]:
    """The paper's four, by the names that its legends have."""
    return tuple(Variant(name, (f"model.scaling={SCALINGS[name]}",)) for name in names)


def small(variants: Sequence[Variant], *settings: str) -> Plan:
    """Minutes on two cores: U-ViTs of depth 12 or more on the digits, three seeds, distances on pixels."""
    return Plan(
        preset="digits",
        settings=(*DIGITS_SETTINGS, "train.sample_every=600", "train.checkpoint_every=600"),
        variants=_all_with(variants, settings),
        seeds=(0, 1, 2),
        judging=Judging(features="pixels", num=512, steps=20, every=100),
    )


def full(variants: Sequence[Variant], *settings: str) -> Plan:
    """The paper's own setting on CIFAR-10: U-ViT-S/2 with its recipe, FID-10k by 50 steps of DPM-Solver++."""
    return Plan(
        preset="cifar10-uvit-s",
        settings=("train.checkpoint_every=10000",),
        variants=_all_with(variants, settings),
        seeds=(1234,),
        judging=Judging(features="inception", num=10_000, steps=50, every=10_000),
    )


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """A figure or table: what the paper shows, the runs at two sizes, and what is made of them.

    `collect` turns run folders (or the data alone) into plain numbers; `draw` and `judge` see those numbers and
    nothing else, so that figure and verdict can be made again from the data file.
    """

    name: str
    title: str
    claim: str
    small: Plan | None
    full: Plan | None
    collect: Callable[[Folders, Store], Data]
    draw: Callable[[Data], Any]
    judge: Callable[[Data], Statement]


def _all_with(variants: Sequence[Variant], settings: Sequence[str]) -> tuple[Variant, ...]:
    """What is changed for all is part of each variant, and so of its folder's name."""
    return tuple(Variant(variant.name, (*variant.settings, *settings)) for variant in variants)


def _folder(preset: str, variant: Variant, seed: int) -> str:
    changes = dict(setting.split("=", 1) for setting in variant.settings)
    parts = [changes.pop("model.scaling", "none")]
    parts += [f"{key.rpartition('.')[2]}-{value}" for key, value in sorted(changes.items())]
    readable = re.sub(r"[^\w.]+", "-", "_".join(parts))
    return f"{preset}/{readable}/seed{seed}"
