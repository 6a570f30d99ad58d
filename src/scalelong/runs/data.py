"""What a run remembers of its data, to know them again when it goes on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from scalelong.config import RunConfig, from_dict, to_dict
from scalelong.data.contexts import TEXT, TEXT_INDEX
from scalelong.data.files import write_whole
from scalelong.data.store import CAPTIONS, LABELS, LATENTS, Store

DATA = "data.json"
_BESIDE_IMAGES = (LABELS, CAPTIONS, LATENTS, TEXT, TEXT_INDEX)
_NAMED = 3  # parts that differ, in a sentence: there may be thousands of shards


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Data by the checksums of what a run reads of them, and the names of their classes for a run by class; where
    they lay and came from is for people.
    """

    folder: str
    source: str
    count: int
    sha256: dict[str, str]
    classes: tuple[str, ...] | None = None

    @classmethod
    def read(cls, out: Path) -> Self | None:
        """What is kept in a run's folder; None in one of a version that kept nothing."""
        file = out / DATA
        if not file.is_file():
            return None
        try:
            return from_dict(cls, json.loads(file.read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{file} is not as train wrote it ({error}); put it back.") from error

    def write(self, out: Path) -> None:
        """Into a run's folder."""
        write_whole(out / DATA, json.dumps(to_dict(self), indent=2, ensure_ascii=False))


def data_of(config: RunConfig, store: Store) -> RunData:
    """The parts of a store that a run of this config reads.

    What it does not read may change: the same images with latents or captions beside them are the same to a run on
    pixels. Of text it is the captions, as their encoder is compared apart, and not to the last bit.
    """
    read = {LATENTS} if config.data.space == "latents" else store.content.keys() - set(_BESIDE_IMAGES)
    read |= {"class": {LABELS}, "text": {CAPTIONS}, "none": set()}[config.data.condition]
    names = store.manifest.classes if config.data.condition == "class" else None
    return RunData(
        folder=str(store.folder.resolve()),  # a run is not always asked from the same folder
        source=store.manifest.source,
        count=len(store),
        classes=None if names is None else tuple(names),
        sha256={name: checksum for name, checksum in store.content.items() if name in read},
    )


def check_same_data(kept: RunData, given: RunData, out: Path) -> None:
    """Refuse to go on with other data than a run began with."""
    if kept.sha256 == given.sha256:
        return
    names = sorted({name for name, _ in kept.sha256.items() ^ given.sha256.items()})
    named = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
    raise ValueError(
        f"{out} was trained on {kept.source} ({kept.count:,} images, in {kept.folder}), and {given.folder} holds "
        f"other data: {given.source} ({given.count:,} images), with another {named}. Give the run's "
        "own data, or choose another --out."
    )
