"""Captions as networks read them: encoded once, by any `transformers` text encoder, at `prepare`.

A caption becomes `length` tokens of the encoder's last hidden state, in float16. Networks are told of no mask: they
read every token, as the published U-ViT does. CLIP's padding is therefore kept as the encoder makes it: with it
U-ViT was trained. Other encoders were trained with a mask and make no sense of padding: they get the mask, and
what they put in the place of padding becomes zero.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scalelong.data.contexts import TEXT, TEXT_INDEX, TextInfo

DEFAULT_LENGTH = 77  # CLIP's
_READS_PADDING = ("clip", "clip_text_model", "siglip")
_TEXT_PARTS = {"clip": "CLIPTextModel", "siglip": "SiglipTextModel"}  # of models that read images, too
_HUB_TIMEOUT_S = 5

Progress = Callable[[Iterable[Any], int], Iterable[Any]]


class TextEncoder:
    """A tokenizer and the encoder part of a model, from a folder or by a name of the hub: texts to [B, L, D]."""

    def __init__(
        self, name: str | Path, *, length: int | None = None, revision: str | None = None, device: str = "cpu"
    ) -> None:
        folder = Path(name).expanduser()
        self.name = str(folder.resolve()) if folder.is_dir() else str(name)
        self.tokenizer, self.model = load_encoder(self.name, None if folder.is_dir() else revision)
        self.model = self.model.float().eval().requires_grad_(False).to(device)
        self.device = device
        config = self.model.config
        self.revision = getattr(config, "_commit_hash", None)
        self.reads_padding = config.model_type in _READS_PADDING
        longest = min(self.tokenizer.model_max_length, getattr(config, "max_position_embeddings", None) or 10**9)
        self.length = min(DEFAULT_LENGTH, longest) if length is None else length
        if not 1 <= self.length <= longest:
            raise ValueError(f"{self.name} reads 1 … {longest} tokens, got a text length of {self.length}.")
        self.width = self._width()

    def _width(self) -> int:
        """D, by an empty text: what cannot read one is told before a dataset is decoded."""
        try:
            return int(self([""]).shape[2])
        except torch.OutOfMemoryError:
            raise
        except (TypeError, AttributeError, ValueError, RuntimeError, LookupError) as error:
            raise ValueError(
                f"{self.name} holds a {type(self.model).__name__}, which gives no hidden state for each token of a "
                f"text ({str(error).partition(chr(10))[0]}). {_ELSEWHERE}"
            ) from error

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> Tensor:
        """[B, L, D] on the encoder's device, float32; longer texts are cut."""
        tokens = self.tokenizer(
            list(texts), padding="max_length", truncation=True, max_length=self.length, return_tensors="pt"
        ).to(self.device)
        if self.reads_padding:
            return self.model(input_ids=tokens["input_ids"]).last_hidden_state
        mask = tokens["attention_mask"]
        hidden = self.model(input_ids=tokens["input_ids"], attention_mask=mask).last_hidden_state
        return torch.where(mask[:, :, None] > 0, hidden, 0.0)  # a text without tokens has nothing to attend to

    def count_cut(self, texts: Sequence[str]) -> int:
        """How many of the texts are longer than what is read of them."""
        return sum(len(ids) > self.length for ids in self.tokenizer(list(texts), verbose=False)["input_ids"])

    def bytes_of(self, captions: int) -> int:
        """What so many captions take in a store, the empty prompt included."""
        return (captions + 1) * self.length * self.width * 2


def write_contexts(
    folder: Path,
    captions: Sequence[Sequence[str]],
    encoder: TextEncoder,
    *,
    progress: Progress | None = None,
    batch: int | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Encode all captions of all images into files of a store: what its manifest says of them, and their names.

    Row 0 is the empty prompt. It is also the caption of an image that has none.
    """
    counts = np.array([len(texts) for texts in captions], np.int64)
    first = 1 + np.concatenate([[0], counts.cumsum()[:-1]])
    index = np.stack([np.where(counts > 0, first, 0), np.maximum(counts, 1)], axis=1)
    texts = ["", *(text for some in captions for text in some)]
    size = batch or (32 if encoder.device == "cpu" else 512)
    shape = (len(texts), encoder.length, encoder.width)
    rows = np.lib.format.open_memmap(folder / TEXT, "w+", np.float16, shape)
    cut = 0
    starts = range(0, len(texts), size)
    for start in progress(starts, len(starts)) if progress else starts:
        some = texts[start : start + size]
        rows[start : start + size] = _half(encoder(some), encoder.name).cpu().numpy()
        cut += encoder.count_cut(some)
    rows.flush()
    np.save(folder / TEXT_INDEX, index)
    info = TextInfo(
        encoder=encoder.name,
        revision=encoder.revision,
        length=encoder.length,
        width=encoder.width,
        dtype="float16",
        captions=len(texts) - 1,
        cut=cut,
    )
    return asdict(info), [TEXT, TEXT_INDEX]


def _half(hidden: Tensor, name: str) -> Tensor:
    """float16, whose rounding (1 part in 2,000) is far below what captions differ by; its range is checked."""
    half = hidden.half()
    if not half.isfinite().all():
        raise ValueError(
            f"{name} gives values of up to {hidden.abs().max().item():.3g}, and contexts are kept in float16, up "
            "to 65504; choose another encoder."
        )
    return half


def load_encoder(name: str, revision: str | None = None, *, tokenizer: str | None = None) -> tuple[Any, Any]:
    """The tokenizer and the encoder part of a model; `tokenizer` is its folder where that is another."""
    try:
        import transformers
    except ImportError as error:
        raise ValueError("text encoders come from the package transformers: pip install transformers.") from error
    if not Path(name).is_dir() and (name.count("/") > 1 or name.startswith((".", "/", "~"))):
        raise ValueError(f"there is no folder {name!r} with a text encoder. {_ELSEWHERE}")
    with _quiet():
        how = {"revision": revision, "local_files_only": _is_local(name, revision)}
        try:
            config = transformers.AutoConfig.from_pretrained(name, **how)
            words = transformers.AutoTokenizer.from_pretrained(tokenizer or name, **how)
            kind = _class_for(config)
            model, found = kind.from_pretrained(name, output_loading_info=True, **how)
            if kind is transformers.AutoModel and getattr(config, "is_encoder_decoder", False):
                model = model.get_encoder()  # the whole of BART ends in its decoder's states
        except (OSError, KeyError, ImportError, ValueError) as error:
            raise ValueError(
                f"{name!r} is no text encoder that transformers can load "
                f"({str(error).partition(chr(10))[0]}). {_ELSEWHERE}"
            ) from error
    missing = sorted(key for key in found["missing_keys"] if "pooler" not in key)
    if missing:
        raise ValueError(f"{name} lacks weights of {type(model).__name__}: {', '.join(missing[:3])}.")
    if words.pad_token is None:
        raise ValueError(f"the tokenizer of {name} has no token for padding; choose another encoder.")
    return words, model


_ELSEWHERE = "Give the folder of the encoder and its tokenizer, or a name of the hub, with --text-encoder."


def _class_for(config: Any) -> Any:
    """Of CLIP the text's part, of T5 the first half, else the bare model."""
    import transformers

    if config.model_type in _TEXT_PARTS:
        return getattr(transformers, _TEXT_PARTS[config.model_type])
    known = type(config) in transformers.MODEL_FOR_TEXT_ENCODING_MAPPING
    return transformers.AutoModelForTextEncoding if known else transformers.AutoModel


def _is_local(name: str, revision: str | None) -> bool:
    """Whether no network is needed. The hub is asked once, briefly: its client would try again for a minute."""
    import transformers
    from huggingface_hub import HfApi

    if Path(name).is_dir():
        return True
    with contextlib.suppress(OSError):
        transformers.AutoConfig.from_pretrained(name, revision=revision, local_files_only=True)
        return True
    try:
        HfApi().model_info(name, timeout=_HUB_TIMEOUT_S)
    except Exception as error:  # whatever the client in use raises without a connection, or for no such model
        raise ValueError(
            f"the text encoder {name!r} is no folder and not in the local cache, and the hub does not give it "
            f"({str(error).partition(chr(10))[0]}). {_ELSEWHERE}"
        ) from error
    return False


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers lists the vision half of CLIP and its own progress; a user here asked for neither."""
    from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
