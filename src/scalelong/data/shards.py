"""Webdataset shards, for what is too large to decode whole: tars whose images are read where they lie.

`prepare` reads the tars once and writes down where each image is. With that index any image can be had by its
number, so that the stream of a store of shards is the one of every other store: a true permutation in each
epoch, a pure function of (seed, index), with nothing to save for a resume and no window in which alone images
mix. The price is a read at a random place per image, which disks without moving parts and object stores with
range reads do not mind; a spinning disk would. Every image is decoded once while the index is made: a broken
one is named then, not after days of training.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scalelong.data.images import (
    IMAGE_SUFFIXES,
    Decoder,
    Image,
    Item,
    Source,
    SourceError,
    as_captions,
    as_label,
    in_threads,
    numbered_classes,
    warn_of_left_out,
    worker_count,
)

Place = tuple[int, int, int]  # number of the shard, first byte, bytes
_SPLIT_WORDS = {"train", "training", "val", "validation", "valid", "test"}
_SEEN = "its key was there before, further up in the tar; a sample's files lie side by side"
_BLOCK = 512


class Sample(NamedTuple):
    """What a shard holds under one key."""

    name: str
    place: Place | None
    label: int | None
    captions: tuple[str, ...] | None
    error: str | None


def shards(path: Path, split: str, decoder: Decoder) -> Source:
    """A tar, or all tars of a folder, with KEY.jpg and KEY.cls, KEY.txt or KEY.json side by side."""
    files = _tars(path, split)
    samples = [sample for number, file in enumerate(files) for sample in _scan(number, file)]
    labels = [sample.label for sample in samples if sample.label is not None]

    def item(sample: Sample) -> Item:
        if sample.place is None:
            return Item(sample.name, None, None, sample.error)
        data = read_bytes(files[sample.place[0]], sample.place)
        return decoder.item(sample.name, data, sample.label, captions=sample.captions, place=sample.place)

    crop = decoder.crop if decoder.size is not None else None
    return Source(
        f"shards {path.name}",
        len(samples),
        numbered_classes(labels),
        lambda: in_threads(item, samples),
        tuple(files),
        crop,
    )


def _tars(path: Path, split: str) -> list[Path]:
    """The tars of a split, where their names tell splits; all of them otherwise."""
    files = [path] if path.is_file() else sorted(path.glob("*.tar"))
    if not files:
        others = ", ".join(sorted(p.name for p in path.iterdir())[:4]) or "nothing"
        raise SourceError(
            f"{path} holds no .tar, found {others}; shards are plain tars (gunzip what is compressed: images are "
            "read at their place)."
        )
    words = {file: _SPLIT_WORDS & set(re.split(r"[^a-z]+", file.name.lower())) for file in files}
    chosen = [file for file in files if any(word.startswith(split) for word in words[file])]
    if path.is_file() or not any(words.values()):
        return files
    if not chosen:
        raise SourceError(
            f"{path} has no shards of the split {split!r}; it has {files[0].name} …: choose with --split."
        )
    warn_of_left_out([file for file in files if not words[file]], split)
    return chosen


# Reading a tar


def _scan(number: int, file: Path) -> Iterator[Sample]:
    """The samples of one shard: neighbours whose names agree up to the first dot."""
    try:
        with tarfile.open(file, "r:") as tar:
            members = [member for member in tar.getmembers() if member.isreg()]
            _check_end(file, tar)
            seen: set[str] = set()
            for key, group in groupby(members, key=lambda member: _split_name(member.name)[0]):
                name = f"{file.name}/{key}"
                if key in seen:
                    yield Sample(name, None, None, None, _SEEN)
                else:
                    yield _sample(number, name, list(group), lambda m: tar.extractfile(m).read())  # type: ignore[union-attr]
                seen.add(key)
    except tarfile.TarError as error:
        raise SourceError(
            f"{file} is no whole, uncompressed tar ({error}); it was cut short or is something else: copy it again."
        ) from error


def _check_end(file: Path, tar: tarfile.TarFile) -> None:
    """A tar ends in blocks of zeros: one that was cut between two members would pass for a whole one."""
    with file.open("rb") as stream:
        stream.seek(tar.offset)
        if stream.read(_BLOCK) != bytes(_BLOCK):
            raise tarfile.ReadError("its end mark is missing")


def _split_name(name: str) -> tuple[str, str]:
    """a/b.c.jpg -> a/b and .c.jpg, as webdataset has it."""
    folder, slash, base = name.rpartition("/")
    stem, dot, suffix = base.partition(".")
    return f"{folder}{slash}{stem}", f"{dot}{suffix}".lower()


def _sample(
    number: int, name: str, members: list[tarfile.TarInfo], read: Callable[[tarfile.TarInfo], bytes]
) -> Sample:
    suffixes = [_split_name(member.name)[1] for member in members]
    parts = dict(zip(suffixes, members, strict=True))
    images = [suffix for suffix in parts if suffix in IMAGE_SUFFIXES]
    try:
        if len(parts) < len(members):
            twice = next(suffix for suffix in suffixes if suffixes.count(suffix) > 1)
            raise ValueError(f"a sample has one file of each kind, got {twice} twice")
        if len(images) != 1:
            raise ValueError(f"a sample has one image, got {', '.join(images or parts)}")
        label, captions = _notes({s: read(m) for s, m in parts.items() if s in (".cls", ".txt", ".json")})
    except ValueError as error:
        return Sample(name, None, None, None, str(error))
    image = parts[images[0]]
    return Sample(name, (number, image.offset_data, image.size), label, captions, None)


def _notes(texts: dict[str, bytes]) -> tuple[int | None, tuple[str, ...] | None]:
    """Label and captions: .cls a number, .txt a caption, .json an object with label, caption or captions."""
    found: dict[str, Any] = json.loads(texts[".json"]) if ".json" in texts else {}
    if not isinstance(found, dict):
        raise ValueError(f"its .json holds an object, got {type(found).__name__}")
    label = int(texts[".cls"]) if ".cls" in texts else found.get("label", found.get("cls"))
    said = texts[".txt"].decode() if ".txt" in texts else found.get("captions", found.get("caption"))
    return None if label is None else as_label(label), None if said is None else as_captions(said)


def read_bytes(file: Path, place: Place) -> bytes:
    """What lies at a place. The file is opened anew: there may be more shards than a process may hold open."""
    _, start, size = place
    with file.open("rb") as stream:
        stream.seek(start)
        data = stream.read(size)
    if len(data) != size:
        raise OSError(f"{file} ends before byte {start + size:,}: it was changed after it was indexed")
    return data


# Images by number


class ShardImages:
    """Images [N, H, W, C] that are decoded when they are asked for: the part of an array that a store needs."""

    dtype = np.dtype(np.uint8)

    def __init__(
        self,
        files: list[Path],
        places: np.ndarray[Any, np.dtype[np.int64]],
        shape: tuple[int, ...],
        decoder: Decoder,
    ) -> None:
        self.files, self.places, self.decoder = files, places, decoder
        self.shape = shape
        self._pool: ThreadPoolExecutor | None = None

    @property
    def nbytes(self) -> int:
        """Once decoded."""
        return int(np.prod(self.shape, dtype=np.int64))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: np.ndarray[Any, Any] | slice | int) -> Image:
        if isinstance(rows, int | np.integer):
            return self._image(int(rows))
        numbers = np.arange(*rows.indices(len(self))) if isinstance(rows, slice) else rows
        return self.gather(self.request(numbers))

    def request(self, rows: np.ndarray[Any, Any]) -> list[Future[Image]]:
        """Begin to decode."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(worker_count(), "shards")
        return [self._pool.submit(self._image, int(row)) for row in rows]

    def gather(self, requested: list[Future[Image]]) -> Image:
        """Wait for what `request` began: [len(requested), H, W, C]."""
        images = np.empty((len(requested), *self.shape[1:]), np.uint8)
        for image, future in zip(images, requested, strict=True):
            image[...] = future.result()
        return images

    def _image(self, row: int) -> Image:
        number, start, size = self.places[row].tolist()
        file = self.files[number]
        try:
            image = self.decoder(read_bytes(file, (number, start, size)))
            if image.shape != self.shape[1:]:
                raise ValueError(f"it has the shape {image.shape}, not {self.shape[1:]}")
        except Exception as error:  # Pillow raises whatever its decoders do
            raise OSError(
                f"image {row} cannot be read from {file} at byte {start:,} ({error}); the file was changed after "
                "it was indexed: put it back, or prepare the shards again."
            ) from error
        return image
