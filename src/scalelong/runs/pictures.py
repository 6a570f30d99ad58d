"""Where samples go: one picture of all, a folder with a picture of each, or one array."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scalelong.data.files import partial_of, write_whole, written_whole
from scalelong.diffusion.sampling import check_finite
from scalelong.runs.claim import claimed
from scalelong.runs.folder import differences
from scalelong.world import World

ABOUT = "samples.json"  # in a folder of samples: what they are of
_FOR_PEOPLE = ("run",)  # in it: a run may be moved, and another one be in its place


class Place(Protocol):
    """What samples are put into, some at a time and in order."""

    def begun(self, world: World) -> AbstractContextManager[None]:
        """Around the drawing, in all processes."""

    def lacks(self, numbers: range) -> bool:
        """Whether any of these samples is not there yet."""

    def put(self, numbers: range, images: Tensor) -> None:
        """These samples, [n, C, H, W] in [-1, 1]."""

    def finish(self, world: World) -> None:
        """All are there: in each process its share."""


def place_for(out: Path, about: Mapping[str, Any], channels: int) -> Place:
    """By the name: grid.png or another picture, samples.npz, or a folder. `about` says what the samples are of,
    `channels` how many an image has.
    """
    from PIL import Image

    if is_folder(out):
        return Folder(out, about)
    if out.suffix.lower() == ".npz":
        return Together(out, channels, as_array=True)
    if _format_of(out) in Image.SAVE:
        return Together(out, channels, as_array=False)
    raise ValueError(
        f"samples go into a picture (grid.png), an array (samples.npz) or a folder of pictures, got {str(out)!r}."
    )


def is_folder(out: Path) -> bool:
    """Whether each sample becomes a picture of its own there."""
    return out.is_dir() or not out.suffix


class Together:
    """One file of all samples, written at the end."""

    def __init__(self, out: Path, channels: int, *, as_array: bool) -> None:
        self.out = out
        self.channels = channels
        self.as_array = as_array
        self.images: list[Tensor] = []

    @contextlib.contextmanager
    def begun(self, world: World) -> Iterator[None]:
        """What cannot be written is told before the work: the first process tries it with one small image."""
        if world.is_first:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self._try()
        yield

    def lacks(self, numbers: range) -> bool:
        """Always: they are kept in memory."""
        return True

    def put(self, numbers: range, images: Tensor) -> None:
        """Keep them, as bytes."""
        self.images.append(pixels_of(images))

    def finish(self, world: World) -> None:
        """The first process writes what all have drawn."""
        images = torch.cat(world.gather(torch.cat(self.images)))
        if world.is_first:
            with written_whole(self.out) as partial:
                self._write(images, partial)

    def _write(self, images: Tensor, file: Path) -> None:
        if self.as_array:  # as the evaluation of guided-diffusion reads it: [n, H, W, C]
            with file.open("wb") as stream:
                np.savez(stream, arr_0=images.permute(0, 2, 3, 1).cpu().numpy())
        else:
            _grid_of(images).save(file, format=_format_of(self.out))

    def _try(self) -> None:
        partial = partial_of(self.out)
        try:
            self._write(torch.zeros(1, self.channels, 1, 1, dtype=torch.uint8), partial)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # the system's, and not Pillow's
                raise
            raise ValueError(
                f"a picture is of a kind that Pillow writes in these colours, got {str(self.out)!r} ({error}); "
                "choose a .png."
            ) from error
        finally:
            partial.unlink(missing_ok=True)


class Folder:
    """A picture of each sample by its number. What is there is not drawn again: a stopped command goes on."""

    def __init__(self, out: Path, about: Mapping[str, Any]) -> None:
        self.out = out
        self.about = json.loads(json.dumps(dict(about)))
        self._check()

    def _check(self) -> None:
        file = self.out / ABOUT
        if not file.is_file():
            left = partial_of(file)  # by a command that was killed as it began
            if self.out.is_dir() and any(found != left for found in self.out.iterdir()):
                raise ValueError(f"{self.out} is not empty and holds no samples of a run; choose another --out.")
            return
        kept = json.loads(file.read_text(encoding="utf-8"))
        before, now = ({key: of[key] for key in of if key not in _FOR_PEOPLE} for of in (kept, self.about))
        if before != now:
            raise ValueError(
                f"{self.out} holds other samples: {', '.join(differences(before, now))}. Choose another --out."
            )

    @contextlib.contextmanager
    def begun(self, world: World) -> Iterator[None]:
        """The first process holds the folder, and says in it what its pictures are of."""
        with claimed(self.out, "drawing samples") if world.is_first else contextlib.nullcontext():
            if world.is_first:
                self._check()  # again: others may have drawn into it since
                if not (self.out / ABOUT).is_file():
                    write_whole(self.out / ABOUT, json.dumps(self.about, indent=1, ensure_ascii=False))
            world.wait()
            yield

    def lacks(self, numbers: range) -> bool:
        """Whether a picture is missing."""
        return not all(self._file(number).is_file() for number in numbers)

    def put(self, numbers: range, images: Tensor) -> None:
        """A file for each, whole or not at all."""
        for number, image in zip(numbers, _rows(pixels_of(images)), strict=True):
            with written_whole(self._file(number)) as partial:
                _picture(image).save(partial, format="png")

    def finish(self, world: World) -> None:
        """All wait for the last one."""
        world.wait()

    def _file(self, number: int) -> Path:
        return self.out / f"{number:06d}.png"


def pixels_of(images: Tensor) -> Tensor:
    """[-1, 1] to bytes, where they are."""
    if images.dtype is torch.uint8:
        return images
    check_finite(images, "images")
    return ((images.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def write_grid(images: Tensor, file: Path) -> None:
    """A near-square picture of all images, [-1, 1] or bytes: the whole file, or what was there before."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(file) as partial:
        _grid_of(images).save(partial, format=_format_of(file))


def _format_of(file: Path) -> str | None:
    """What Pillow calls the kind of a picture by its name: that of a partial file does not tell."""
    from PIL import Image

    return Image.registered_extensions().get(file.suffix.lower())


def _grid_of(images: Tensor) -> Any:
    count, channels, height, width = images.shape
    columns = int(np.ceil(np.sqrt(count)))
    rows = -(-count // columns)
    grid = np.full((rows * (height + 1) + 1, columns * (width + 1) + 1, channels), 128, np.uint8)
    for i, picture in enumerate(_rows(pixels_of(images))):
        top, left = (i // columns) * (height + 1) + 1, (i % columns) * (width + 1) + 1
        grid[top : top + height, left : left + width] = picture
    scale = max(1, 256 // max(grid.shape[:2]))  # tiny images are shown larger, pixel by pixel
    return _picture(grid.repeat(scale, 0).repeat(scale, 1))


def _rows(pixels: Tensor) -> Iterable[NDArray[np.uint8]]:
    rows: NDArray[np.uint8] = pixels.permute(0, 2, 3, 1).cpu().numpy()
    return rows


def _picture(pixels: NDArray[np.uint8]) -> Any:
    from PIL import Image

    return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
