"""A prepared dataset: one folder with memory-mapped uint8 images, labels and a manifest with checksums."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

from scalelong.data.files import sha256

FORMAT = "scalelong-store-1"
IMAGES, LABELS, MANIFEST, VERIFIED = "images.npy", "labels.npy", "manifest.json", ".verified"
_HEADER_BYTES = 128


class StoreError(ValueError):
    """A folder that is no whole, unspoilt store."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a store holds and where it came from; written last, so that its presence means a whole store."""

    format: str
    source: str
    count: int
    height: int
    width: int
    channels: int
    classes: list[str] | None
    skipped: list[str]
    sha256: dict[str, str]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read manifest.json; every way in which it can be wrong gets a sentence."""
        file = folder / MANIFEST
        if not file.is_file():
            found = ", ".join(sorted(p.name for p in folder.iterdir())[:5]) if folder.is_dir() else "no such folder"
            raise StoreError(
                f"{folder} is no prepared dataset: it has no {MANIFEST} (found: {found or 'nothing'}); "
                f"make one with: scalelong prepare SOURCE --out {folder}"
            )
        try:
            manifest = cls(**json.loads(file.read_text(encoding="utf-8")))
        except (TypeError, json.JSONDecodeError) as error:
            raise StoreError(f"{file} cannot be read ({error}); prepare the dataset again.") from error
        if manifest.format != FORMAT:
            raise StoreError(f"{file} has the format {manifest.format!r}, this version reads {FORMAT!r}.")
        return manifest


@dataclass(frozen=True)
class Store:
    """Images [N, H, W, C] uint8, mapped not read, and labels [N] int64 or None."""

    folder: Path
    manifest: Manifest
    images: np.ndarray[Any, np.dtype[np.uint8]]
    labels: np.ndarray[Any, np.dtype[np.int64]] | None

    def __len__(self) -> int:
        return self.manifest.count

    @property
    def num_classes(self) -> int:
        """0 without labels."""
        return len(self.manifest.classes or ())

    @property
    def checksum(self) -> str:
        """One hash for the whole content: the key under which statistics of this data are cached."""
        return hashlib.sha256(json.dumps(self.manifest.sha256, sort_keys=True).encode()).hexdigest()


def open_store(folder: str | Path) -> Store:
    """Open a store; its checksums are verified the first time, and again when a file has changed."""
    folder = Path(folder)
    manifest = Manifest.read(folder)
    _verify(folder, manifest)
    images = np.load(folder / IMAGES, mmap_mode="r", allow_pickle=False)
    expected = (manifest.count, manifest.height, manifest.width, manifest.channels)
    if images.shape != expected or images.dtype != np.uint8:
        raise StoreError(
            f"{folder / IMAGES} holds {images.dtype} {images.shape}, the manifest says uint8 {expected}."
        )
    labels = np.load(folder / LABELS, allow_pickle=False) if manifest.classes is not None else None
    return Store(folder, manifest, images, labels)


class ImageWriter:
    """Appends images of one shape to a .npy file whose length is only known at the end."""

    def __init__(self, path: Path) -> None:
        self.file: BinaryIO = path.open("wb")
        self.file.write(b"\0" * _HEADER_BYTES)
        self.shape: tuple[int, ...] | None = None
        self.count = 0

    def append(self, image: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Add one image [H, W, C]; all have the first one's shape."""
        if self.shape is None:
            self.shape = image.shape
        assert image.shape == self.shape
        assert image.dtype == np.uint8
        self.file.write(np.ascontiguousarray(image).data)
        self.count += 1

    def close(self) -> None:
        """Write the header over its place and let the file go."""
        text = repr({"descr": "|u1", "fortran_order": False, "shape": (self.count, *(self.shape or ()))})
        body = text.encode().ljust(_HEADER_BYTES - 11) + b"\n"
        self.file.seek(0)
        self.file.write(b"\x93NUMPY\x01\x00" + len(body).to_bytes(2, "little") + body)
        self.file.close()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """The last file of a store."""
    (folder / MANIFEST).write_text(json.dumps(asdict(manifest), indent=2, ensure_ascii=False), encoding="utf-8")


def _verify(folder: Path, manifest: Manifest) -> None:
    stamps = {}
    for name in manifest.sha256:
        if not (folder / name).is_file():
            raise StoreError(f"{folder} lacks {name}; prepare the dataset again.")
        stat = (folder / name).stat()
        stamps[name] = [stat.st_size, stat.st_mtime_ns, manifest.sha256[name]]
    marker = folder / VERIFIED
    if marker.is_file() and marker.read_text() == json.dumps(stamps):
        return
    for name, expected in manifest.sha256.items():
        if sha256(folder / name) != expected:
            raise StoreError(
                f"{folder / name} does not have the checksum that its manifest names: it was changed or damaged; "
                "prepare the dataset again."
            )
    with contextlib.suppress(OSError):  # a read-only store is verified each time
        marker.write_text(json.dumps(stamps))
