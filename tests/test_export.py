"""Exported folders run in a fresh process, in diffusers' own pipelines; `load_pipeline` opens them and others."""

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, DDPMPipeline, DDPMScheduler, DiffusionPipeline

import scalelong
from scalelong import experiment
from scalelong.config import with_overrides
from scalelong.export import export
from scalelong.presets import run_preset
from scalelong.runs.data import RunData
from tests.contracts.zoo import CASES
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
if sys.argv[1] == "without":
    sys.modules["scalelong"] = None
else:
    import scalelong
import torch
from diffusers import DiffusionPipeline
for folder in sys.argv[2:]:
    pipe = DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    how = dict(num_inference_steps=4, generator=torch.Generator().manual_seed(0), output_type="np")
    np.save(folder + ".npy", pipe(batch_size=2, **how).images)
    print(type(pipe).__name__, type(pipe.unet).__name__)
"""


def draw_elsewhere(scalelong: str, *folders: Path) -> tuple[list[str], list[np.ndarray]]:
    """What a fresh process, with or without scalelong, makes of `folders`: pipeline and model, and the images."""
    command = [sys.executable, "-c", DRAW, scalelong, *map(str, folders)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return run.stdout.splitlines(), [np.load(f"{folder}.npy") for folder in folders]


def test_an_export_leaves_the_run_as_it_was(store, tmp_path):  # noqa: F811
    experiment.train(config("train.steps=1", "model.scaling=cs:0.7"), store, tmp_path / "run")
    run = experiment.load_run(tmp_path / "run", device="cpu")
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    export(run, tmp_path / "folded", fold=True)
    assert str(scalelong.scaling_of(run.model).scaling) == "cs:0.7"
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.model.state_dict().items())


def test_a_uvit_runs_in_a_stock_pipeline_folded_or_not(store, tmp_path):  # noqa: F811
    experiment.train(config("train.steps=4", "model.scaling=cs:0.7"), store, tmp_path / "run")
    for name, fold in (("plain", False), ("folded", True)):
        export(experiment.load_run(tmp_path / "run", device="cpu"), tmp_path / name, fold=fold)
    assert json.loads((tmp_path / "plain" / "unet" / "config.json").read_text())["scaling"] == "cs:0.7"
    assert json.loads((tmp_path / "folded" / "unet" / "config.json").read_text())["scaling"] == "none"
    index = json.loads((tmp_path / "plain" / "model_index.json").read_text())
    assert index["unet"] == ["scalelong", "UViT"]
    what, (plain, folded) = draw_elsewhere("with", tmp_path / "plain", tmp_path / "folded")
    assert what == ["DDIMPipeline UViT"] * 2
    np.testing.assert_allclose(plain, folded, atol=1e-4)
    said = []
    log, kept = logging.getLogger("diffusers.pipelines.pipeline_utils"), logging.Handler()
    kept.emit = lambda record: said.append(record.getMessage())
    log.addHandler(kept)
    try:
        DiffusionPipeline.from_pretrained(tmp_path / "plain")
        assert any("Expected types for unet" in line for line in said)  # diffusers alone is surprised
        said.clear()
        scalelong.load_pipeline(tmp_path / "plain")
    finally:
        log.removeHandler(kept)
    assert said == []


@pytest.mark.slow
def test_a_folded_unet_needs_no_scalelong(store, tmp_path):  # noqa: F811
    unet = with_overrides(run_preset("cifar10-unet"), UNET)
    experiment.train(unet, store, tmp_path / "run")
    export(experiment.load_run(tmp_path / "run", device="cpu"), tmp_path / "folded", fold=True)
    what, (images,) = draw_elsewhere("without", tmp_path / "folded")
    assert what == ["DDIMPipeline UNet2DModel"]
    export(experiment.load_run(tmp_path / "run", device="cpu"), tmp_path / "plain")
    plain = scalelong.load_pipeline(tmp_path / "plain")
    how = {"num_inference_steps": 4, "generator": torch.Generator().manual_seed(0), "output_type": "np"}
    np.testing.assert_allclose(plain(batch_size=2, **how).images, images, atol=1e-3)  # steps enlarge rounding
    # diffusers alone would drop the scaling without a word: the folder's own code refuses.
    with pytest.raises(ValueError, match=r"scalelong\.load_pipeline"):
        DiffusionPipeline.from_pretrained(tmp_path / "plain", trust_remote_code=True)


def test_a_pipeline_in_half_precision_is_opened_as_it_was_saved(tmp_path):
    unet = CASES["unet2d"].model(torch.bfloat16)
    scalelong.apply(unet, "cs:0.5")
    folder = tmp_path / "pipeline"
    DDPMPipeline(unet, DDPMScheduler()).save_pretrained(folder, variant="bf16")
    how = {"variant": "bf16", "torch_dtype": torch.bfloat16}
    loaded = scalelong.load_pipeline(folder, **how).unet
    assert str(scalelong.scaling_of(loaded).scaling) == "cs:0.5"
    call = CASES["unet2d"].call
    assert torch.equal(call(loaded, torch.bfloat16), call(unet, torch.bfloat16))


CONDITIONAL = """
import sys
import numpy as np
import torch
from diffusers import DiffusionPipeline
pipe = DiffusionPipeline.from_pretrained(sys.argv[1], trust_remote_code=True)
pipe.set_progress_bar_config(disable=True)
how = dict(num_inference_steps=3, generator=torch.Generator().manual_seed(0), output_type="np")
np.save(sys.argv[2], pipe(batch_size=2, class_labels=["one", "two"], guidance_scale=2.5, **how).images)
print(type(pipe).__name__)
"""


def test_a_class_conditional_run_carries_its_pipeline(store, tmp_path):  # noqa: F811
    experiment.train(config("train.steps=3", "data.condition=class", "model.scaling=ls"), store, tmp_path / "run")
    data = RunData.read(tmp_path / "run")
    assert data.classes == tuple(map(str, range(10)))
    replace(data, classes=("zero", "one", "two", *map(str, range(3, 10)))).write(tmp_path / "run")
    run = experiment.load_run(tmp_path / "run", device="cpu")
    assert export(run, tmp_path / "out") == "ScaleLongPipeline"
    command = [sys.executable, "-c", CONDITIONAL, str(tmp_path / "out"), str(tmp_path / "diffusers.npy")]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "ScaleLongPipeline"
    images = np.load(tmp_path / "diffusers.npy")
    how = {"num_inference_steps": 3, "generator": torch.Generator().manual_seed(0), "output_type": "np"}
    ours = scalelong.load_pipeline(tmp_path / "out")
    ours_images = ours(batch_size=2, class_labels=[1, 2], guidance_scale=2.5, **how).images
    np.testing.assert_allclose(ours_images, images, atol=1e-6)  # threads of the two processes may differ

    # The same by hand: noise, diffusers' scheduler, ε_null + w (ε_class - ε_null).
    scheduler = DDIMScheduler.from_pretrained(tmp_path / "out" / "scheduler")
    scheduler.set_timesteps(3)
    x = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for t in scheduler.timesteps:
            given, null = (run.model(x, t, class_labels=torch.tensor(c)).sample for c in ([1, 2], [10, 10]))
            x = scheduler.step(null + 2.5 * (given - null), t, x).prev_sample
    by_hand = (x / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).numpy()
    np.testing.assert_allclose(images, by_hand, atol=1e-5)


def test_a_pipeline_says_what_it_takes(store, tmp_path):  # noqa: F811
    experiment.train(
        config("train.steps=1", "data.condition=class", "data.label_dropout=0"), store, tmp_path / "run"
    )
    export(experiment.load_run(tmp_path / "run", device="cpu"), tmp_path / "out")
    pipe = scalelong.load_pipeline(tmp_path / "out")
    assert len(pipe(batch_size=3, num_inference_steps=1).images) == 3
    assert len(pipe(batch_size=2, class_labels=4, num_inference_steps=1).images) == 2
    for arguments, message in (
        ({"class_labels": [10]}, "0 … 9"),
        ({"class_labels": []}, "at least one"),
        ({"class_labels": ["cat"]}, "the names of its classes are 0, 1, .*9, got 'cat'"),
        ({"class_labels": [1, 2], "batch_size": 3}, "number of class_labels, 2"),
        ({"class_labels": [1], "guidance_scale": 2.0}, "without label dropout, got 2.0"),
    ):
        with pytest.raises(ValueError, match=message):
            pipe(num_inference_steps=1, **arguments)
    with pytest.raises(ValueError, match=r"no model_index\.json"):
        scalelong.load_pipeline(tmp_path / "run")


def test_refusals(store, tmp_path):  # noqa: F811
    experiment.train(config("train.steps=1", "model.scaling=ls"), store, tmp_path / "ls")
    with pytest.raises(ValueError, match="cannot be folded"):
        export(experiment.load_run(tmp_path / "ls"), tmp_path / "out", fold=True)
    with pytest.raises(ValueError, match="already exists"):
        export(experiment.load_run(tmp_path / "ls"), tmp_path / "ls")
    ruined = experiment.load_run(tmp_path / "ls")
    ruined.model.norm.weight.data[0] = float("nan")
    with pytest.raises(ValueError, match=r"the weights are not finite, norm\.weight among them"):
        export(ruined, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def pipeline_folder(tmp_path):
    """What a diffusers script leaves at its end: a stock pipeline around a scaled UNet."""
    torch.manual_seed(0)
    unet = CASES["unet2d"].make()
    scalelong.apply(unet, "ls", placement="norm")
    DDPMPipeline(unet, DDPMScheduler(beta_schedule="squaredcos_cap_v2")).save_pretrained(tmp_path / "pipe")
    return unet.eval(), tmp_path / "pipe"


def test_a_stock_pipeline_of_a_script_opens_with_its_scaling(pipeline_folder):
    unet, folder = pipeline_folder
    pipe = scalelong.load_pipeline(folder)
    assert type(pipe) is DDPMPipeline
    assert pipe.scheduler.config.beta_schedule == "squaredcos_cap_v2"
    assert scalelong.scaling_of(pipe.unet).placement == "norm"
    with torch.no_grad():
        assert torch.equal(CASES["unet2d"].call(pipe.unet), CASES["unet2d"].call(unet))
        unscaled = DiffusionPipeline.from_pretrained(folder).unet
        assert not torch.allclose(CASES["unet2d"].call(unscaled), CASES["unet2d"].call(unet))


def test_a_pipeline_that_was_never_scaled_opens_too(tmp_path):
    DDPMPipeline(CASES["unet2d"].make(), DDPMScheduler()).save_pretrained(tmp_path)
    assert scalelong.scaling_of(scalelong.load_pipeline(tmp_path).unet) is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"_class_name": ["mine", "MyPipeline"]}, r"carries a pipeline of its own.*unet=scalelong\.load\("),
        ({"_class_name": "NoSuchPipeline"}, "'NoSuchPipeline', which diffusers .* does not have"),
        ({"unet": ["mine", "MyUNet"]}, r"carries code of its own, mine\.py.*trust_remote_code=True"),
    ],
)
def test_code_in_a_folder_is_not_run(pipeline_folder, changes, says):
    _, folder = pipeline_folder
    for place in (folder, folder / "unet"):
        (place / "mine.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    file = folder / "model_index.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match=says):
        scalelong.load_pipeline(folder)
    assert not (folder / "ran").exists()
