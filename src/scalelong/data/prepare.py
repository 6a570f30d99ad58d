"""`prepare`: decode a source once into a store. Interrupted, it leaves nothing that looks like a store."""

from __future__ import annotations

import json
import os
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from scalelong.data.files import sha256, sync, sync_folder
from scalelong.data.images import Image, Item, Source, SourceError, in_threads
from scalelong.data.latents import Autoencoder, as_float16, images_at_once
from scalelong.data.sources import digits
from scalelong.data.store import (
    CAPTIONS,
    FORMAT,
    IMAGES,
    INDEX,
    LABELS,
    LATENTS,
    MANIFEST,
    SHARDS_FORMAT,
    ArrayWriter,
    Manifest,
    Store,
    open_store,
    write_manifest,
)

if TYPE_CHECKING:
    from scalelong.data.text import TextEncoder

MAX_SKIPPED = 0.01


def prepare(
    source: Source,
    out: str | Path,
    *,
    progress: Callable[[Iterable[Item], int], Iterable[Item]] | None = None,
    text_encoder: TextEncoder | None = None,
    text_progress: Callable[[Iterable[Any], int], Iterable[Any]] | None = None,
    autoencoder: Autoencoder | None = None,
    latents_only: bool = False,
) -> Store:
    """Write `source` to the folder `out`, whole or not at all. `progress` wraps the items, to show a bar.

    With a `text_encoder` all captions are encoded, too; `text_progress` wraps their batches. With an `autoencoder`
    the images' latents are written beside them, or, with `latents_only`, in their place.
    """
    out = Path(out)
    if latents_only and autoencoder is None:
        raise SourceError("latents are made by an autoencoder, got latents_only without one; give --autoencoder.")
    if latents_only:
        source = replace(source, shards=None)
    _check_free(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the last step is a rename on one filesystem; readable for whom others' folders are.
    work = out.parent / f".{out.name}.partial-{uuid.uuid4().hex[:8]}"
    work.mkdir()
    try:
        _fill(work, out, source, progress, text_encoder, text_progress, autoencoder, latents_only)
        sync_folder(work)
        _check_free(out)  # another process may have been there first
        if out.is_dir():
            out.rmdir()
        work.rename(out)
        sync(out.parent)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    store = open_store(out)
    _warn_of_empty_classes(store)
    return store


def _check_free(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        what = "a prepared dataset" if (out / MANIFEST).is_file() else "something else"
        raise SourceError(f"{out} already holds {what}; choose another --out, or remove it first.")


def _fill(
    work: Path,
    out: Path,
    source: Source,
    progress: Callable[[Iterable[Item], int], Iterable[Item]] | None,
    text_encoder: TextEncoder | None,
    text_progress: Callable[[Iterable[Any], int], Iterable[Any]] | None,
    autoencoder: Autoencoder | None,
    latents_only: bool,
) -> None:
    latents = _LatentWriter(work / LATENTS, autoencoder) if autoencoder is not None else None
    writer = _Writer(work, source, latents, keep_images=not latents_only, needs_captions=text_encoder is not None)
    items: Iterable[Item] = source.items()
    for item in progress(items, source.count) if progress else items:
        writer.append(item)
    names = writer.close()
    text = None
    if text_encoder is not None:
        from scalelong.data.text import write_contexts

        with (work / CAPTIONS).open(encoding="utf-8") as lines:
            captions = [json.loads(line) for line in lines]
        text, files = write_contexts(work, captions, text_encoder, progress=text_progress)
        names += files
    checksums = {name: sha256(work / name) for name in names}
    shards = _shard_names(source.shards, out)
    if source.shards is not None and shards is not None:
        checksums |= dict(zip(shards, in_threads(sha256, source.shards), strict=True))
    height, width, channels = writer.shape
    manifest = Manifest(
        format=FORMAT if shards is None else SHARDS_FORMAT,
        source=source.description,
        count=writer.count,
        height=height,
        width=width,
        channels=channels,
        classes=source.classes,
        skipped=writer.skipped,
        sha256=checksums,
        shards=shards,
        crop=source.crop if shards is not None else None,
        text=text,
        latents=None if autoencoder is None else autoencoder.space(height, width, channels),
        latents_only=latents_only or None,
    )
    write_manifest(work, manifest)


class _Writer:
    """Items to files: pixels or places, labels where the source has classes, captions where the items have them."""

    def __init__(
        self,
        work: Path,
        source: Source,
        latents: _LatentWriter | None = None,
        keep_images: bool = True,
        needs_captions: bool = False,
    ) -> None:
        self.work, self.source, self.latents, self.needs_captions = work, source, latents, needs_captions
        self.pixels = ArrayWriter(work / IMAGES) if source.shards is None and keep_images else None
        self.captions = (work / CAPTIONS).open("w", encoding="utf-8")
        self.places: list[tuple[int, int, int] | None] = []
        self.labels: list[int | None] = []
        self.skipped: list[str] = []
        self.shape: tuple[int, ...] = ()
        self.captioned: bool | None = None
        self.count = 0

    def append(self, item: Item) -> None:
        if item.image is None:
            self.skipped.append(f"{item.name}: {item.error}")
            _check_skipped(self.skipped, self.source.count)
            return
        self._check(item, item.image)
        if self.latents is not None:
            self.latents.append(item.name, item.image)
        if self.pixels is not None:
            self.pixels.append(item.image)
        elif self.source.shards is not None:
            self.places.append(item.place)
        self.labels.append(item.label)
        if item.captions is not None:
            self.captions.write(json.dumps(item.captions, ensure_ascii=False) + "\n")
        self.count += 1

    def _check(self, item: Item, image: Image) -> None:
        if not self.count:
            self.shape, self.captioned = image.shape, item.captions is not None
            if self.needs_captions and not self.captioned:
                raise SourceError(
                    f"a text encoder reads captions, and {item.name} of {self.source.description} has none; name "
                    "their column with --caption-column, or leave --text-encoder out."
                )
        if image.shape != self.shape:
            (h, w, _), (h2, w2, _) = self.shape, image.shape
            raise SourceError(
                f"all images of a store have one size: the first is {w}×{h}, {item.name} is {w2}×{h2}; "
                "give --size N to crop and resize them all."
            )
        if self.source.classes is not None and item.label is None:
            raise SourceError(f"{item.name} has no label, and others have; label all images or none.")
        classes = self.source.classes
        if classes is not None and item.label is not None and not 0 <= item.label < len(classes):
            raise SourceError(
                f"{item.name} has the label {item.label}, and {self.source.description} has the classes 0 … "
                f"{len(classes) - 1}; mend its label, or leave it out."
            )
        if (item.captions is not None) != self.captioned:
            has = "no caption, and others have one" if self.captioned else "a caption, and others have none"
            raise SourceError(f"{item.name} has {has}; describe all images or none.")

    def close(self) -> list[str]:
        """Finish the files and name them."""
        self.captions.close()
        if self.pixels is not None:
            self.pixels.close()
        if not self.count:
            raise SourceError(
                f"{self.source.description} gave no images"
                + (f"; the first problem: {self.skipped[0]}" if self.skipped else ".")
            )
        names = [IMAGES] if self.pixels is not None else []
        if self.source.shards is not None:
            np.save(self.work / INDEX, np.asarray(self.places, np.int64))
            names = [INDEX]
        if self.latents is not None:
            self.latents.close()
            names.append(LATENTS)
        if self.source.classes is not None:
            np.save(self.work / LABELS, np.asarray(self.labels, np.int64))
            names.append(LABELS)
        if self.captioned:
            names.append(CAPTIONS)
        else:
            (self.work / CAPTIONS).unlink()
        return names


class _LatentWriter:
    """Images to latents, as many at once as the autoencoder takes."""

    def __init__(self, path: Path, autoencoder: Autoencoder) -> None:
        self.autoencoder = autoencoder
        self.file = ArrayWriter(path, np.float16)
        self.names: list[str] = []
        self.waiting: list[Image] = []

    def append(self, name: str, image: Image) -> None:
        if not self.waiting and not self.file.count:
            self.autoencoder.check(*image.shape)
        self.names.append(name)
        self.waiting.append(image)
        if len(self.waiting) == images_at_once(*image.shape[:2]):
            self._write()

    def _write(self) -> None:
        moments = self.autoencoder.moments(torch.from_numpy(np.stack(self.waiting)))
        for both_flips in as_float16(moments, self.names):
            self.file.append(both_flips)
        self.names, self.waiting = [], []

    def close(self) -> None:
        """Encode what is left."""
        if self.waiting:
            self._write()
        self.file.close()


def _shard_names(shards: tuple[Path, ...] | None, out: Path) -> list[str] | None:
    """Relative for shards that lie beside the store, so that both can be moved together; else absolute."""
    if shards is None:
        return None
    beside = out.parent.resolve()
    files = [file.resolve() for file in shards]
    return [
        os.path.relpath(file, beside / out.name) if file.is_relative_to(beside) else str(file) for file in files
    ]


def _check_skipped(skipped: list[str], count: int) -> None:
    """A few broken files are skipped and named; many mean that something else is wrong."""
    if len(skipped) > max(1, MAX_SKIPPED * count):
        shown = "\n  ".join(skipped[:5])
        raise SourceError(
            f"{len(skipped)} of {count} images could not be read, more than {MAX_SKIPPED:.0%}; mend or remove "
            f"them. The first:\n  {shown}"
        )


def _warn_of_empty_classes(store: Store) -> None:
    """Labels with gaps make classes that no image teaches."""
    if store.labels is None:
        return
    empty = np.flatnonzero(np.bincount(store.labels, minlength=store.num_classes) == 0).tolist()
    if empty:
        shown = ", ".join((store.manifest.classes or [])[i] for i in empty[:3]) + (" …" if len(empty) > 3 else "")
        warnings.warn(
            f"{len(empty):,} of {store.num_classes:,} classes have no image ({shown}): a run by class "
            "learns nothing of them and draws them all the same; leave them out (numbers go from 0 on without "
            "gaps), or draw the others alone, with sample --class.",
            stacklevel=3,
        )


def open_data(path: Path | None) -> Store:
    """A prepared dataset; without a path the digits, prepared once in the user's cache folder."""
    if path is not None:
        return open_store(path)
    cached = digits_folder()
    try:
        return open_store(cached) if cached.is_dir() else prepare(digits(), cached)
    except (SourceError, OSError):
        if cached.is_dir():  # another process was faster
            return open_store(cached)
        raise


def digits_folder() -> Path:
    """Where the digits are kept, once they were prepared."""
    return Path("~/.cache/scalelong/digits").expanduser()
