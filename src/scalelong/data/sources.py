"""Where images come from. A source yields (name, image, label) one by one; `prepare` writes them down.

Images are uint8 [H, W, C]. A source that cannot decode an image yields the error in its place.
"""

from __future__ import annotations

import io
import pickle
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

Image = np.ndarray[Any, np.dtype[np.uint8]]
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


class SourceError(ValueError):
    """A source that is not what it was taken for."""


@dataclass(frozen=True)
class Item:
    """One image with its name and label, or the reason why it cannot be had."""

    name: str
    image: Image | None
    label: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class Source:
    """A stream of items; `count` is how many to expect, `classes` the labels' names where there are labels."""

    description: str
    count: int
    classes: list[str] | None
    items: Callable[[], Iterator[Item]]


def open_source(
    source: str, *, split: str = "train", size: int | None = None, image_column: str = "image"
) -> Source:
    """Recognise a source: `digits`, CIFAR-10 in any of its forms, parquet, a Hugging Face dataset, a folder."""
    if source == "digits":
        return digits()
    path = Path(source).expanduser()
    if source.startswith("hf:"):
        return hugging_face(source.removeprefix("hf:"), split, size, image_column)
    if not path.exists():
        raise SourceError(
            f"there is no file or folder {source!r}; a source is 'digits', a path, or 'hf:NAME' for a dataset "
            "of the hub."
        )
    if path.is_file():
        if path.suffix == ".parquet":
            return parquet([path], size, image_column)
        if tarfile.is_tarfile(path):
            return cifar10_tar(path, split)
        raise SourceError(f"{path} is neither a parquet file nor a CIFAR-10 tar; give a folder for single images.")
    for recognise in (cifar10_packed, cifar10_batches):
        if (found := recognise(path, split)) is not None:
            return found
    if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
        return hugging_face(str(path), split, size, image_column)
    if (files := sorted(path.glob("*.parquet"))) and not any(path.glob("*/*")):
        chosen = [f for f in files if f.name.startswith(split)] or files
        return parquet(chosen, size, image_column)
    return image_folder(path, size)


# Single images


def decode(data: bytes | Path, size: int | None = None) -> Image:
    """Decode to RGB; with `size`, the centre square resized to it (Lanczos)."""
    from PIL import Image as Pillow

    with Pillow.open(io.BytesIO(data) if isinstance(data, bytes) else data) as file:
        picture = file.convert("RGB")
        if size is not None:
            side = min(picture.size)
            left, top = (picture.width - side) // 2, (picture.height - side) // 2
            square = picture.crop((left, top, left + side, top + side))
            picture = square.resize((size, size), Pillow.Resampling.LANCZOS)
        return np.asarray(picture, dtype=np.uint8)


def _item(name: str, data: bytes | Path, size: int | None, label: int | None) -> Item:
    try:
        return Item(name, decode(data, size), label)
    except Exception as error:  # Pillow raises whatever its decoders do
        return Item(name, None, label, f"{type(error).__name__}: {error}")


def image_folder(folder: Path, size: int | None) -> Source:
    """Every image below a folder. First-level subfolders, where all images are in some, are the classes."""
    files = sorted(p for p in folder.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES and p.is_file())
    if not files:
        others = sorted({p.suffix or "(no suffix)" for p in folder.rglob("*") if p.is_file()})[:6]
        raise SourceError(
            f"no images in {folder}: looked for {', '.join(IMAGE_SUFFIXES)} below it, found "
            f"{', '.join(others) if others else 'no files'}."
        )
    tops = [p.relative_to(folder).parts[0] if len(p.relative_to(folder).parts) > 1 else None for p in files]
    labelled = [top for top in tops if top is not None]
    if labelled and len(labelled) < len(files):
        loose = files[tops.index(None)].name
        raise SourceError(
            f"{folder} mixes class subfolders with {len(files) - len(labelled)} loose images (the first: {loose}); "
            "put every image into a class folder, or none."
        )
    classes = sorted(set(labelled)) or None
    index = {name: i for i, name in enumerate(classes or ())}

    def items() -> Iterator[Item]:
        for file, top in zip(files, tops, strict=True):
            yield _item(str(file.relative_to(folder)), file, size, index[top] if top is not None else None)

    return Source(f"image folder {folder.name}", len(files), classes, items)


# Tables


def parquet(files: list[Path], size: int | None, image_column: str) -> Source:
    """Parquet files with an image column (bytes, or Hugging Face's {bytes, path}), and perhaps a label column."""
    import pyarrow.parquet as pq

    tables = [pq.ParquetFile(f) for f in files]
    names = tables[0].schema_arrow.names
    if image_column not in names:
        raise SourceError(
            f"{files[0].name} has no column {image_column!r}; it has {', '.join(names)}: use --image-column."
        )
    labels = _integer_labels(files) if "label" in names else None

    def items() -> Iterator[Item]:
        columns = [image_column, *(["label"] if labels is not None else [])]
        row = 0
        for table in tables:
            for batch in table.iter_batches(batch_size=256, columns=columns):
                for record in batch.to_pylist():
                    value = record[image_column]
                    data = value["bytes"] if isinstance(value, dict) else value
                    name = f"row {row}"
                    if isinstance(data, bytes):
                        yield _item(name, data, size, record.get("label"))
                    else:
                        yield Item(name, None, None, f"the column holds {type(data).__name__}, not image bytes")
                    row += 1

    classes = [str(i) for i in range(max(labels) + 1)] if labels else None
    return Source(f"parquet {files[0].name}", sum(t.metadata.num_rows for t in tables), classes, items)


def _integer_labels(files: list[Path]) -> list[int]:
    import pyarrow.parquet as pq

    values: list[Any] = [v for f in files for v in pq.read_table(f, columns=["label"])["label"].to_pylist()]
    if not all(isinstance(v, int) and v >= 0 for v in values):
        wrong = next(v for v in values if not (isinstance(v, int) and v >= 0))
        raise SourceError(f"the label column holds whole numbers from 0 up, got {wrong!r}.")
    return values


def hugging_face(name: str, split: str, size: int | None, image_column: str) -> Source:
    """A dataset of the hub, or one that `datasets.save_to_disk` wrote."""
    try:
        import datasets
    except ImportError as error:
        raise SourceError("Hugging Face datasets need the package 'datasets': pip install datasets.") from error
    loaded = datasets.load_from_disk(name) if Path(name).is_dir() else datasets.load_dataset(name)
    data = loaded
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise SourceError(f"the dataset has no split {split!r}; it has {', '.join(loaded)}.")
        data = loaded[split]
    if image_column not in data.column_names:
        raise SourceError(f"the dataset has no column {image_column!r}; it has {', '.join(data.column_names)}.")
    data = data.cast_column(image_column, datasets.Image(decode=False))
    feature = data.features.get("label")
    classes = list(feature.names) if hasattr(feature, "names") else None

    def items() -> Iterator[Item]:
        for row, record in enumerate(data):
            value = record[image_column]
            content = value["bytes"] if value["bytes"] is not None else Path(value["path"])
            yield _item(f"row {row}", content, size, record["label"] if classes else None)

    return Source(f"dataset {Path(name).name}", len(data), classes, items)


# Digits and CIFAR-10


def digits() -> Source:
    """scikit-learn's 1,797 handwritten digits: 8×8, 17 grey levels. They come with the package."""

    def items() -> Iterator[Item]:
        from sklearn.datasets import load_digits

        data = load_digits()
        images = np.round(data.images * (255 / 16)).astype(np.uint8)[..., None]
        for i, (image, label) in enumerate(zip(images, data.target, strict=True)):
            yield Item(f"digit {i}", image, int(label))

    return Source("scikit-learn digits", 1797, [str(i) for i in range(10)], items)


_CIFAR10_BATCHES = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}


def cifar10_batches(folder: Path, split: str) -> Source | None:
    """The python or the binary distribution's folder, or a folder that holds it."""
    for place in (folder, folder / "cifar-10-batches-py", folder / "cifar-10-batches-bin"):
        for suffix in ("", ".bin"):
            files = [place / f"{name}{suffix}" for name in _check_split(split)]
            if files[0].is_file():
                if missing := [f.name for f in files if not f.is_file()]:
                    raise SourceError(f"{place} looks like CIFAR-10 but lacks {', '.join(missing)}.")
                return _cifar10(partial(_file_streams, files), files[0].name, split)
    return None


def cifar10_tar(file: Path, split: str) -> Source:
    """The distribution as it is downloaded."""
    with tarfile.open(file) as tar:
        members = {Path(name).name: name for name in tar.getnames()}
    for suffix in ("", ".bin"):
        names = [f"{name}{suffix}" for name in _check_split(split)]
        if all(name in members for name in names):
            return _cifar10(partial(_tar_streams, file, [members[name] for name in names]), names[0], split)
    raise SourceError(f"{file} is not a CIFAR-10 tar: it has no {_check_split(split)[0]} (python or .bin).")


def _file_streams(files: list[Path]) -> Iterator[IO[bytes]]:
    for file in files:
        yield file.open("rb")


def _tar_streams(file: Path, names: list[str]) -> Iterator[IO[bytes]]:
    with tarfile.open(file) as tar:
        for name in names:
            stream = tar.extractfile(name)
            assert stream is not None, f"{name} is a plain file in the archive"
            yield stream


def _check_split(split: str) -> list[str]:
    if split not in _CIFAR10_BATCHES:
        raise SourceError(f"CIFAR-10 has the splits train and test, got {split!r}.")
    return _CIFAR10_BATCHES[split]


def _cifar10(streams: Callable[[], Iterator[IO[bytes]]], first: str, split: str) -> Source:
    read = _read_binary_batch if first.endswith(".bin") else _read_python_batch

    def items() -> Iterator[Item]:
        row = 0
        for stream in streams():
            with stream:
                images, labels = read(stream.read(), first)
            for image, label in zip(images, labels, strict=True):
                yield Item(f"{split} {row}", image, int(label))
                row += 1

    return Source(f"CIFAR-10 {split}", 50_000 if split == "train" else 10_000, CIFAR10_CLASSES, items)


def _read_binary_batch(data: bytes, name: str) -> tuple[Image, Image]:
    if not data or len(data) % 3073:
        raise SourceError(
            f"{name}: a CIFAR-10 batch is rows of 3073 bytes, got {len(data)} bytes; it was cut short."
        )
    rows = np.frombuffer(data, np.uint8).reshape(-1, 3073)
    return _planes_to_pixels(rows[:, 1:]), rows[:, 0]


def _read_python_batch(data: bytes, name: str) -> tuple[Image, Image]:
    try:
        batch = _ArraysOnly(io.BytesIO(data), encoding="bytes").load()
        return _planes_to_pixels(np.asarray(batch[b"data"], np.uint8)), np.asarray(batch[b"labels"], np.uint8)
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError) as error:
        raise SourceError(f"{name} is not a CIFAR-10 python batch ({error}).") from error


class _ArraysOnly(pickle.Unpickler):
    """The python distribution is pickled: let it build NumPy arrays and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = {"_reconstruct", "ndarray", "dtype", "_frombuffer", "scalar"}
        if module.split(".")[0] == "numpy" and name in allowed:
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        if (module, name) == ("_codecs", "encode"):  # how Python 2's strings come
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, and only NumPy arrays are let in")


def _planes_to_pixels(planes: Image) -> Image:
    return np.ascontiguousarray(planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def cifar10_packed(folder: Path, split: str) -> Source | None:
    """xz streams of predicted residuals, `train_0.xz` … and `train_labels.npy`: a lossless form, 20 MiB each."""
    if not (folder / "train_labels.npy").is_file() and not (folder / "test_labels.npy").is_file():
        return None
    _check_split(split)
    parts = sorted(folder.glob(f"{split}_*.xz"))
    labels_file = folder / f"{split}_labels.npy"
    if not parts or not labels_file.is_file():
        raise SourceError(f"{folder} lacks {split}_*.xz or {labels_file.name}.")
    labels = np.load(labels_file, allow_pickle=False)

    def items() -> Iterator[Item]:
        import lzma

        row = 0
        for part in parts:
            try:
                residuals = np.frombuffer(lzma.decompress(part.read_bytes()), np.uint8).reshape(-1, 3, 32, 32)
            except (lzma.LZMAError, ValueError) as error:
                raise SourceError(f"{part} is damaged ({error}).") from error
            for image in _undo_prediction(residuals):
                yield Item(f"{split} {row}", image, int(labels[row]))
                row += 1

    return Source(f"CIFAR-10 {split}", len(labels), CIFAR10_CLASSES, items)


def _undo_prediction(residuals: Image) -> Image:
    """[N, 3, 32, 32] of G, R-G, B-G, each predicted by lossless JPEG's median of its neighbours -> RGB."""
    planes = np.moveaxis(residuals, 0, -1).copy()  # images last: the loop over pixels works on all at once
    nothing = np.zeros_like(planes[:, 0, 0])
    for y in range(32):
        for x in range(32):
            left = planes[:, y, x - 1] if x else nothing
            above = planes[:, y - 1, x] if y else nothing
            corner = planes[:, y - 1, x - 1] if x and y else nothing
            gradient = left.astype(np.int16) + above - corner
            planes[:, y, x] += np.clip(gradient, np.minimum(left, above), np.maximum(left, above)).astype(np.uint8)
    green, red, blue = planes
    return np.ascontiguousarray(np.moveaxis(np.stack([red + green, green, blue + green]), (3, 0), (0, 3)))
