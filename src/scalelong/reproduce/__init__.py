"""The paper's figures and tables as commands, one module each: the runs, the figure, the verdict."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scalelong.reproduce.plan import Reproduction

NAMES = (
    "fig1",
    "fig3a",
    "fig3b",
    "fig3c",
    "fig5",
    "fig6",
    "fig7",
    "table1",
    "table2",
    "table3",
    "table4",
    "regimes",
    "beyond",
)


def reproduction_named(name: str) -> Reproduction:
    """The figure or table of this name; an unknown one gets the list."""
    if name not in NAMES:
        raise ValueError(f"there is no figure or table named {name!r}; there is {', '.join(NAMES)}.")
    found: Reproduction = importlib.import_module(f"scalelong.reproduce.{name}").REPRODUCTION
    return found
