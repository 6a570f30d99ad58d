"""Exported folders run in a fresh process, in diffusers' own pipelines."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from scalelong import experiment
from scalelong.config import with_overrides
from scalelong.export import export
from scalelong.presets import run_preset
from tests.training.test_fit import config, store  # noqa: F401 - a fixture

UNET = [
    'model.changes={"block_out_channels": [32, 32, 32, 32], "attention_head_dim": 32, "layers_per_block": 1}',
    "train.batch_size=4",
    "train.steps=2",
    "train.ema_rates=0.9",
    "train.sample_every=1000",
    "data.flip=false",
    "model.scaling=cs:0.7",
    "model.placement=norm",
]

DRAW = """
import sys
import numpy as np
if sys.argv[2] == "without":
    sys.modules["scalelong"] = None
else:
    import scalelong
import torch
from diffusers import DiffusionPipeline
pipe = DiffusionPipeline.from_pretrained(sys.argv[1])
pipe.set_progress_bar_config(disable=True)
how = dict(num_inference_steps=4, generator=torch.Generator().manual_seed(0), output_type="np")
images = pipe(batch_size=2, **how).images
np.save(sys.argv[3], images)
print(type(pipe).__name__, type(pipe.unet).__name__)
"""


def draw_elsewhere(folder: Path, scalelong: str) -> tuple[str, np.ndarray]:
    out = folder.parent / f"{folder.name}-{scalelong}.npy"
    run = subprocess.run(
        [sys.executable, "-c", DRAW, str(folder), scalelong, str(out)], capture_output=True, text=True, check=True
    )
    return run.stdout.strip(), np.load(out)


def test_a_uvit_runs_in_a_stock_pipeline_folded_or_not(store, tmp_path):  # noqa: F811
    experiment.train(config("train.steps=4", "model.scaling=cs:0.7"), store, tmp_path / "run")
    for name, fold in (("plain", False), ("folded", True)):
        export(experiment.load_run(tmp_path / "run", device="cpu"), tmp_path / name, fold=fold)
    assert json.loads((tmp_path / "plain" / "unet" / "config.json").read_text())["scaling"] == "cs:0.7"
    assert json.loads((tmp_path / "folded" / "unet" / "config.json").read_text())["scaling"] == "none"
    index = json.loads((tmp_path / "plain" / "model_index.json").read_text())
    assert index["unet"] == ["scalelong", "UViT"]
    (what, plain), (_, folded) = (draw_elsewhere(tmp_path / name, "with") for name in ("plain", "folded"))
    assert what == "DDIMPipeline UViT"
    np.testing.assert_allclose(plain, folded, atol=1e-4)


def test_a_folded_unet_needs_no_scalelong(store, tmp_path):  # noqa: F811
    unet = with_overrides(run_preset("cifar10-unet"), UNET)
    experiment.train(unet, store, tmp_path / "run")
    with pytest.raises(ValueError, match="without its scaling; use --fold"):
        export(experiment.load_run(tmp_path / "run", device="cpu"), tmp_path / "plain")
    assert not (tmp_path / "plain").exists()
    export(experiment.load_run(tmp_path / "run", device="cpu"), tmp_path / "folded", fold=True)
    what, images = draw_elsewhere(tmp_path / "folded", "without")
    assert what == "DDIMPipeline UNet2DModel"
    assert np.isfinite(images).all()


def test_refusals(store, tmp_path):  # noqa: F811
    experiment.train(config("train.steps=1", "data.condition=class"), store, tmp_path / "run")
    run = experiment.load_run(tmp_path / "run")
    with pytest.raises(ValueError, match="only unconditional runs"):
        export(run, tmp_path / "out")
    experiment.train(config("train.steps=1", "model.scaling=ls"), store, tmp_path / "ls")
    with pytest.raises(ValueError, match="cannot be folded"):
        export(experiment.load_run(tmp_path / "ls"), tmp_path / "out", fold=True)
    with pytest.raises(ValueError, match="already exists"):
        export(experiment.load_run(tmp_path / "ls"), tmp_path / "run")
    assert not (tmp_path / "out").exists()
