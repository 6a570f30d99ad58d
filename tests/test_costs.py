"""What a recipe costs, against the published counts and formulas."""

import json

import pytest
import torch

from scalelong import experiment
from scalelong.cli.plan import published_data
from scalelong.config import with_overrides
from scalelong.costs import costs_of, hours_of, matrix_rate, training_flops
from scalelong.presets import RUN_PRESETS, run_preset
from tests.cli.test_run_commands import run

PARAMETERS = {
    "cifar10-uvit-xs": 11_117_664,
    "cifar10-uvit-s": 44_255_328,
    "celeba64-uvit-s": 44_292_228,
    "imagenet64-uvit-m": 130_940_292,
    "imagenet64-uvit-l": 286_827_652,
    "imagenet256-uvit-l": 286_763_172,
    "imagenet256-uvit-h": 500_832_016,
    "imagenet512-uvit-l": 286_861_524,
    "imagenet512-uvit-h": 500_942_656,
    "coco-uvit-s": 44_692_644,
    "coco-uvit-s-deep": 58_345_636,
    "cifar10-unet": 35_746_307,
}


def fitted(preset, *settings):
    return experiment.fitted_to(with_overrides(run_preset(preset), settings), published_data(preset))


@pytest.mark.parametrize("preset", PARAMETERS)
def test_networks_have_the_published_size(preset):
    model = experiment.build_model(fitted(preset), "meta")
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[preset]


def test_the_imagenet_unet_is_near_the_published_size():
    model = experiment.build_model(fitted("imagenet64-unet"), "meta")
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(144e6, rel=0.01)


def test_label_dropout_adds_a_row():
    rows = [
        fitted("imagenet64-uvit-m", f"data.label_dropout={p}").model.changes["num_class_embeds"] for p in (0, 0.1)
    ]
    assert rows == [1000, 1001]
    assert fitted("imagenet256-uvit-l").model.changes["num_class_embeds"] == 1001


def test_memory_has_its_parts():
    smaller = ["model.changes.num_layers=4", "train.precision=bf16", "train.accumulate=4"]
    costs = costs_of(fitted("cifar10-uvit-xs", *smaller, "train.posthoc_every=10"))
    assert costs.images_at_once == 32
    assert costs.weights == costs.gradients == 4 * costs.parameters
    assert costs.optimiser == 2 * costs.weights
    assert costs.averages == 4 * costs.weights  # two rates, two profiles
    assert costs.state == 8 * costs.weights
    assert costs.flops_per_step == 128 * costs.flops_per_image
    assert 0 < costs.activations_checkpointed < 0.7 * costs.activations
    # Every block keeps at least its input and what its three matrices read, in bf16.
    assert costs.activations > 32 * 257 * 256 * 2 * 5 * 10


def test_a_class_is_counted_as_a_token():
    costs = costs_of(fitted("imagenet64-uvit-m", "train.batch_size=4", "model.changes.num_layers=4"))
    linear = 12 * 768 * 768 * 5 + 2 * 768 * 768 * 2
    assert costs.flops_per_image == pytest.approx(3 * (2 * linear * 258 + 4 * 258**2 * 768 * 5), rel=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("preset", [name for name in RUN_PRESETS if name != "digits"])
def test_every_recipe_resolves_without_data(preset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = json.loads(run("train", preset, "--dry-run", "--json"))
    assert plan["parameters"] == plan["costs"]["parameters"] == PARAMETERS.get(preset, plan["parameters"])
    assert plan["costs"]["flops_per_step"] > 10**12
    assert plan["costs"]["activations"] > plan["costs"]["activations_checkpointed"] > 0
    assert list(tmp_path.iterdir()) == []


def test_the_terminal_tells_of_the_null_row_and_the_memory(tmp_path, monkeypatch, capsys):
    from typer.testing import CliRunner

    from scalelong.cli.main import app

    monkeypatch.chdir(tmp_path)
    sizes = ["--set", "train.batch_size=2", "--set", "model.changes.num_layers=2"]
    args = ["train", "imagenet64-uvit-m", *sizes, "--dry-run"]
    told = CliRunner().invoke(app, [*args, "--set", "data.label_dropout=0.1"])
    assert "1,001 class embeddings, the last one for no class; the published recipe has no such row" in told.stderr
    assert "no --data: planned for ImageNet" in told.stdout
    assert "memory for 2 images at once in fp32" in told.stdout
    assert CliRunner().invoke(app, args).stderr == ""


def test_hours_are_the_arithmetic_that_is_left_over_the_rate_here():
    """By the published counts: 73.2 GFLOP an image of U-ViT-S, 4e10 a second and CPU thread."""
    config = fitted("cifar10-uvit-s", "train.steps=1000")
    whole = 1000 * 128 * 73.2e9 / 8e10 / 3600
    assert hours_of(config, "cpu", threads=2) == pytest.approx(whole, rel=0.01)
    assert hours_of(config, "cpu", threads=4, done=750) == pytest.approx(whole / 8, rel=0.01)
    assert hours_of(config, "cpu", threads=4, done=2000) == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU's rate is timed on it")
def test_the_rate_of_a_gpu_is_that_of_a_matrix_product():
    config = fitted("cifar10-unet")
    arithmetic = 3600 * hours_of(config, "cuda") * matrix_rate("cuda") * 0.2
    assert arithmetic == pytest.approx(config.train.steps * 128 * training_flops(config), rel=1e-6)
    assert 1e13 < matrix_rate("cuda") < 1e16
