"""Every recipe from prepared data to a pipeline, as typed in a shell, with a tiny network.

Trained, halted, resumed, drawn from, judged, exported, opened again.
"""

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import scalelong
from scalelong.presets import RUN_PRESETS
from tests import texts
from tests.cli.test_run_commands import run
from tests.data.test_latents import tiny_kl
from tests.data.test_shards import write_tar
from tests.training.test_fit import same

SIZE, COUNT = 16, 12
UVIT = ["hidden_size=32", "num_layers=2", "num_attention_heads=2", "patch_size=2"]
UNET = [
    "block_out_channels=[8,16]",
    "layers_per_block=1",
    "norm_num_groups=4",
    'down_block_types=["DownBlock2D","AttnDownBlock2D"]',
    'up_block_types=["AttnUpBlock2D","UpBlock2D"]',
    "attention_head_dim=8",
]
TEXT_UNET = ["block_out_channels=[32,32,32]", "layers_per_block=1", "attention_head_dim=2"]
TRAIN = [
    "train.batch_size=4",
    "train.ema_rates=0.9",
    "train.warmup_steps=2",
    "train.log_every=1",
    "train.checkpoint_every=100",
    "train.sample_every=4",
    "sampling.steps=2",
]
PIXELS, LATENTS, TEXT, TEXT_LATENTS, SHARDS = "pixels", "latents", "text", "text-latents", "shards"
CLASS, GUIDED, PROMPT = (
    {"class_labels": [1]},
    {"class_labels": [1], "guidance_scale": 1.4},
    {"prompt": "a red picture", "guidance_scale": 2.0},
)
# What each recipe is trained on here, how small, and what its pipeline is asked for.
CASES = {
    "digits": (PIXELS, UVIT, {}),
    "cifar10-uvit-xs": (PIXELS, UVIT, {}),
    "cifar10-uvit-s": (PIXELS, UVIT, {}),
    "cifar10-uvit-s-deep": (PIXELS, UVIT, {}),
    "celeba64-uvit-s": (PIXELS, UVIT, {}),
    "imagenet64-uvit-m": (SHARDS, UVIT, CLASS),
    "imagenet64-uvit-l": (PIXELS, UVIT, CLASS),
    "imagenet256-uvit-l": (LATENTS, UVIT, GUIDED),
    "imagenet256-uvit-h": (LATENTS, UVIT, GUIDED),
    "imagenet512-uvit-l": (LATENTS, UVIT, GUIDED),
    "imagenet512-uvit-h": (LATENTS, UVIT, GUIDED),
    "coco64-uvit-s": (TEXT, UVIT, PROMPT),
    "coco-uvit-s": (TEXT_LATENTS, UVIT, PROMPT),
    "coco-uvit-s-deep": (TEXT_LATENTS, UVIT, PROMPT),
    "coco-unet": (TEXT_LATENTS, TEXT_UNET, PROMPT),
    "cifar10-unet": (PIXELS, UNET, {}),
    "imagenet64-unet": (PIXELS, UNET, CLASS),
}


def png(pixels):
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "png")
    return stream.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    pictures = [np.random.default_rng(i).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8) for i in range(COUNT)]
    for i, pixels in enumerate(pictures):
        file = folder / "pictures" / "ab"[i % 2] / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(png(pixels))
    members = [
        (f"{i:04}.{kind}", data)
        for i, pixels in enumerate(pictures)
        for kind, data in (("png", png(pixels)), ("cls", str(i % 2).encode()))
    ]
    write_tar(folder / "tars" / "train-000000.tar", members[:COUNT])
    write_tar(folder / "tars" / "train-000001.tar", members[COUNT:])
    told = list(texts.pictures(COUNT, size=SIZE).items())
    table = {"image": [png(item.image) for item in told], "captions": [list(item.captions) for item in told]}
    pq.write_table(pa.table(table), folder / "told.parquet")
    tiny_kl().save_pretrained(folder / "vae")
    texts.save_bert(folder / "bert")
    return folder


@pytest.fixture(scope="module")
def store_of(folder):
    reads = ["--text-encoder", folder / "bert", "--text-len", 8, "--device", "cpu"]
    encodes = ["--autoencoder", folder / "vae", "--scale", "0.2", "--device", "cpu"]
    prepared = {
        PIXELS: [folder / "pictures"],
        LATENTS: [folder / "pictures", *encodes],
        TEXT: [folder / "told.parquet", *reads],
        TEXT_LATENTS: [folder / "told.parquet", *reads, *encodes[:-2]],
        SHARDS: [f"shards:{folder / 'tars'}", "--size", SIZE],
    }

    def of(kind):
        store = folder / "data" / kind
        if not store.is_dir():
            run("prepare", *prepared[kind], "--out", store)
        return store

    return of


def test_no_recipe_is_left_out():
    assert CASES.keys() == RUN_PRESETS.keys()


@pytest.mark.parametrize("preset", CASES)
def test_from_data_to_a_pipeline(preset, store_of, tmp_path):
    kind, small, asked = CASES[preset]
    store = store_of(kind)
    settings = [f"model.changes.{change}" for change in small] + TRAIN
    train = ["train", preset, "--data", store, "--device", "cpu", "--logger", "none"]
    train += [word for setting in settings for word in ("--set", setting)]
    straight, halting = tmp_path / "straight", tmp_path / "halting"
    run(*train, "--set", "train.steps=4", "--out", straight)
    for steps in (2, 4):
        run(*train, "--set", f"train.steps={steps}", "--out", halting)
    assert same(straight, halting)

    prompt = ["--prompt", asked["prompt"]] if "prompt" in asked else []
    run("sample", straight, "--num", 2, "--device", "cpu", "--out", tmp_path / "two.npz", *prompt)
    shape = np.load(tmp_path / "two.npz")["arr_0"].shape
    assert shape == (2, SIZE, SIZE, 3)

    judge = ["evaluate", straight, "--data", store, "--device", "cpu", "--json"]
    assert json.loads(run(*judge, "--num", COUNT, "--features", "pixels"))["fid"] > 0
    if prompt:
        assert json.loads(run(*judge, "--caption-check"))["images"] == COUNT

    run("export", straight, "--out", tmp_path / "pipeline")
    pipeline = scalelong.load_pipeline(tmp_path / "pipeline")
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline(num_inference_steps=2, **asked).images[0].size == (SIZE, SIZE)
