"""`scalelong`: the commands, and how their errors reach the user."""

from __future__ import annotations

import errno
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

import typer

from scalelong.cli import compare, evaluate, export, inspect, kappa, prepare, reproduce, sample, theory, train
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
    ("theory", theory.theory, theory.EXAMPLES),
    ("kappa", kappa.kappa, kappa.EXAMPLES),
    ("reproduce", reproduce.reproduce, reproduce.EXAMPLES),
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
    """Exit codes: 0 done, 1 failed, 2 bad usage, 130 stopped by Ctrl-C or SIGTERM.

    Bad input gets a sentence and no traceback.
    """
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _shown_once()
            app()
    except ValueError as error:
        _stop(2, str(error))
    except OSError as error:
        _stop(1, f"{error}{_advice(error.errno)}")
    except FloatingPointError as error:
        _stop(1, str(error))
    except Exception as error:
        # safetensors reports a full disk, and torch a full memory, in errors that are used for bugs, too.
        if number := re.search(r"\(os error (\d+)\)", str(error)):
            _stop(1, f"{error}{_advice(int(number[1]))}")
        if isinstance(error, MemoryError) or re.search("out of memory|allocate memory", str(error)):
            _stop(1, f"out of memory ({str(error).partition(chr(10))[0]}). {_LESS_MEMORY}")
        raise


_LESS_MEMORY = (
    "In training, train.accumulate=2 or train.checkpoint_activations=true need less of it; in sampling, a smaller "
    "--batch, and many images go into a folder."
)


def _stop(code: int, message: str) -> None:
    typer.echo(f"error: {message}", err=True)
    sys.exit(code)


def _shown_once() -> Callable[..., None]:
    """A warning is for the user here, not for who wrote the line that it came from: one from two lines is one."""
    told: set[str] = set()

    def show(message: Warning | str, *where: Any) -> None:
        if str(message) not in told:
            told.add(str(message))
            typer.echo(f"warning: {message}", err=True)

    return show


def _advice(number: int | None) -> str:
    """What to do about what the operating system refused."""
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return ". Free some space and give the same command again: what was saved before is whole."
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return ". Choose a place where you may write, with --out."
    if number in (errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EISDIR):
        return ". Check the path: its parents are folders where you may write."
    return ""
