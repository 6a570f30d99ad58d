"""Where images come from: a source is recognised by its name or its files, and yields items for `prepare`."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from scalelong.data.cifar10 import cifar10_batches, cifar10_packed, cifar10_tar
from scalelong.data.datasets import celeba, coco, imagenet, is_celeba, is_coco, is_downsampled_imagenet
from scalelong.data.images import (
    IMAGE_SUFFIXES,
    Decoder,
    Image,
    Item,
    Source,
    SourceError,
    as_captions,
    as_label,
    classes_by_number,
    in_threads,
    numbered_classes,
    warn_of_left_out,
)
from scalelong.data.shards import shards

__all__ = ["Image", "Item", "Source", "SourceError", "digits", "open_source"]

SPLITS = ("train", "val", "test")
CAPTION_COLUMNS = ("captions", "caption", "text")
_COLUMNS = ("image_column", "caption_column")  # of tables
_HUB_TIMEOUT_S = 5


@dataclass(frozen=True)
class Request:
    """What the user asks of a source besides its place; None leaves the choice to the source."""

    split: str = "train"
    size: int | None = None
    crop: str | None = None
    image_column: str = "image"
    caption_column: str | None = None

    def leaves_alone(self, source: str, *names: str) -> None:
        """Refuse what was asked for and a kind of source would ignore."""
        for field in fields(self):
            if field.name in names and (given := getattr(self, field.name)) != field.default:
                option = f"--{field.name.replace('_', '-')}"
                raise SourceError(f"{option} means nothing for {source}, got {given!r}; leave it out.")

    @property
    def decoder(self) -> Decoder:
        """For sources without a size or a crop of their own."""
        if self.crop is not None and self.size is None:
            raise SourceError(f"a crop is resized to a size, got --crop {self.crop} alone; add --size N.")
        return Decoder(self.size, self.crop or "centre")


# NAME:PATH
NAMED: dict[str, Callable[[Path, Request], Source]] = {
    "celeba": lambda path, ask: celeba(path, ask.split, ask.size, ask.crop),
    "imagenet64": lambda path, ask: imagenet(path, ask.split, _fixed(64, ask.size), ask.crop),
    "imagenet256": lambda path, ask: imagenet(path, ask.split, _fixed(256, ask.size), ask.crop),
    "imagenet512": lambda path, ask: imagenet(path, ask.split, _fixed(512, ask.size), ask.crop),
    "coco": lambda path, ask: coco(path, ask.split, ask.size, ask.crop),
    "shards": lambda path, ask: shards(path, ask.split, ask.decoder),
}


def open_source(
    source: str,
    *,
    split: str = "train",
    size: int | None = None,
    crop: str | None = None,
    image_column: str = "image",
    caption_column: str | None = None,
) -> Source:
    """Recognise a source: `digits`, NAME:PATH (see `NAMED`), `hf:NAME`, or a path by what lies there."""
    ask = Request(split, size, crop, image_column, caption_column)
    if source == "digits":
        ask.leaves_alone("the digits", "split", "crop", *_COLUMNS)
        return digits()
    name, colon, rest = source.partition(":")
    if colon and name == "hf":
        return hugging_face(rest, ask)
    path = Path(rest if colon and name in NAMED else source).expanduser()
    if not path.exists():
        raise SourceError(
            f"there is no file or folder {str(path)!r}; a source is 'digits', a path, 'hf:NAME' for a dataset of "
            f"the hub, or NAME:PATH with one of {', '.join(NAMED)}."
        )
    if colon and name in NAMED:
        ask.leaves_alone(name, *_COLUMNS)
        return NAMED[name](path, ask)
    return _recognised_file(path, ask) if path.is_file() else _recognised_folder(path, ask)


def _recognised_file(path: Path, ask: Request) -> Source:
    if path.suffix == ".parquet":
        return parquet([path], ask)
    if tarfile.is_tarfile(path):
        ask.leaves_alone("CIFAR-10", "crop", *_COLUMNS)
        return cifar10_tar(path, ask.split)
    raise SourceError(f"{path} is neither a parquet file nor a CIFAR-10 tar; give a folder for single images.")


def _recognised_folder(path: Path, ask: Request) -> Source:
    for recognise in (cifar10_packed, cifar10_batches):
        if (found := recognise(path, ask.split)) is not None:
            ask.leaves_alone("CIFAR-10", "crop", *_COLUMNS)
            return found
    for is_it, name in ((is_celeba, "celeba"), (is_coco, "coco"), (is_downsampled_imagenet, "imagenet64")):
        if is_it(path):
            return NAMED[name](path, ask)
    if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
        return hugging_face(str(path), ask)
    if (files := sorted(path.glob("*.parquet"))) and not any(path.glob("*/*")):
        return parquet(_of_split(files, ask.split), ask)
    if ask.split != "train":
        raise SourceError(
            f"a folder of images has no splits, got --split {ask.split}; prepare a folder of its own for each, as "
            f"in: scalelong prepare {path / ask.split}"
        )
    ask.leaves_alone("a folder of images", *_COLUMNS)
    return image_folder(path, ask.decoder)


def _of_split(files: list[Path], split: str) -> list[Path]:
    """Files that begin with the split's name; all, where no file is named after any split."""
    chosen = [f for f in files if f.name.startswith(split)]
    if not chosen and any(f.name.startswith(SPLITS) for f in files):
        raise SourceError(
            f"{files[0].parent} has no parquet file of the split {split!r}; it has "
            f"{', '.join(f.name for f in files[:6])}: choose with --split."
        )
    if chosen:
        warn_of_left_out([f for f in files if not f.name.startswith(SPLITS)], split)
    return chosen or files


def _fixed(own: int, size: int | None) -> int:
    if size not in (None, own):
        raise SourceError(f"imagenet{own} has the size {own}, got --size {size}; leave --size out.")
    return own


# Single images


def image_folder(folder: Path, decoder: Decoder) -> Source:
    """Every image below a folder. First-level subfolders, where all images are in some, are the classes."""
    below = sorted(_files_below(folder))
    files = [p for p in below if p.suffix.lower() in IMAGE_SUFFIXES]
    if not files:
        others = sorted({p.suffix or "(no suffix)" for p in below})[:6]
        raise SourceError(
            f"no images in {folder}: looked for {', '.join(IMAGE_SUFFIXES)} below it, found "
            f"{', '.join(others) if others else 'no files'}."
            + (f" For tars of images: shards:{folder}" if ".tar" in others else "")
        )
    tops = [p.relative_to(folder).parts[0] if len(p.relative_to(folder).parts) > 1 else None for p in files]
    labelled = [top for top in tops if top is not None]
    if unnamed := [top for top in labelled if not _is_text(top)]:
        raise SourceError(f"the name of the class folder {unnamed[0]!r} is no text in UTF-8; rename it.")
    if labelled and len(labelled) < len(files):
        loose = files[tops.index(None)].name
        raise SourceError(
            f"{folder} mixes class subfolders with {len(files) - len(labelled)} loose images (the first: {loose}); "
            "put every image into a class folder, or none."
        )
    classes = sorted(set(labelled)) or None
    index = {name: i for i, name in enumerate(classes or ())}

    def item(job: tuple[Path, str | None]) -> Item:
        file, top = job
        return decoder.item(str(file.relative_to(folder)), file, index[top] if top is not None else None)

    return Source(
        f"image folder {folder.name}",
        len(files),
        classes,
        lambda: in_threads(item, zip(files, tops, strict=True)),
    )


def _files_below(folder: Path) -> Iterator[Path]:
    """Through linked folders, too, as subsets are often made of links; nothing hidden, and no link back up."""
    for place, folders, names in os.walk(folder, followlinks=True):
        above = {os.path.realpath(place), *map(str, Path(os.path.realpath(place)).parents)}
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and os.path.realpath(os.path.join(place, name)) not in above
        ]
        yield from (file for name in names if not name.startswith(".") and (file := Path(place, name)).is_file())


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


# Tables


def parquet(files: list[Path], ask: Request) -> Source:
    """Parquet files with an image column (bytes, or Hugging Face's {bytes, path}), perhaps labels and captions."""
    import pyarrow.parquet as pq

    tables = []
    for file in files:
        with _whole(file):
            tables.append(pq.ParquetFile(file))
    names = tables[0].schema_arrow.names
    if ask.image_column not in names:
        raise SourceError(
            f"{files[0].name} has no column {ask.image_column!r}; it has {', '.join(names)}: use --image-column."
        )
    labels = _integer_labels(files) if "label" in names else None
    captions = _caption_column(ask.caption_column, names, files[0].name)
    columns = [ask.image_column, *(["label"] if labels is not None else []), *([captions] if captions else [])]

    def records() -> Iterator[tuple[int, dict[str, Any]]]:
        row = 0
        for file, table in zip(files, tables, strict=True):
            with _whole(file):
                for batch in table.iter_batches(batch_size=256, columns=columns):
                    for record in batch.to_pylist():
                        yield row, record
                        row += 1

    classes = None if labels is None else numbered_classes(labels)
    item = partial(_table_item, decoder=ask.decoder, image=ask.image_column, captions=captions)
    count = sum(t.metadata.num_rows for t in tables)
    return Source(f"parquet {files[0].name}", count, classes, lambda: in_threads(item, records()))


@contextmanager
def _whole(file: Path) -> Iterator[None]:
    """Arrow's errors do not name the file."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise SourceError(
            f"{file} is no whole parquet file ({str(error).partition(chr(10))[0]}); copy or download it again."
        ) from error


def _integer_labels(files: list[Path]) -> list[int]:
    import pyarrow.parquet as pq

    labels: list[int] = []
    for file in files:
        with _whole(file):
            values = pq.read_table(file, columns=["label"])["label"].to_pylist()
        labels += _labels_of(values, file.name)
    return labels


def _labels_of(values: Sequence[Any], where: str) -> list[int]:
    labels = []
    for row, value in enumerate(values):
        try:
            labels.append(as_label(value))
        except ValueError as error:
            raise SourceError(f"{where}, row {row}: {error}; mend the column label, or leave it out.") from error
    return labels


def _caption_column(wanted: str | None, names: Sequence[str], where: str) -> str | None:
    """The column that was asked for, or the first that is called like one of captions."""
    if wanted is not None and wanted not in names:
        raise SourceError(f"{where} has no column {wanted!r}; it has {', '.join(names)}: use --caption-column.")
    return wanted or next((name for name in CAPTION_COLUMNS if name in names), None)


def _table_item(job: tuple[int, dict[str, Any]], decoder: Decoder, image: str, captions: str | None) -> Item:
    row, record = job
    value, name = record[image], f"row {row}"
    data = value["bytes"] if isinstance(value, dict) else value
    if isinstance(value, dict) and data is None and value.get("path"):
        data = Path(value["path"])
    if not isinstance(data, bytes | Path):
        return Item(name, None, None, f"the column holds {type(data).__name__}, not image bytes")
    if captions is None:
        return decoder.item(name, data, record.get("label"))
    try:
        found = record[captions]
        told = () if found is None or found == [] else as_captions(found)
        return decoder.item(name, data, record.get("label"), captions=told)
    except ValueError as error:
        return Item(name, None, None, f"in the column {captions!r}, {error}")


def hugging_face(name: str, ask: Request) -> Source:
    """A dataset of the hub, or one that `datasets.save_to_disk` wrote."""
    try:
        import datasets
    except ImportError as error:
        raise SourceError("Hugging Face datasets need the package 'datasets': pip install datasets.") from error
    data = loaded = datasets.load_from_disk(name) if Path(name).is_dir() else _from_hub(name)
    if isinstance(loaded, datasets.DatasetDict):
        if ask.split not in loaded:
            raise SourceError(f"the dataset has no split {ask.split!r}; it has {', '.join(loaded)}.")
        data = loaded[ask.split]
    columns = data.column_names
    if ask.image_column not in columns:
        raise SourceError(f"the dataset has no column {ask.image_column!r}; it has {', '.join(columns)}.")
    captions = _caption_column(ask.caption_column, columns, "the dataset")
    data = data.cast_column(ask.image_column, datasets.Image(decode=False))
    classes = _classes_of(data)
    kept = [ask.image_column, *(["label"] if classes else []), *([captions] if captions else [])]
    data = data.select_columns(kept)
    item = partial(_table_item, decoder=ask.decoder, image=ask.image_column, captions=captions)
    return Source(f"dataset {Path(name).name}", len(data), classes, lambda: in_threads(item, enumerate(data)))


def _classes_of(data: Any) -> list[str] | None:
    """The names of a dataset's labels, or their numbers where it names none."""
    if "label" not in data.column_names:
        return None
    names = getattr(data.features["label"], "names", None)
    return list(names) if names else classes_by_number(data["label"])


def _from_hub(name: str) -> Any:
    import datasets

    reason = _unreachable(name)
    if reason is None:
        return datasets.load_dataset(name)
    try:
        with _offline():
            return datasets.load_dataset(name)
    except Exception as error:
        raise SourceError(
            f"hf:{name} is not in the local cache, and the hub cannot be reached ({reason}); download it where "
            "there is a network, or give the path of a copy that datasets' save_to_disk wrote."
        ) from error


def _unreachable(name: str) -> str | None:
    """Ask the hub once and briefly for the dataset: `datasets` itself would try again for half a minute."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        HfApi().dataset_info(name, timeout=_HUB_TIMEOUT_S)
    except HFValidationError as error:
        raise SourceError(f"the hub's datasets are called OWNER/NAME, got 'hf:{name}'.") from error
    except HfHubHTTPError as error:
        raise SourceError(f"the hub gives no dataset {name!r} ({str(error).partition(chr(10))[0]}).") from error
    except Exception as error:  # whatever the client in use raises without a connection
        return str(error).partition("\n")[0]
    return None


@contextmanager
def _offline() -> Iterator[None]:
    """As with HF_HUB_OFFLINE=1, which is only read when the packages are imported."""
    import datasets
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


# Digits


def digits() -> Source:
    """scikit-learn's 1,797 handwritten digits: 8×8, 17 grey levels. They come with the package."""

    def items() -> Iterator[Item]:
        from sklearn.datasets import load_digits

        data = load_digits()
        images = np.round(data.images * (255 / 16)).astype(np.uint8)[..., None]
        for i, (image, label) in enumerate(zip(images, data.target, strict=True)):
            yield Item(f"digit {i}", image, int(label))

    return Source("scikit-learn digits", 1797, [str(i) for i in range(10)], items)
