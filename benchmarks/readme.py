"""Put the newest results into README.md, between its marks: `python -m benchmarks.readme`."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.measure import RESULTS, read, table

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"


def newest() -> dict[str, Path]:
    """The newest file of each benchmark on a GPU; dates lead the names."""
    files = sorted(file for file in RESULTS.glob("*.json") if "CPU" not in read(file)[0].hardware)
    return {re.sub(r"^\d{4}-\d{2}-\d{2}-", "", file.stem): file for file in files}


def section() -> str:
    """One table per benchmark, with its date and hardware."""
    parts = []
    for name, file in sorted(newest().items(), reverse=True):
        rows = read(file)
        parts.append(f"`{file.name}`: {name}, {rows[0].hardware}, torch {rows[0].torch}\n\n{table(rows)}")
    return "\n\n".join(parts)


def updated(text: str) -> str:
    """The README with the section in place."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{section()}\n{END}{after}"


if __name__ == "__main__":
    README.write_text(updated(README.read_text()))
