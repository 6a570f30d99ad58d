"""`scalelong theory`: the paper's statements, run as experiments."""

from __future__ import annotations

import shlex
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

from scalelong.cli.common import check_output_file, print_result, progress_bar

EXAMPLES = (
    "Examples: [bold]scalelong theory --out theory.html[/] or [bold]scalelong theory --data data/cifar10 --json > "
    "theory.json[/], and then [bold]scalelong report RUN --theory theory.json[/]"
)


def theory(
    data: Annotated[
        Path | None, typer.Option(help="A folder that prepare wrote: real images beside uniform ones.")
    ] = None,
    skips: Annotated[int, typer.Option(help="Long skips of the nets, N.")] = 6,
    width: Annotated[int, typer.Option(help="Width of the nets, m.")] = 256,
    inits: Annotated[int, typer.Option(help="How many first weights.")] = 24,
    seed: Annotated[int, typer.Option(help="The first of them.")] = 0,
    out: Annotated[Path, typer.Option(help="The page with the figures.")] = Path("theory.html"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """Test Lemma 3.2 and Theorems 3.1, 3.3 and 3.4 on the net of Eq. 3; each ends in a verdict. Half a minute."""
    from scalelong.data.store import open_store
    from scalelong.report.page import write_page
    from scalelong.report.theory import theory_sections
    from scalelong.stability.theorems import Settings
    from scalelong.stability.theory import run

    check_output_file(out, "theory.html")
    settings = Settings(num_skips=skips, width=width, inits=inits, seed=seed)
    store = None if data is None else open_store(data)
    with progress_bar(transient=True) as bar:
        task = bar.add_task("theory", total=6, note="")
        names: list[str] = []

        def watch(name: str) -> None:
            bar.update(task, completed=len(names), note=name)
            names.append(name)

        statements = [statement.as_dict() for statement in run(settings, store, watch)]
    lead = f"The nets of Eq. 3 with {skips} skips, width {width}, {inits} first weights from seed {seed}."
    command = shlex.join(["scalelong", *sys.argv[1:]])
    write_page("The theory of long skips, tested", lead, theory_sections(statements), out, command)
    if not as_json:
        width_of_terminal = shutil.get_terminal_size().columns
        typer.echo("\n\n".join(statement_text(statement, width_of_terminal) for statement in statements) + "\n")
    result = {"report": str(out), "statements": statements}
    print_result(result, as_json, f"The rules, figures and remarks: {out}")


def statement_text(statement: dict[str, Any], width: int) -> str:
    """The verdict, and under each condition, named once, what was found there."""
    lines = _wrapped(f"{statement['name']}: {statement['verdict']}", "", width)
    for where in dict.fromkeys(check["where"] for check in statement["checks"]):
        lines += _wrapped(f"where {where}:", "  ", width)
        for check in statement["checks"]:
            if check["where"] == where:
                lines += _wrapped(f"{_MARKS[check['holds']]} {check['found']}", "    ", width)
    return "\n".join(lines)


_MARKS = {True: "✓", False: "✗", None: "?"}


def _wrapped(text: str, indent: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False
    )
