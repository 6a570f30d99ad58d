"""What a reproduction leaves: its data, and the figure and the verdict that are made from that file alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scalelong.data.files import write_whole
from scalelong.reproduce.plan import Data, Reproduction
from scalelong.stability.statements import Statement
from scalelong.training.log import for_json, from_json

DATA, VERDICT, FIGURE = "data.json", "verdict.json", "figure"


def write_data(folder: Path, values: Data, about: Data) -> None:
    """The numbers, and how they came about."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / DATA, _json({"about": about, "values": values}))


def _json(data: Data) -> str:
    return json.dumps(for_json(data), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def conclude(what: Reproduction, folder: Path) -> Statement:
    """Read the data file; draw the figure and write the verdict beside it."""
    file = folder / DATA
    if not file.is_file():
        raise ValueError(f"{folder} has no {DATA}; scalelong reproduce {what.name} makes it.")
    values = from_json(json.loads(file.read_text()))["values"]
    try:
        statement = what.judge(values)
        figure = what.draw(values)
    except KeyError as error:
        raise ValueError(
            f"{file} is not as scalelong reproduce {what.name} writes it now ({error} is unknown or missing); run "
            "that again: what is trained stays."
        ) from error
    write_whole(folder / VERDICT, _json(statement.as_dict()))
    _save(figure, what, statement, folder)
    return statement


def _save(figure: Any, what: Reproduction, statement: Statement, folder: Path) -> None:
    figure.suptitle(f"{what.title} — {statement.verdict}", fontsize=10, wrap=True)
    for ending in ("svg", "png"):
        figure.savefig(folder / f"{FIGURE}.{ending}", dpi=110)
