"""What a source gives: items one by one; and how a single image is decoded, cropped and resized.

Images are uint8 [H, W, C]. An image that cannot be decoded is an item with the error in its place.
"""

from __future__ import annotations

import io
import os
import re
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

Image = np.ndarray[Any, np.dtype[np.uint8]]
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
MAX_CLASSES = 1_000_000  # each gets a name and an embedding: a label beyond is damage
_SURELY_CLASSES = 1_000  # more than these and than there are images: numbers of something else
CELEBA_WIDTH, CELEBA_HEIGHT = 178, 218
Job = TypeVar("Job")
Result = TypeVar("Result")


class SourceError(ValueError):
    """A source that is not what it was taken for."""


@dataclass(frozen=True)
class Item:
    """One image with its name, label and captions, or the reason why it cannot be had."""

    name: str
    image: Image | None
    label: int | None = None
    error: str | None = None
    captions: tuple[str, ...] | None = None
    place: tuple[int, int, int] | None = None  # in shards: number of the file, first byte, bytes


@dataclass(frozen=True)
class Source:
    """A stream of items; `count` is how many to expect, `classes` the labels' names where there are labels.

    With `shards`, the images are to stay in these files: each item has its place in them, and `crop` (None for
    images as they are) says how a reader makes the item's image of what it finds there.
    """

    description: str
    count: int
    classes: list[str] | None
    items: Callable[[], Iterator[Item]]
    shards: tuple[Path, ...] | None = None
    crop: str | None = None


@dataclass(frozen=True)
class Decoder:
    """Bytes or a file to pixels: its first frame in RGB, and with `size` a square of it, by the `crop` named so."""

    size: int | None = None
    crop: str = "centre"

    def __post_init__(self) -> None:
        if self.crop not in CROPS:
            raise SourceError(f"a crop is one of {', '.join(CROPS)}; got {self.crop!r}.")

    def __call__(self, data: bytes | Path) -> Image:
        """Raises what Pillow's decoders do."""
        from PIL import Image as Pillow

        with Pillow.open(io.BytesIO(data) if isinstance(data, bytes) else data) as file:
            picture = as_rgb(upright(file) if self.crop == "centre" else file)
            if self.size is not None:
                picture = CROPS[self.crop](picture, self.size)
            return np.asarray(picture, dtype=np.uint8)

    def item(self, name: str, data: bytes | Path, label: int | None = None, **more: Any) -> Item:
        """The decoded item, or the item that says why not."""
        try:
            return Item(name, self(data), label, **more)
        except Exception as error:  # Pillow raises whatever its decoders do
            reason = re.sub(r" <_io\.BytesIO.*>$", "", str(error))  # an address in memory, another one each time
            return Item(name, None, label, f"{type(error).__name__}: {reason}")


def as_captions(found: Any) -> tuple[str, ...]:
    """A text or a list of some, as captions without stray blanks and line ends."""
    texts = [found] if isinstance(found, str) else found
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"captions are a text or a list of some, got {found!r}")
    return tuple(" ".join(text.split()) for text in texts)


def as_label(found: Any) -> int:
    """The number of a class."""
    if not _is_label(found):
        raise ValueError(f"a label is a whole number from 0 to {MAX_CLASSES - 1:,}, got {found!r}")
    return int(found)


def _is_label(found: Any) -> bool:
    return isinstance(found, int) and 0 <= found < MAX_CLASSES


def numbered_classes(labels: Sequence[int]) -> list[str] | None:
    """The names of classes that have numbers alone, up to the largest; None without labels."""
    return [str(i) for i in range(max(labels) + 1)] if labels else None


def classes_by_number(column: Sequence[Any]) -> list[str] | None:
    """The classes of a column of labels that names none; None, with a word, where it holds something else."""
    labels = list(column)
    limit = max(_SURELY_CLASSES, len(labels))
    for row, value in enumerate(labels):
        if not _is_label(value) or value >= limit:
            warnings.warn(
                f"the column label holds no numbers of classes (row {row}: {value!r:.40}); its images are prepared "
                "without labels.",
                stacklevel=2,
            )
            return None
    return numbered_classes(labels)


def warn_of_left_out(files: Sequence[Path], split: str) -> None:
    """Files whose names tell no split, beside some that do, belong to none: not without a word."""
    if not files:
        return
    more = f" and {len(files) - 1} more name" if len(files) > 1 else " names"
    warnings.warn(
        f"{files[0].name}{more} no split and {'are' if len(files) > 1 else 'is'} left out, as other files of "
        f"{files[0].parent} name one; put {split} into the name to have it in there.",
        stacklevel=2,
    )


# Orientation


def upright(picture: Picture) -> Picture:
    """As the camera was held, where the file tells. The crops of published datasets leave it out, as their authors
    did.
    """
    from PIL import ImageOps
    from PIL.ExifTags import Base

    turned = picture.getexif().get(Base.Orientation, 1) != 1
    return ImageOps.exif_transpose(picture) if turned else picture


# Colours


def as_rgb(picture: Picture) -> Picture:
    """Eight bits per channel, on white where it is transparent.

    Pillow's own conversion would clip 16 bits at 255, and show the colours that lie hidden under full transparency.
    """
    from PIL import Image as Pillow

    if picture.mode == "F" or picture.mode.startswith("I"):
        picture = _in_eight_bits(picture)
    if picture.mode.endswith(("A", "a")) or "transparency" in picture.info:
        white = Pillow.new("RGBA", picture.size, "white")
        picture = Pillow.alpha_composite(white, picture.convert("RGBA"))
    return picture.convert("RGB")


def _in_eight_bits(picture: Picture) -> Picture:
    """Grey of 0 … 65535 as grey of 0 … 255. Of PNG and PPM, Pillow may call it `I`, scaled to that range."""
    from PIL import Image as Pillow

    if not (picture.mode.startswith("I;16") or (picture.mode == "I" and picture.format in ("PNG", "PPM"))):
        raise ValueError(
            f"an image has 8 or 16 bits per channel, got Pillow's mode {picture.mode}, of which the range is not "
            "known; save it with 8 bits"
        )
    return Pillow.fromarray(((np.asarray(picture).astype(np.int64) + 128) // 257).astype(np.uint8))


# Crops


def centre_crop(picture: Picture, size: int) -> Picture:
    """The centre square, resized by Lanczos' filter."""
    from PIL.Image import Resampling

    return _middle(picture, min(picture.size)).resize((size, size), Resampling.LANCZOS)


def adm_crop(picture: Picture, size: int) -> Picture:
    """ImageNet's crop since ADM (Dhariwal and Nichol 2021): resize the short side to `size`, keep the middle.

    While the short side is at least 2 `size`, a box filter halves both sides; a bicubic resize does the remaining
    factor in (1/2, 1], for which its few taps are enough.
    """
    from PIL.Image import Resampling

    while min(picture.size) >= 2 * size:
        picture = picture.resize((picture.width // 2, picture.height // 2), Resampling.BOX)
    factor = size / min(picture.size)
    picture = picture.resize((round(picture.width * factor), round(picture.height * factor)), Resampling.BICUBIC)
    return _middle(picture, size)


def celeba_crop(picture: Picture, size: int) -> Picture:
    """U-ViT's crop of the aligned CelebA: 128×128 about the point (89, 121), resized bilinearly."""
    from PIL.Image import Resampling

    if picture.size != (CELEBA_WIDTH, CELEBA_HEIGHT):
        raise ValueError(
            f"an aligned CelebA image is {CELEBA_WIDTH}×{CELEBA_HEIGHT}, got {picture.width}×{picture.height}; "
            "take img_align_celeba, not another edition"
        )
    x, y, half = 89, 121, 64
    return picture.crop((x - half, y - half, x + half, y + half)).resize((size, size), Resampling.BILINEAR)


def _middle(picture: Picture, side: int) -> Picture:
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    return picture.crop((left, top, left + side, top + side))


CROPS: dict[str, Callable[[Picture, int], Picture]] = {
    "centre": centre_crop,
    "adm": adm_crop,
    "celeba": celeba_crop,
}


# Many at once


def worker_count() -> int:
    """Decoding threads: Pillow lets go of the interpreter while it decodes, so that they run at once."""
    return max(2, min(16, cores()))


def cores() -> int:
    """How many this process may use; not every system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_threads(function: Callable[[Job], Result], jobs: Iterable[Job]) -> Iterator[Result]:
    """`map` in some threads, in order, a few jobs ahead: memory stays small however many there are."""
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(worker_count()) as pool:
        try:
            for job in jobs:
                waiting.append(pool.submit(function, job))
                if len(waiting) > 4 * worker_count():
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
