"""Where samples go: one picture of all, a folder with a picture of each, or one array."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scalelong.data.files import write_whole
from scalelong.runs.folder import differences
from scalelong.world import World

ABOUT = "samples.json"  # in a folder of samples: what they are of


class Place(Protocol):
    """What samples are put into, some at a time and in order."""

    def begin(self, world: World) -> None:
        """Before the first sample, in all processes."""

    def lacks(self, numbers: range) -> bool:
        """Whether any of these samples is not there yet."""

    def put(self, numbers: range, images: Tensor) -> None:
        """These samples, [n, C, H, W] in [-1, 1]."""

    def finish(self, world: World) -> None:
        """All are there: in each process its share."""


def place_for(out: Path, about: Mapping[str, Any]) -> Place:
    """By the name: grid.png or another picture, samples.npz, or a folder. `about` says what the samples are of."""
    from PIL import Image

    if out.suffix.lower() == ".npz" and not out.is_dir():
        return Together(out, as_array=True)
    if Image.registered_extensions().get(out.suffix.lower()) in Image.SAVE and not out.is_dir():
        return Together(out, as_array=False)
    if out.suffix and not out.is_dir():
        raise ValueError(
            "samples go into a picture (grid.png), an array (samples.npz) or a folder of pictures, got "
            f"{str(out)!r}."
        )
    return Folder(out, about)


class Together:
    """One file of all samples, written at the end."""

    def __init__(self, out: Path, *, as_array: bool) -> None:
        self.out = out
        self.as_array = as_array
        self.images: list[Tensor] = []

    def begin(self, world: World) -> None:
        """Nothing is written before the end."""

    def lacks(self, numbers: range) -> bool:
        """Always: they are kept in memory."""
        return True

    def put(self, numbers: range, images: Tensor) -> None:
        """Keep them, as bytes."""
        self.images.append(pixels_of(images))

    def finish(self, world: World) -> None:
        """The first process writes what all have drawn."""
        images = torch.cat(world.gather(torch.cat(self.images)))
        if not world.is_first:
            return
        self.out.parent.mkdir(parents=True, exist_ok=True)
        if self.as_array:  # as the evaluation of guided-diffusion reads it: [n, H, W, C]
            with self.out.open("wb") as stream:
                np.savez(stream, arr_0=images.permute(0, 2, 3, 1).cpu().numpy())
        else:
            write_grid(images, self.out)


class Folder:
    """A picture of each sample by its number. What is there is not drawn again: a stopped command goes on."""

    def __init__(self, out: Path, about: Mapping[str, Any]) -> None:
        self.out = out
        self.about = json.loads(json.dumps(dict(about)))
        self._check()

    def _check(self) -> None:
        file = self.out / ABOUT
        if not file.is_file():
            if self.out.is_dir() and any(self.out.iterdir()):
                raise ValueError(f"{self.out} is not empty and holds no samples of a run; choose another --out.")
            return
        before = json.loads(file.read_text(encoding="utf-8"))
        if before != self.about:
            raise ValueError(
                f"{self.out} holds other samples: {', '.join(differences(before, self.about))}. Choose another "
                "--out."
            )

    def begin(self, world: World) -> None:
        """The first process says in the folder what its pictures are of."""
        if world.is_first and not (self.out / ABOUT).is_file():
            self.out.mkdir(parents=True, exist_ok=True)
            write_whole(self.out / ABOUT, json.dumps(self.about, indent=1, ensure_ascii=False))
        world.wait()

    def lacks(self, numbers: range) -> bool:
        """Whether a picture is missing."""
        return not all(self._file(number).is_file() for number in numbers)

    def put(self, numbers: range, images: Tensor) -> None:
        """A file for each, whole or not at all."""
        for number, image in zip(numbers, _rows(pixels_of(images)), strict=True):
            partial = self.out / f".{self._file(number).name}"
            _picture(image).save(partial, format="png")
            partial.replace(self._file(number))

    def finish(self, world: World) -> None:
        """All wait for the last one."""
        world.wait()

    def _file(self, number: int) -> Path:
        return self.out / f"{number:06d}.png"


def pixels_of(images: Tensor) -> Tensor:
    """[-1, 1] to bytes, where they are."""
    if images.dtype is torch.uint8:
        return images
    return ((images.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def write_grid(images: Tensor, file: Path) -> None:
    """A near-square picture of all images, [-1, 1] or bytes."""
    count, channels, height, width = images.shape
    columns = int(np.ceil(np.sqrt(count)))
    rows = -(-count // columns)
    grid = np.full((rows * (height + 1) + 1, columns * (width + 1) + 1, channels), 128, np.uint8)
    for i, picture in enumerate(_rows(pixels_of(images))):
        top, left = (i // columns) * (height + 1) + 1, (i % columns) * (width + 1) + 1
        grid[top : top + height, left : left + width] = picture
    file.parent.mkdir(parents=True, exist_ok=True)
    scale = max(1, 256 // max(grid.shape[:2]))  # tiny images are shown larger, pixel by pixel
    _picture(grid.repeat(scale, 0).repeat(scale, 1)).save(file)


def _rows(pixels: Tensor) -> Iterable[NDArray[np.uint8]]:
    rows: NDArray[np.uint8] = pixels.permute(0, 2, 3, 1).cpu().numpy()
    return rows


def _picture(pixels: NDArray[np.uint8]) -> Any:
    from PIL import Image

    return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
