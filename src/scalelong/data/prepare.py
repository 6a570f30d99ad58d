"""`prepare`: decode a source once into a store. Interrupted, it leaves nothing that looks like a store."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from scalelong.data.files import sha256, sync, sync_folder
from scalelong.data.sources import Item, Source, SourceError
from scalelong.data.store import (
    FORMAT,
    IMAGES,
    LABELS,
    MANIFEST,
    ImageWriter,
    Manifest,
    Store,
    open_store,
    write_manifest,
)

MAX_SKIPPED = 0.01


def prepare(
    source: Source, out: str | Path, *, progress: Callable[[Iterable[Item], int], Iterable[Item]] | None = None
) -> Store:
    """Write `source` to the folder `out`, whole or not at all. `progress` wraps the items, to show a bar."""
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        what = "a prepared dataset" if (out / MANIFEST).is_file() else "something else"
        raise SourceError(f"{out} already holds {what}; choose another --out, or remove it first.")
    out.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the last step is a rename on one filesystem.
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
    try:
        _fill(work, source, progress)
        sync_folder(work)
        if out.is_dir():
            out.rmdir()
        work.rename(out)
        sync(out.parent)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return open_store(out)


def _fill(work: Path, source: Source, progress: Callable[[Iterable[Item], int], Iterable[Item]] | None) -> None:
    writer, labels, skipped = ImageWriter(work / IMAGES), [], []
    items: Iterable[Item] = source.items()
    for item in progress(items, source.count) if progress else items:
        if item.image is None:
            skipped.append(f"{item.name}: {item.error}")
            _check_skipped(skipped, source.count)
            continue
        if writer.shape is not None and item.image.shape != writer.shape:
            (h, w, _), (h2, w2, _) = writer.shape, item.image.shape
            raise SourceError(
                f"all images of a store have one size: the first is {w}×{h}, {item.name} is {w2}×{h2}; "
                "give --size N to crop and resize them all."
            )
        if source.classes is not None and item.label is None:
            raise SourceError(f"{item.name} has no label, and others have; label all images or none.")
        writer.append(item.image)
        labels.append(item.label)
    writer.close()
    if not writer.count or writer.shape is None:
        raise SourceError(
            f"{source.description} gave no images" + (f"; the first problem: {skipped[0]}" if skipped else ".")
        )
    names = [IMAGES]
    if source.classes is not None:
        np.save(work / LABELS, np.asarray(labels, np.int64))
        names.append(LABELS)
    height, width, channels = writer.shape
    manifest = Manifest(
        format=FORMAT,
        source=source.description,
        count=writer.count,
        height=height,
        width=width,
        channels=channels,
        classes=source.classes,
        skipped=skipped,
        sha256={name: sha256(work / name) for name in names},
    )
    write_manifest(work, manifest)


def _check_skipped(skipped: list[str], count: int) -> None:
    """A few broken files are skipped and named; many mean that something else is wrong."""
    if len(skipped) > max(1, MAX_SKIPPED * count):
        shown = "\n  ".join(skipped[:5])
        raise SourceError(
            f"{len(skipped)} of {count} images could not be read, more than {MAX_SKIPPED:.0%}; the first:\n"
            f"  {shown}"
        )
