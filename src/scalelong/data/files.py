"""Files that must be whole: checksums, and writes that have reached the disk."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def sha256(file: Path) -> str:
    """Checksum of a file, read in pieces."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_whole(file: Path, text: str) -> None:
    """Write a text so that a kill leaves the old file or the new one, never half of one."""
    partial = file.with_name(f".{file.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        sync(partial)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


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
