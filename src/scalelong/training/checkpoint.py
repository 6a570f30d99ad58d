"""Checkpoints that survive being killed: written aside, synced, renamed, and only then are old ones pruned.

Tensors are safetensors, scalars JSON, and a manifest has a checksum of each file; nothing is pickled. A group of
tensors is a file, `model.safetensors`, or where processes hold parts of them (FSDP) a folder, `model/`, with a file
of each. Either is read into whole tensors or into the parts of any number of processes.
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
from scalelong.training import parts
from scalelong.training.sharding import fill
from scalelong.world import World

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
        """The whole tensors of one group, by name."""
        from safetensors.torch import load_file

        if not self._in_parts(name):
            return load_file(self.folder / f"{name}.safetensors")
        found = parts.empty_wholes(self.folder / name)
        parts.read_parts(self.folder / name, found)
        return found

    def load_into(self, name: str, targets: Mapping[str, Tensor]) -> None:
        """Fill a group's tensors, whole ones or this process' parts of them."""
        if different := sorted(self.keys(name) ^ targets.keys()):
            raise CheckpointError(f"{self.folder} and the model do not belong together: {name} has {different[0]}.")
        if self._in_parts(name):
            parts.read_parts(self.folder / name, targets)
            return
        saved = self.tensors(name)
        for key, target in targets.items():
            fill(target, saved[key])

    def keys(self, name: str) -> set[str]:
        """The names of a group's tensors."""
        from safetensors import safe_open

        if self._in_parts(name):
            return set(parts.empty_wholes(self.folder / name))
        with safe_open(self.folder / f"{name}.safetensors", framework="pt") as file:
            return set(file.keys())

    def _in_parts(self, name: str) -> bool:
        return (self.folder / name).is_dir()


def save(
    root: Path,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    keep: int,
    *,
    world: World | None = None,
    sharded: bool = False,
) -> Path:
    """Write `root/step-N`, N from the state, and of it and the older ones keep `keep`. Whole or not at all.

    All processes call it. The first one writes, or all do where the tensors are `sharded`; they leave together.
    """
    world = world or World()
    final = folder_of(root, state["step"])
    work = root / f"{_PARTIAL}{final.name}"
    try:
        if world.is_first:
            root.mkdir(parents=True, exist_ok=True)
            for left in root.glob(f"{_PARTIAL}*"):  # by a run that was killed while it wrote
                shutil.rmtree(left, ignore_errors=True)
            work.mkdir()
        world.wait()
        if sharded:
            sums = _write_parts(work, tensors, world)
        elif world.is_first:
            sums = _write_whole(work, tensors)
        if world.is_first:
            _finish(work, final, state, sums)
    except BaseException:
        if world.is_first:
            shutil.rmtree(work, ignore_errors=True)
        raise
    if world.is_first:
        # A later one is not whole, or this run would have gone on from it: it takes nobody's place.
        for old in [folder for folder in _folders(root) if folder <= final][:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    world.wait()
    return final


def _write_whole(work: Path, tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, str]:
    """Each group as one file; their checksums."""
    from safetensors.torch import save_file

    for name, group in tensors.items():
        save_file({key: t.detach().contiguous() for key, t in group.items()}, work / f"{name}.safetensors")
    return {file.name: sha256(file) for file in sorted(work.iterdir())}


def _write_parts(work: Path, tensors: Mapping[str, Mapping[str, Tensor]], world: World) -> dict[str, str]:
    """Each group as a folder, to which each process gives a file; the checksums of all."""
    for name, group in tensors.items():
        parts.write_parts(work / name, group)
    files = [file for name in tensors for file in parts.files_of(work / name, world.rank)]
    mine = {file.relative_to(work).as_posix(): sha256(file) for file in files}
    return {name: checksum for sums in world.gather_objects(mine) for name, checksum in sums.items()}


def copy(found: Checkpoint, root: Path) -> None:
    """Put a verified checkpoint into another run's folder, whole or not at all."""
    work = root / f"{_PARTIAL}{found.folder.name}"
    shutil.rmtree(work, ignore_errors=True)
    try:
        _copy_files(found.folder, work)
        sync_folder(work)
        shutil.rmtree(root / found.folder.name, ignore_errors=True)  # one that is damaged
        work.rename(root / found.folder.name)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    sync(root)


def _copy_files(folder: Path, to: Path) -> None:
    """What is in the files alone: a run that may not be written to gives a copy that may be pruned."""
    to.mkdir(parents=True)
    for path in sorted(folder.rglob("*")):  # folders before what is in them
        if path.is_dir():
            (to / path.relative_to(folder)).mkdir()
        else:
            shutil.copyfile(path, to / path.relative_to(folder))


def _finish(work: Path, final: Path, state: Mapping[str, Any], sums: dict[str, str]) -> None:
    """Add the scalars and the manifest, and put the folder in its place."""
    if missing := [name for name in sums if not (work / name).is_file()]:
        raise CheckpointError(
            f"the first process does not see {work / missing[0]}, which another one wrote; "
            "all processes write checkpoints to one folder that all of them see."
        )
    (work / STATE).write_text(json.dumps(dict(state)))
    (work / MANIFEST).write_text(json.dumps({**sums, STATE: sha256(work / STATE)}, indent=1))
    sync_folder(work)
    before = final.with_name(f"{_REPLACED}{final.name}")
    if final.exists():  # the same step again: what is there may be broken, or the only one
        shutil.rmtree(before, ignore_errors=True)
        final.rename(before)
    try:
        work.rename(final)
    except BaseException:
        if before.exists():
            before.rename(final)
        raise
    sync(final.parent)
    shutil.rmtree(before, ignore_errors=True)


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
