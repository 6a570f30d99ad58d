"""Checkpoints that survive being killed: written aside, synced, renamed, and only then are old ones pruned.

Tensors are safetensors, scalars JSON, and a manifest has a checksum of each file; nothing is pickled.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from scalelong.data.files import sha256, sync, sync_folder

MANIFEST, STATE = "manifest.json", "state.json"
_PREFIX, _PARTIAL, _REPLACED = "step-", ".partial-", ".replaced-"


class CheckpointError(ValueError):
    """A checkpoint that is not whole, or not what its manifest says."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint on disk."""

    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """How many updates the weights have had."""
        return int(self.state["step"])

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of one file, by name."""
        from safetensors.torch import load_file

        return load_file(self.folder / f"{name}.safetensors")


def save(root: Path, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any], keep: int) -> Path:
    """Write `root/step-N`, N from the state, and prune all but the newest `keep`. Whole or not at all."""
    from safetensors.torch import save_file

    root.mkdir(parents=True, exist_ok=True)
    final = folder_of(root, state["step"])
    work = root / f"{_PARTIAL}{final.name}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        for name, group in tensors.items():
            save_file({key: t.detach().contiguous() for key, t in group.items()}, work / f"{name}.safetensors")
        (work / STATE).write_text(json.dumps(dict(state)))
        sums = {file.name: sha256(file) for file in sorted(work.iterdir())}
        (work / MANIFEST).write_text(json.dumps(sums, indent=1))
        sync_folder(work)
        before = root / f"{_REPLACED}{final.name}"
        if final.exists():  # the same step again: what is there may be broken, or the only one
            shutil.rmtree(before, ignore_errors=True)
            final.rename(before)
        try:
            work.rename(final)
        except BaseException:
            if before.exists():
                before.rename(final)
            raise
        sync(root)
        shutil.rmtree(before, ignore_errors=True)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    for old in _folders(root)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def folder_of(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return root / f"{_PREFIX}{step:09d}"


def load_latest(root: Path) -> Checkpoint | None:
    """The newest whole checkpoint. Broken ones are named and passed over; None where there is none."""
    for folder in reversed(_folders(root)):
        try:
            return load(folder)
        except CheckpointError as error:
            warnings.warn(f"{error} It is passed over.", stacklevel=2)
    return None


def load(folder: Path) -> Checkpoint:
    """Open one checkpoint after verifying every file against the manifest."""
    try:
        sums = json.loads((folder / MANIFEST).read_text())
        for name, expected in sums.items():
            if sha256(folder / name) != expected:
                raise CheckpointError(f"the checkpoint {folder} is damaged: {name} does not have its checksum.")
        return Checkpoint(folder, json.loads((folder / STATE).read_text()))
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"the checkpoint {folder} is not whole ({error}).") from error


def _folders(root: Path) -> list[Path]:
    for before in root.glob(f"{_REPLACED}*"):  # killed between two renames: what was replaced is still whole
        final = root / before.name.removeprefix(_REPLACED)
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            if not final.exists():
                before.rename(final)
    return sorted(f for f in root.glob(f"{_PREFIX}*") if f.is_dir()) if root.is_dir() else []
