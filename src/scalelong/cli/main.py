"""`scalelong`: the commands, and how their errors reach the user."""

from __future__ import annotations

import sys

import typer

from scalelong.cli import compare, evaluate, export, inspect, prepare, sample, train
from scalelong.version import __version__

app = typer.Typer(
    name="scalelong",
    help="Scale the long skip connections of diffusion UNets and U-ViTs, for stabler training.",
    epilog="Example: scalelong inspect cifar10-uvit-s --scaling cs:0.7",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for name, command, examples in (
    ("inspect", inspect.inspect, inspect.EXAMPLES),
    ("prepare", prepare.prepare, prepare.EXAMPLES),
    ("train", train.train, train.EXAMPLES),
    ("sample", sample.sample, sample.EXAMPLES),
    ("evaluate", evaluate.evaluate, evaluate.EXAMPLES),
    ("export", export.export, export.EXAMPLES),
    ("compare", compare.compare, compare.EXAMPLES),
    ("report", compare.report, compare.REPORT_EXAMPLES),
):
    app.command(name, epilog=examples)(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"scalelong {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass


def main() -> None:
    """Exit codes: 0 done, 1 failed, 2 bad usage. Bad input gets its sentence and no traceback."""
    try:
        app()
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except (OSError, FloatingPointError) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
