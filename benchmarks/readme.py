"""The README's table of speeds, from the newest result files: `python -m benchmarks.readme`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import RESULTS, Row, cells, heading, read

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
_ORDER = ("cifar10-uvit", "cifar10-unet", "imagenet64", "")  # the first that a run's name begins with


def newest() -> dict[str, Path]:
    """The newest file of each benchmark on a GPU; dates lead the names. How costs grow is the log's matter."""
    shown = (file for file in RESULTS.glob("*.json") if "-scaling-" not in file.name)
    files = sorted(file for file in shown if "CPU" not in read(file)[0].hardware)
    return {re.sub(r"^\d{4}-\d{2}-\d{2}-(throughput-)?", "", file.stem): file for file in files}


def section() -> str:
    """One table for each hardware, a row for each contender, with the run that it took part in."""
    rows = list(_rows())
    parts = []
    for hardware, torch in sorted({(row.hardware, row.torch) for _, row in rows}):
        lines = [
            heading("run"),
            *(cells(row, run) for run, row in rows if (row.hardware, row.torch) == (hardware, torch)),
        ]
        parts.append(f"{hardware}, torch {torch}:\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def _rows() -> Iterator[tuple[str, Row]]:
    place = lambda name: next(i for i, begin in enumerate(_ORDER) if name.startswith(begin))  # noqa: E731
    for name, file in sorted(newest().items(), key=lambda item: (place(item[0]), item[0])):
        for row in read(file):
            yield name, row


def updated(text: str) -> str:
    """The README with the section in place."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{section()}\n{END}{after}"


if __name__ == "__main__":
    README.write_text(updated(README.read_text()))
