"""A text encoder and captioned pictures, made on the spot: the caption decides the colour."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from scalelong.data.images import Item, Source

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 220), "white": (240, 240, 240)}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "picture", "of", "the", "very", "large", *COLOURS]


def save_tokenizer(folder: Path, length: int = 16) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", model_max_length=length
    ).save_pretrained(folder)


def save_bert(folder: Path, width: int = 16, seed: int = 0) -> Path:
    from transformers import BertConfig, BertModel

    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
    )
    BertModel(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def pictures(count: int = 24, size: int = 8, captions: int = 2, *, told: str = "colour") -> Source:
    """Pictures of one colour each. `told` is what captions say: its colour, or any."""

    def items() -> Iterator[Item]:
        random = np.random.default_rng(0)
        names = list(COLOURS)
        for i in range(count):
            name = names[i % len(names)]
            image = np.clip(np.array(COLOURS[name]) + random.integers(-20, 20, (size, size, 3)), 0, 255)
            says = name if told == "colour" else names[random.integers(len(names))]
            texts = (f"a {says} picture", f"the very large picture of {says}", says)[:captions]
            yield Item(f"picture {i}", image.astype(np.uint8), None, captions=texts)

    return Source("made pictures", count, None, items)
