"""CIFAR-10 in every form that it is found in: the two distributions, unpacked or as tars, and packed residuals."""

from __future__ import annotations

import io
import pickle
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from scalelong.data.images import Image, Item, Source, SourceError

CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
_CIFAR10_BATCHES = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}


def cifar10_batches(folder: Path, split: str) -> Source | None:
    """The python or the binary distribution's folder, or a folder that holds it."""
    for place in (folder, folder / "cifar-10-batches-py", folder / "cifar-10-batches-bin"):
        for suffix in ("", ".bin"):
            if any((place / f"{names[0]}{suffix}").is_file() for names in _CIFAR10_BATCHES.values()):
                files = [place / f"{name}{suffix}" for name in _check_split(split)]
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
