"""The paper's larger datasets as they are downloaded: CelebA, ImageNet and COCO."""

from __future__ import annotations

import json
import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from scalelong.data.images import IMAGE_SUFFIXES, Decoder, Image, Item, Source, SourceError, as_captions, in_threads

# CelebA

CELEBA_FOLDER, CELEBA_PARTITION = "img_align_celeba", "list_eval_partition.txt"
_CELEBA_SPLITS = {"train": "0", "val": "1", "test": "2"}


def is_celeba(folder: Path) -> bool:
    """The folder of aligned images, or one that holds it."""
    return folder.name == CELEBA_FOLDER or (folder / CELEBA_FOLDER).is_dir()


def celeba(folder: Path, split: str, size: int | None = None, crop: str | None = None) -> Source:
    """The aligned jpgs, 178×218, of one split; by default U-ViT's crop at 64×64."""
    if split not in (*_CELEBA_SPLITS, "all"):
        raise SourceError(f"CelebA has the splits train, val, test and all, got {split!r}.")
    images = _celeba_images(folder)
    present = {file.name for file in images.iterdir() if file.suffix.lower() == ".jpg"}
    if not present:
        raise SourceError(f"{images} holds no .jpg; unpack img_align_celeba.zip there.")
    names = sorted(present) if split == "all" else _celeba_split(images, folder, split)
    if missing := [name for name in names if name not in present]:
        raise SourceError(
            f"{images} lacks {len(missing):,} of the {len(names):,} images of the split {split} (the first: "
            f"{missing[0]}); unpack img_align_celeba.zip again."
        )
    decoder = Decoder(size or 64, crop or "celeba")
    return Source(
        f"CelebA {split}, {_made(decoder)}",
        len(names),
        None,
        lambda: in_threads(lambda name: decoder.item(name, images / name), names),
    )


def _celeba_images(folder: Path) -> Path:
    """Archives hold the folder once, or once inside itself."""
    for place in (folder / CELEBA_FOLDER / CELEBA_FOLDER, folder / CELEBA_FOLDER, folder):
        if place.is_dir() and place.name == CELEBA_FOLDER:
            return place
    raise SourceError(f"{folder} has no folder {CELEBA_FOLDER}; unpack {CELEBA_FOLDER}.zip in it.")


def _celeba_split(images: Path, folder: Path, split: str) -> list[str]:
    places = [p / CELEBA_PARTITION for p in (folder, folder / "Eval", images.parent, images.parent.parent)]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise SourceError(
            f"which images belong to {split} stands in {CELEBA_PARTITION}, and {folder} has none; put it beside "
            f"{CELEBA_FOLDER}, or take every image with --split all."
        )
    text = file.read_text(encoding="utf-8", errors="replace")  # what is no text is shown in the line that has it
    rows = [line.split() for line in text.splitlines() if line.strip()]
    for number, row in enumerate(rows, 1):
        if len(row) != 2 or row[1] not in _CELEBA_SPLITS.values():
            raise SourceError(f"{file} has lines such as '000001.jpg 0', got {' '.join(row)!r} in line {number}.")
    if again := _first_again(name for name, _ in rows):
        raise SourceError(f"{file} names each image once, got {again!r} again; take the file as it is published.")
    return [name for name, part in rows if part == _CELEBA_SPLITS[split]]


# ImageNet

_WNID = re.compile(r"n\d{8}")
_IMAGENET_SPLITS = ("train", "val")
_IMAGENET_PLACES = ("", "ILSVRC/Data/CLS-LOC", "Data/CLS-LOC")
_NPZ_FILES = {"train": [f"train_data_batch_{i}.npz" for i in range(1, 11)], "val": ["val_data.npz"]}


def imagenet(folder: Path, split: str, size: int, crop: str | None = None) -> Source:
    """Class folders with ADM's crop, or, at 64×64, the downsampled edition's npz files."""
    if split not in _IMAGENET_SPLITS:
        raise SourceError(f"ImageNet has the splits train and val (its test has no labels), got {split!r}.")
    if is_downsampled_imagenet(folder):
        if size != 64 or crop is not None:
            asked = f"--crop {crop}" if size == 64 else f"{size}×{size}"
            raise SourceError(
                f"{folder} holds ImageNet downsampled to 64×64, got {asked}; give imagenet64:{folder} alone, or "
                "the folder of the original images."
            )
        return _downsampled_imagenet(folder, split)
    return _imagenet_folders(folder, split, Decoder(size, crop or "adm"))


def _imagenet_folders(folder: Path, split: str, decoder: Decoder) -> Source:
    place = _imagenet_place(folder, split)
    found = _class_folders(place)
    # Labels are places in the sorted list of classes, those of train, so that a part of val has the same ones.
    train = place.parent / "train"
    classes = _class_folders(train) if split == "val" and train.is_dir() else found
    if unknown := sorted(set(found) - set(classes)):
        raise SourceError(
            f"{place} has the class {unknown[0]}, which {train} lacks; both have the same 1000 wnids."
        )
    labels = {wnid: label for label, wnid in enumerate(classes)}
    jobs = [(file, labels[wnid]) for wnid in found for file in _images_in(place / wnid)]
    return Source(
        f"ImageNet {split}, {_made(decoder)}",
        len(jobs),
        classes,
        lambda: in_threads(lambda job: decoder.item(f"{job[0].parent.name}/{job[0].name}", *job), jobs),
    )


def _imagenet_place(folder: Path, split: str) -> Path:
    """Where the class folders of a split are: in the folder of its name, or right here."""
    for place in _IMAGENET_PLACES:
        if (folder / place / split).is_dir():
            return folder / place / split
    if split == "train" and any(_WNID.fullmatch(p.name) for p in folder.iterdir()):
        return folder
    found = ", ".join(sorted(p.name for p in folder.iterdir())[:4]) or "nothing"
    raise SourceError(
        f"{folder} has no folder {split!r} with ImageNet's class folders (n01440764 …), nor the downsampled "
        f"edition's {_NPZ_FILES[split][0]}; found {found}."
    )


def _class_folders(place: Path) -> list[str]:
    folders = sorted(p.name for p in place.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not folders:
        raise SourceError(
            f"{place} has no class folders (n01440764 …); unpack each class's tar into a folder of its name, and "
            "move the validation images into theirs."
        )
    if unknown := [name for name in folders if not _WNID.fullmatch(name)]:
        raise SourceError(
            f"a class folder of ImageNet is a WordNet id such as n01440764, got {unknown[0]!r} in {place}; give "
            "the path alone for folders with names of your own."
        )
    return folders


def _images_in(folder: Path) -> list[Path]:
    files = sorted(p for p in folder.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES)
    if not files:
        raise SourceError(f"{folder} holds no images; unpack {folder.name}.tar into it.")
    return files


def is_downsampled_imagenet(folder: Path) -> bool:
    """Its npz files, in one folder or in those of the zips that they come in."""
    return any(_npz_file(folder, name) for names in _NPZ_FILES.values() for name in names)


def _npz_file(folder: Path, name: str) -> Path | None:
    return next((p for p in (folder / name, *sorted(folder.glob(f"*/{name}"))) if p.is_file()), None)


def _downsampled_imagenet(folder: Path, split: str) -> Source:
    """Chrabaszcz et al. 2017. Its labels are the development kit's numbers, not places among sorted wnids."""
    found = {name: _npz_file(folder, name) for name in _NPZ_FILES[split]}
    if missing := [name for name, file in found.items() if file is None]:
        raise SourceError(f"{folder} looks like the downsampled ImageNet but lacks {', '.join(missing)}.")
    files = [file for file in found.values() if file is not None]
    labels = {file: _npz_labels(file) for file in files}

    def items() -> Iterator[Item]:
        row = 0
        for file in files:
            for image, label in zip(_npz_images(file, len(labels[file])), labels[file], strict=True):
                yield Item(f"{split} {row}", image, int(label) - 1)
                row += 1

    classes = [str(i) for i in range(1, 1001)]
    return Source(f"ImageNet {split}, downsampled to 64×64", sum(map(len, labels.values())), classes, items)


def _npz_labels(file: Path) -> np.ndarray[Any, Any]:
    try:
        with np.load(file, allow_pickle=False) as arrays:
            labels = np.asarray(arrays["labels"])
    except (zipfile.BadZipFile, EOFError, OSError, KeyError, ValueError) as error:
        raise _broken_npz(file, error) from error
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise SourceError(
            f"{file}: the labels of the downsampled ImageNet are a row of whole numbers, got {labels.dtype} of "
            f"shape {labels.shape}; unpack it again."
        )
    if labels.min(initial=1) < 1 or labels.max(initial=1) > 1000:
        raise SourceError(
            f"{file}: the labels of the downsampled ImageNet are 1 … 1000, got {labels.min()} … {labels.max()}."
        )
    return labels


def _npz_images(file: Path, count: int) -> Iterator[Image]:
    """Row by row: a whole array of the ten is 1.5 GB."""
    try:
        with zipfile.ZipFile(file) as archive, archive.open("data.npy") as stream:
            shape, fortran, dtype = _npy_header(stream)
            if shape != (count, 3 * 64 * 64) or dtype != np.uint8 or fortran:
                raise SourceError(
                    f"{file}: its data are rows of 12288 uint8, one for each of {count} labels, got {dtype} {shape}"
                    + (" in Fortran's order." if fortran else ".")
                )
            for _ in range(count):
                planes = np.frombuffer(stream.read(3 * 64 * 64), np.uint8).reshape(3, 64, 64)
                yield np.ascontiguousarray(planes.transpose(1, 2, 0))
            stream.read(1)  # the end is where the archive's checksum is compared
    except SourceError:
        raise
    except (zipfile.BadZipFile, EOFError, OSError, KeyError, ValueError) as error:
        raise _broken_npz(file, error) from error


def _npy_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(stream)


def _broken_npz(file: Path, error: Exception) -> SourceError:
    return SourceError(
        f"{file} is no whole npz file with data and labels ({error}); it was cut short or damaged: unpack it again."
    )


# COCO


def is_coco(folder: Path) -> bool:
    """A folder with captions in COCO's place."""
    return any((folder / "annotations").glob("captions_*.json"))


def coco(folder: Path, split: str, size: int | None = None, crop: str | None = None) -> Source:
    """Images with all their captions. The split is train, val, or one of a year, such as train2017."""
    file = _captions_file(folder, split)
    name = file.stem.removeprefix("captions_")
    images = next((p for p in (folder / name, folder / "images" / name) if p.is_dir()), None)
    if images is None:
        raise SourceError(f"{file.name} needs the images in {folder / name}; unpack {name}.zip there.")
    pairs = _captioned(file)
    decoder = Decoder(size or 256, crop or "centre")

    def item(pair: tuple[str, tuple[str, ...]]) -> Item:
        file_name, captions = pair
        if not captions:
            return Item(file_name, None, None, f"it has no caption in {file.name}")
        return decoder.item(file_name, images / file_name, captions=captions)

    return Source(f"COCO {name}, {_made(decoder)}", len(pairs), None, lambda: in_threads(item, pairs))


def _captions_file(folder: Path, split: str) -> Path:
    files = sorted((folder / "annotations").glob("captions_*.json"))
    chosen = [f for f in files if re.fullmatch(rf"captions_{re.escape(split)}(\d{{4}})?", f.stem)]
    if len(chosen) == 1:
        return chosen[0]
    splits = ", ".join(f.stem.removeprefix("captions_") for f in files)
    if chosen:
        raise SourceError(f"{folder} holds {splits}: {split!r} is more than one of them; choose with --split.")
    if files:
        raise SourceError(f"{folder} has no captions_{split}*.json; it has {splits}: choose with --split.")
    raise SourceError(
        f"{folder} has no annotations/captions_*.json; unpack annotations_trainval2017.zip (or 2014) in it."
    )


def _captioned(file: Path) -> list[tuple[str, tuple[str, ...]]]:
    """(file name, captions in the order of their ids) for each image, in the file's order."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if again := _first_again(image["id"] for image in content["images"]):
            raise ValueError(f"the image {again} is listed twice")
        captions: dict[int, list[str]] = {image["id"]: [] for image in content["images"]}
        for note in sorted(content["annotations"], key=lambda note: note["id"]):
            captions[note["image_id"]] += as_captions(note["caption"])
        return [(image["file_name"], tuple(captions[image["id"]])) for image in content["images"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SourceError(
            f"{file} is no whole file of COCO captions ({type(error).__name__}: {error}); unpack it again."
        ) from error


def _first_again(names: Iterable[Any]) -> Any:
    """The first that is there more than once; None where all differ."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


def _made(decoder: Decoder) -> str:
    return f"{decoder.crop} crop at {decoder.size}×{decoder.size}"
