"""prepare, train, sample, evaluate: as a user types them, right and wrong."""

import json
import sys

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from scalelong.cli import main
from scalelong.cli.main import app

TINY = [
    "--set",
    "model.changes.hidden_size=32",
    "--set",
    "model.changes.num_layers=2",
    "--set",
    "train.batch_size=8",
    "--set",
    "train.ema_rates=0.9",
]


def run(*args):
    result = CliRunner().invoke(app, [str(a) for a in args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def fails(monkeypatch, capsys, *args):
    monkeypatch.setattr(sys, "argv", ["scalelong", *map(str, args)])
    with pytest.raises(SystemExit) as stopped:
        main.main()
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return stopped.value.code, " ".join(error.split())


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for i in range(24):
        place = folder / "pictures" / ("cat" if i % 2 else "dog")
        place.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(i).integers(0, 256, (20, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{i}.png")
    out = json.loads(run("prepare", folder / "pictures", "--size", 8, "--out", folder / "store", "--json"))
    assert out["count"] == 24
    assert out["classes"] == ["cat", "dog"]
    return folder


@pytest.fixture(scope="module")
def trained(data):
    out = data / "run"
    args = [
        "train",
        "digits",
        "--data",
        data / "store",
        "--scaling",
        "cs:0.7",
        "--out",
        out,
        "--device",
        "cpu",
        *TINY,
    ]
    first = json.loads(run(*args, "--set", "train.steps=3", "--set", "data.condition=class", "--json"))
    assert first == {"out": str(out), "done": True, "step": 3}
    again = json.loads(run(*args, "--set", "train.steps=5", "--set", "data.condition=class", "--json"))
    assert again["step"] == 5
    assert "Skip scaling on digits" in (out / "report.html").read_text()
    return out


def test_a_folder_of_pictures_becomes_samples_and_a_number(trained, data, monkeypatch):
    monkeypatch.setenv("HOME", str(data))
    grid = data / "grid.png"
    told = run("sample", trained, "--num", 4, "--out", grid, "--steps", 3, "--class", 1, "--guidance", 2)
    assert "4 images, weights of step 5 averaged at 0.9, dpm++ with 3 steps" in told
    assert Image.open(grid).size[0] >= 17
    args = ["evaluate", trained, "--data", data / "store", "--num", 16, "--steps", 3, "--features", "pixels"]
    quality = json.loads(run(*args, "--json"))
    assert quality["fid"] > 0
    assert "16 samples (dpm++, 3 steps" in quality["protocol"]


def test_a_dry_run_writes_nothing(data):
    out = data / "never"
    plan = json.loads(run("train", "cifar10-uvit-s", "--data", data / "store", "--out", out, "--dry-run", "--json"))
    assert plan["parameters"] > 10**7
    assert plan["images_per_step"] == 128
    assert plan["config"]["train"]["lr"] == 2e-4
    assert not out.exists()


@pytest.mark.parametrize(
    "preset", ["digits", "cifar10-uvit-xs", "cifar10-uvit-s", "cifar10-uvit-s-deep", "cifar10-unet"]
)
@pytest.mark.parametrize("condition", ["none", "class"])
def test_every_recipe_resolves(data, preset, condition):
    plan = json.loads(
        run(
            "train", preset, "--data", data / "store", "--set", f"data.condition={condition}", "--dry-run", "--json"
        )
    )
    classes = plan["config"]["model"]["changes"].get("num_class_embeds")
    assert classes == (3 if condition == "class" else None)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["prepare", "nowhere", "--out", "x"], "no file or folder 'nowhere'"),
        (["train", "cifar11"], "no recipe named 'cifar11'; there is digits, cifar10-uvit-xs"),
        (["train", "digits", "--scaling", "cs:3"], "κ lies in (0, 1], got 3.0"),
        (["train", "digits", "--set", "train.step=3"], "unknown setting 'train.step'"),
        (["train", "digits", "--set", "train.steps"], "NAME=VALUE"),
        (["train", "digits", "--data", "nowhere"], "nowhere is no prepared dataset"),
        (["sample", "nowhere"], "nowhere is no run folder"),
        (["evaluate", "nowhere", "--features", "vgg"], "--features is inception or pixels, got 'vgg'"),
    ],
)
def test_bad_usage_exits_2_with_a_sentence(args, says, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, error = fails(monkeypatch, capsys, *args)
    assert code == 2
    assert says in error
    assert not list(tmp_path.iterdir())


def test_bad_requests_to_a_run(trained, data, monkeypatch, capsys):
    for args, says in (
        (["--ema", "0.5"], "keeps the averages 0.9, got 0.5"),
        (["--sampler", "euler"], "unknown sampler 'euler'"),
        (["--steps", "0"], "1 … 1000, got 0"),
        (["--class", "7"], "--class is in 0 … 1 for this run, got 7"),
    ):
        code, error = fails(monkeypatch, capsys, "sample", trained, "--out", data / "no.png", *args)
        assert code == 2
        assert says in error
    assert not (data / "no.png").exists()


def test_every_command_has_an_example_in_its_help():
    for command in ("inspect", "prepare", "train", "sample", "evaluate", "export", "compare", "report"):
        assert f"scalelong {command}" in " ".join(run(command, "--help").split("Usage")[1].split()[3:])
