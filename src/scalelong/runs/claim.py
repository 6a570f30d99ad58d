"""A folder belongs to one training, or to one drawing of samples, at a time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]


@contextlib.contextmanager
def claimed(out: Path, doing: str = "training") -> Iterator[None]:
    """Make the folder and hold it; `doing` is what another one is told.

    The lock is the system's, on the folder itself: whoever is killed lets it go.
    """
    out.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    folder = os.open(out, os.O_RDONLY)
    try:
        _lock(folder, out, doing)
        yield
    finally:
        os.close(folder)


def _lock(folder: int, out: Path, doing: str) -> None:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(
            f"another process is {doing} in {out}; wait until it ends, stop it, or choose another --out."
        ) from error
    except OSError:  # a file system without locks
        return
