"""A prepared dataset: one folder with memory-mapped uint8 images, labels, captions and a manifest with checksums.

A store of shards has, in the images' place, an index of where they lie in tars outside of it. Latents, where an
autoencoder was given, come beside the images, or in their place.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, Self

import numpy as np

from scalelong.data.files import sha256
from scalelong.data.images import Decoder
from scalelong.data.latents import LatentSpace
from scalelong.data.shards import ShardImages

if TYPE_CHECKING:
    from scalelong.data.contexts import StoredText

FORMAT, SHARDS_FORMAT = "scalelong-store-1", "scalelong-shards-1"
IMAGES, LABELS, CAPTIONS, INDEX = "images.npy", "labels.npy", "captions.jsonl", "index.npy"
LATENTS = "latents.npy"
MANIFEST, VERIFIED = "manifest.json", ".verified"
_HEADER_BYTES = 128


class StoreError(ValueError):
    """A folder that is no whole, unspoilt store."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a store holds and where it came from; written last, so that its presence means a whole store.

    `sha256` has a checksum for every file, the shards included; `shards` are their paths, relative to the store
    where they lie beside it, and `crop` how their images are cut (None: as they are). `text` is what encoded the
    captions, if anything did (`contexts.TextInfo`), `latents` what the store's latents are; with `latents_only`
    there are no images, and height, width, channels are what they had.
    """

    format: str
    source: str
    count: int
    height: int
    width: int
    channels: int
    classes: list[str] | None
    skipped: list[str]
    sha256: dict[str, str]
    shards: list[str] | None = None
    crop: str | None = None
    text: dict[str, Any] | None = None
    latents: LatentSpace | None = None
    latents_only: bool | None = None

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read manifest.json; every way in which it can be wrong gets a sentence."""
        file = folder / MANIFEST
        if not file.is_file():
            found = ", ".join(sorted(p.name for p in folder.iterdir())[:5]) if folder.is_dir() else "no such folder"
            raise StoreError(
                f"{folder} is no prepared dataset: it has no {MANIFEST} (found: {found or 'nothing'}); "
                f"make one {_how_to_prepare(folder)}"
            )
        try:
            manifest = cls(**json.loads(file.read_text(encoding="utf-8")))
            if manifest.latents is not None:
                manifest = replace(manifest, latents=LatentSpace(**manifest.latents))  # type: ignore[arg-type]
        except (TypeError, json.JSONDecodeError) as error:
            raise StoreError(f"{file} cannot be read ({error}); prepare the dataset again.") from error
        if manifest.format not in (FORMAT, SHARDS_FORMAT):
            raise StoreError(
                f"{file} has the format {manifest.format!r}, this version reads {FORMAT!r} and {SHARDS_FORMAT!r}."
            )
        return manifest


def _how_to_prepare(folder: Path) -> str:
    """Of a folder with files, which are perhaps the images: the store goes elsewhere."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return f"with: scalelong prepare SOURCE --out {folder}"
    out = Path("data") / folder.resolve().name
    if out.exists():
        out = out.with_name(f"{out.name}-prepared")
    return f"of its images with: scalelong prepare {folder} --size N --out {out}"


class NoImages:
    """The images of a store that keeps their latents alone: whoever asks for one gets a sentence."""

    dtype = np.dtype(np.uint8)

    def __init__(self, folder: Path, shape: tuple[int, ...]) -> None:
        self.folder, self.shape, self.nbytes = folder, shape, 0

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> NoReturn:
        raise StoreError(
            f"{self.folder} was prepared with --latents-only and keeps no images; give another store of the same "
            "data with --data, such as one of its validation images, or prepare it with them."
        )


@dataclass(frozen=True)
class Store:
    """Images [N, H, W, C] uint8, mapped not read (or decoded from shards when asked for), and labels [N] int64."""

    folder: Path
    manifest: Manifest
    images: np.ndarray[Any, np.dtype[np.uint8]] | ShardImages | NoImages
    labels: np.ndarray[Any, np.dtype[np.int64]] | None
    latents: np.ndarray[Any, np.dtype[np.float16]] | None = None  # [N, 2 flips, moments, h, w], mapped

    def __len__(self) -> int:
        return self.manifest.count

    @property
    def num_classes(self) -> int:
        """0 without labels."""
        return len(self.manifest.classes or ())

    @cached_property
    def captions(self) -> list[tuple[str, ...]] | None:
        """All captions of each image, or None; read when first asked for."""
        if CAPTIONS not in self.manifest.sha256:
            return None
        with (self.folder / CAPTIONS).open(encoding="utf-8") as lines:
            captions = [tuple(json.loads(line)) for line in lines]
        if len(captions) != len(self):
            raise StoreError(f"{self.folder / CAPTIONS} has {len(captions)} lines for {len(self)} images.")
        return captions

    @cached_property
    def text(self) -> StoredText | None:
        """The captions' contexts, mapped not read; None where they were not encoded."""
        from scalelong.data.contexts import open_text

        return open_text(self.folder, self.manifest.text, len(self)) if self.manifest.text is not None else None

    @cached_property
    def content(self) -> dict[str, str]:
        """A checksum of every part. Shards are told by their order, wherever they lie, and by how they are cut."""
        manifest = self.manifest
        if manifest.shards is None:
            return manifest.sha256
        inside = {name: checksum for name, checksum in manifest.sha256.items() if name not in manifest.shards}
        shards = {f"shard {i}": manifest.sha256[name] for i, name in enumerate(manifest.shards)}
        return {**inside, **shards, "crop": f"{manifest.crop or 'none'}, {manifest.width}×{manifest.height}"}

    @property
    def checksum(self) -> str:
        """One hash for the whole content: the key under which statistics of this data are cached."""
        return hashlib.sha256(json.dumps(self.content, sort_keys=True).encode()).hexdigest()


def open_store(folder: str | Path) -> Store:
    """Open a store; its checksums are verified the first time, and again when a file has changed."""
    folder = Path(folder)
    manifest = Manifest.read(folder)
    _verify(folder, manifest)
    labels = np.load(folder / LABELS, allow_pickle=False) if manifest.classes is not None else None
    return Store(folder, manifest, _open_images(folder, manifest), labels, _open_latents(folder, manifest))


def _open_latents(folder: Path, manifest: Manifest) -> np.ndarray[Any, np.dtype[np.float16]] | None:
    space = manifest.latents
    if space is None:
        return None
    latents = np.load(folder / LATENTS, mmap_mode="r", allow_pickle=False)
    shapes = [(manifest.count, 2, n * space.channels, space.height, space.width) for n in (1, 2)]
    if latents.shape not in shapes or latents.dtype != np.float16:
        raise StoreError(
            f"{folder / LATENTS} holds {latents.dtype} {latents.shape}, the manifest says float16 {shapes[1]}."
        )
    return latents


def _open_images(folder: Path, manifest: Manifest) -> np.ndarray[Any, np.dtype[np.uint8]] | ShardImages | NoImages:
    expected = (manifest.count, manifest.height, manifest.width, manifest.channels)
    if manifest.latents_only:
        return NoImages(folder, expected)
    if manifest.shards is not None:
        places = np.load(folder / INDEX, mmap_mode="r", allow_pickle=False)
        if places.shape != (manifest.count, 3):
            raise StoreError(f"{folder / INDEX} has the shape {places.shape}, not {(manifest.count, 3)}.")
        decoder = Decoder() if manifest.crop is None else Decoder(manifest.height, manifest.crop)
        return ShardImages([folder / name for name in manifest.shards], places, expected, decoder)
    images = np.load(folder / IMAGES, mmap_mode="r", allow_pickle=False)
    if images.shape != expected or images.dtype != np.uint8:
        raise StoreError(
            f"{folder / IMAGES} holds {images.dtype} {images.shape}, the manifest says uint8 {expected}."
        )
    return images


class ArrayWriter:
    """Appends arrays of one shape and type to a .npy file whose length is only known at the end."""

    def __init__(self, path: Path, dtype: type[np.generic] = np.uint8) -> None:
        self.dtype = np.dtype(dtype)
        self.file: BinaryIO = path.open("wb")
        self.file.write(b"\0" * _HEADER_BYTES)
        self.shape: tuple[int, ...] | None = None
        self.count = 0

    def append(self, array: np.ndarray[Any, Any]) -> None:
        """Add one array, such as an image [H, W, C]; all have the first one's shape."""
        if self.shape is None:
            self.shape = array.shape
        assert array.shape == self.shape
        assert array.dtype == self.dtype
        self.file.write(np.ascontiguousarray(array).data)
        self.count += 1

    def close(self) -> None:
        """Write the header over its place and let the file go."""
        text = repr({"descr": self.dtype.str, "fortran_order": False, "shape": (self.count, *(self.shape or ()))})
        body = text.encode().ljust(_HEADER_BYTES - 11) + b"\n"
        self.file.seek(0)
        self.file.write(b"\x93NUMPY\x01\x00" + len(body).to_bytes(2, "little") + body)
        self.file.close()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """The last file of a store. Its checksums were taken of these very files: they count as verified."""
    content = {k: v for k, v in asdict(manifest).items() if v is not None or k == "classes"}
    (folder / MANIFEST).write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
    (folder / VERIFIED).write_text(json.dumps(_stamps(folder, manifest)))


def _verify(folder: Path, manifest: Manifest) -> None:
    """Read again what is not as it was when it was last verified: shards may be terabytes."""
    stamps, marker = _stamps(folder, manifest), folder / VERIFIED
    known: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        known = dict(json.loads(marker.read_text()))
    changed = [name for name, stamp in stamps.items() if known.get(name) != stamp]
    for name in changed:
        if sha256(folder / name) != manifest.sha256[name]:
            raise StoreError(
                f"{folder / name} does not have the checksum that its manifest names: it was changed or damaged; "
                "prepare the dataset again."
            )
    if changed:
        with contextlib.suppress(OSError):  # a read-only store is verified each time
            marker.write_text(json.dumps(stamps))


def _stamps(folder: Path, manifest: Manifest) -> dict[str, list[Any]]:
    """What tells without reading that a file is still the same."""
    stamps = {}
    for name, checksum in manifest.sha256.items():
        if not (folder / name).is_file():
            outside = name in (manifest.shards or ())
            fix = "put it back, or prepare the shards again" if outside else "prepare the dataset again"
            raise StoreError(f"{folder} lacks {name}; {fix}.")
        stat = (folder / name).stat()
        stamps[name] = [stat.st_size, stat.st_mtime_ns, checksum]
    return stamps
