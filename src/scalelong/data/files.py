"""Files that must be whole: checksums, and writes that have reached the disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def sha256(file: Path) -> str:
    """Checksum of a file, read in pieces."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def partial_of(file: Path) -> Path:
    """Where a file is written before it is whole."""
    return file.with_name(f".{file.name}.partial")


@contextmanager
def written_whole(file: Path) -> Iterator[Path]:
    """Where to write, so that a kill or a full disk leaves the old file or the new one, never half of one."""
    partial = partial_of(file)
    try:
        yield partial
        sync(partial)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(file: Path, text: str) -> None:
    """Write a text, whole or not at all."""
    with written_whole(file) as partial:
        partial.write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """The folder and everything in it."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)
