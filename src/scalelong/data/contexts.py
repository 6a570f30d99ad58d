"""What a network is told in words: encoded captions as a store keeps them, and some of them as a run does."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from scalelong.data.store import Store

TEXT, TEXT_INDEX = "text.npy", "text_index.npy"
KEPT_CAPTIONS = 64  # a run's own, for previews and for samples without a prompt
_SAME = 0.02  # how far, in parts of their norm, contexts of one encoder may move with device and version


@dataclass(frozen=True, kw_only=True)
class TextInfo:
    """Where contexts come from: the encoder's name or folder, the hub's revision, tokens × width of a caption."""

    encoder: str
    revision: str | None
    length: int
    width: int
    dtype: str
    captions: int
    cut: int  # captions that were longer


@dataclass(frozen=True)
class Context:
    """Encoded texts for images in their order: image i is told number i, and they come round again."""

    tokens: Tensor  # [K, L, D]
    null: Tensor  # [L, D], the empty prompt: what guidance leads away from
    order: Tensor | None = None  # which rows of `tokens`, where not all in turn

    def __len__(self) -> int:
        return len(self.tokens if self.order is None else self.order)

    def of(self, indices: Tensor) -> Tensor:
        """[B] -> [B, L, D], float32, on the device of the indices."""
        rows = indices.cpu() % len(self)
        rows = rows if self.order is None else self.order[rows]
        return self.tokens[rows].to(indices.device, torch.float32)


@dataclass(frozen=True)
class StoredText:
    """A store's contexts: `tokens` [1 + captions, L, D] float16, row 0 the empty prompt; `index` [N, 2] has each
    image's first row and how many there are."""

    info: TextInfo
    tokens: np.ndarray[Any, np.dtype[np.float16]]
    index: np.ndarray[Any, np.dtype[np.int64]]

    @property
    def null(self) -> Tensor:
        """The empty prompt's context, [L, D]."""
        return torch.from_numpy(np.array(self.tokens[0])).float()

    def context(self) -> Context:
        """Image i's first caption for i below N, then the second ones of those that have two, and so on."""
        first, count = self.index.T
        rounds = [first[count > turn] + turn for turn in range(int(count.max()))]
        order = torch.from_numpy(np.concatenate(rounds))
        return Context(torch.from_numpy(self.tokens), self.null, order)


def open_text(folder: Path, info: dict[str, Any], count: int) -> StoredText:
    """The contexts of a store of `count` images, mapped not read."""
    found = TextInfo(**info)
    tokens = np.load(folder / TEXT, mmap_mode="c", allow_pickle=False)  # copy on write: torch wants it writable
    index = np.load(folder / TEXT_INDEX, allow_pickle=False)
    expected = (1 + found.captions, found.length, found.width)
    if tokens.shape != expected or tokens.dtype != np.float16 or index.shape != (count, 2):
        raise ValueError(
            f"{folder / TEXT} holds {tokens.dtype} {tokens.shape} for {len(index)} images, the manifest says "
            f"float16 {expected} for {count}; prepare the dataset again."
        )
    return StoredText(found, tokens, index)


@dataclass(frozen=True)
class KeptText:
    """What a run keeps of its captions: the first of the first images, so that it can draw without an encoder."""

    info: TextInfo
    captions: list[str]
    context: Context

    def write(self, file: Path) -> None:
        """As safetensors, whole or not at all."""
        from safetensors.torch import save_file

        partial = file.with_name(f".{file.name}.partial")
        metadata = {"info": json.dumps(asdict(self.info)), "captions": json.dumps(self.captions)}
        try:
            save_file({"tokens": self.context.tokens, "null": self.context.null}, partial, metadata)
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def read(cls, file: Path) -> Self:
        """The file that `write` wrote."""
        from safetensors import safe_open

        if not file.is_file():
            raise ValueError(
                f"{file} is missing: the run was trained on text, and train wrote it there; put it back."
            )
        with safe_open(file, framework="pt") as found:
            metadata = found.metadata()
            context = Context(found.get_tensor("tokens"), found.get_tensor("null"))
        return cls(TextInfo(**json.loads(metadata["info"])), json.loads(metadata["captions"]), context)


def kept_text(store: Store, count: int = KEPT_CAPTIONS) -> KeptText:
    """What a run on this store keeps."""
    text = text_of(store)
    captions = store.captions or []
    rows = [i for i, some in enumerate(captions) if some][:count] or [0]
    told = [captions[i][0] if captions and captions[i] else "" for i in rows]
    tokens = torch.from_numpy(text.tokens[text.index[rows, 0]]).float()
    return KeptText(text.info, told, Context(tokens, text.null))


def text_of(store: Store) -> StoredText:
    """A store's contexts, or how it gets some."""
    info_of(store)
    assert store.text is not None
    return store.text


def info_of(store: Store) -> TextInfo:
    """The same without opening them: what their manifest says."""
    if store.manifest.text is None:
        lacks = "captions that are not encoded" if store.captions is not None else "no captions"
        raise ValueError(
            f"text is asked for, and {store.folder} has {lacks}; prepare a source with captions again with "
            "--text-encoder NAME."
        )
    return TextInfo(**store.manifest.text)


def check_same_encoder(found: Tensor, info: TextInfo, expected: Tensor, who: str) -> None:
    """Refuse an encoder that only looks like a run's own: the same texts, [..., L, D], come out otherwise."""
    if found.shape != expected.shape:
        length, width = found.shape[-2:]
        raise ValueError(
            f"the run reads {info.length} tokens of width {info.width} from {info.encoder}, and {who} gives "
            f"{length} of width {width}; use that encoder and --text-len {info.length}."
        )
    apart, size = (found.cpu().float() - expected.float()).norm(), expected.float().norm()
    if not apart <= _SAME * size:
        raise ValueError(
            f"{who} encodes texts otherwise than the run's own encoder, {info.encoder} (apart by "
            f"{apart / size:.2g} of their norm): it is another encoder, or another revision of it; use the same."
        )
