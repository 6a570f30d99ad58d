import json

import numpy as np
import pytest
import torch
from PIL import Image

from scalelong import experiment
from scalelong.data import prepare
from scalelong.training.log import read_metrics
from tests.training.test_fit import config, store  # noqa: F401 - a fixture


@pytest.fixture(scope="module")
def run(store, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("runs") / "run"
    settings = ["train.steps=6", "train.sample_every=3", "data.condition=class", "model.scaling=ls"]
    experiment.train(config(*settings), store, folder)
    return folder


def test_a_run_folder_has_everything(run):
    names = {f.name for f in run.iterdir()}
    assert {"config.json", "environment.json", "metrics.jsonl", "samples", "checkpoints", "tensorboard"} <= names
    environment = json.loads((run / "environment.json").read_text())
    assert environment["torch"] == torch.__version__
    assert sorted(f.name for f in (run / "samples").iterdir()) == ["step-000000003.png", "step-000000006.png"]
    assert list(run.glob("checkpoints/*/ema-0.9.safetensors"))
    assert list((run / "tensorboard").glob("events*"))
    row = [r for r in read_metrics(run) if "loss" in r][-1]
    assert row["images"] == 6 * 32
    assert {"gradient norm", "seconds_per_step", "oscillation"} <= set(row)


def test_the_data_decides_size_channels_and_classes(run):
    changes = experiment.read_config(run).model.changes
    assert (changes["sample_size"], changes["in_channels"], changes["num_class_embeds"]) == (8, 1, 11)


def test_another_run_in_the_folder_is_refused_with_what_differs(run, store):  # noqa: F811
    with pytest.raises(ValueError, match=r"holds another run: .*model\.scaling was 'ls' and is 'cs:0.7'"):
        experiment.train(config("train.steps=6", "data.condition=class", "model.scaling=cs:0.7"), store, run)
    with pytest.raises(ValueError, match=r"train\.lr was 0\.001 and is 0\.1"):
        experiment.train(
            config("train.steps=6", "data.condition=class", "model.scaling=ls", "train.lr=0.1"), store, run
        )


def test_a_folder_with_something_else_is_refused(store, tmp_path):  # noqa: F811
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(ValueError, match="not empty and holds no run"):
        experiment.train(config("train.steps=1"), store, tmp_path)


def test_a_config_with_a_wrong_key_is_named(run, tmp_path):
    data = json.loads((run / "config.json").read_text())
    data["train"]["stepz"] = 3
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"config\.json: unknown setting 'train\.stepz'"):
        experiment.read_config(tmp_path)
    with pytest.raises(ValueError, match="no run folder"):
        experiment.read_config(tmp_path / "nothing")


def test_averages_are_chosen_by_name_or_by_age(run):
    assert experiment.load_run(run).ema_rate == 0.9
    loaded = experiment.load_run(run, ema_rate=0.99, device="cpu")
    from safetensors.torch import load_file

    (file,) = run.glob("checkpoints/step-000000006/ema-0.99.safetensors")
    want = load_file(file)
    assert all(torch.equal(p, want[name]) for name, p in loaded.model.named_parameters())
    with pytest.raises(ValueError, match=r"keeps the averages 0\.9, 0\.99, got 0\.5"):
        experiment.load_run(run, ema_rate=0.5)


def test_a_run_without_a_checkpoint_says_what_to_do(run, tmp_path):
    (tmp_path / "config.json").write_text((run / "config.json").read_text())
    with pytest.raises(ValueError, match="no whole checkpoint; give the command that began it again"):
        experiment.load_run(tmp_path)


def test_drawing_is_by_seed_and_index(run):
    loaded = experiment.load_run(run)
    whole = experiment.draw(loaded.config, loaded.model, 12, seed=3, steps=4)
    part = experiment.draw(loaded.config, loaded.model, 2, seed=3, first=10, steps=4)
    torch.testing.assert_close(part, whole[10:], rtol=1e-4, atol=1e-5)
    assert whole.shape == (12, 1, 8, 8)
    guided = experiment.draw(loaded.config, loaded.model, 12, seed=3, steps=4, guidance=3.0)
    assert not torch.allclose(guided, whole)


def test_a_grid_shows_every_image_in_its_place(tmp_path):
    images = torch.linspace(-1, 1, 5)[:, None, None, None].expand(5, 3, 4, 6)
    experiment.write_grid(images, tmp_path / "deep" / "grid.png")
    pixels = np.asarray(Image.open(tmp_path / "deep" / "grid.png"))
    scale = 256 // 22
    assert pixels.shape == (11 * scale, 22 * scale, 3)
    for i, want in enumerate((0, 64, 128, 191, 255)):
        top, left = (i // 3) * 5 + 1, (i % 3) * 7 + 1
        assert abs(int(pixels[(top + 1) * scale, (left + 2) * scale, 0]) - want) <= 1


def test_labels_that_are_missing_are_asked_for(tmp_path):
    from scalelong.data.prepare import prepare
    from tests.data.test_store import source

    unlabelled = prepare(source(classes=None, shape=(8, 8, 1)), tmp_path / "store")
    with pytest.raises(ValueError, match="data.condition=class needs labels"):
        experiment.train(config("data.condition=class"), unlabelled, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_without_a_path_the_digits_are_prepared_once(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(experiment.open_data(None)) == 1797
    assert len(experiment.open_data(None)) == 1797
    assert (tmp_path / ".cache" / "scalelong" / "digits" / "manifest.json").is_file()


def test_two_processes_may_prepare_the_digits_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    real = prepare.prepare

    def slower(source, out):
        real(source, out)  # the other process
        return real(source, out)  # finds its place taken

    monkeypatch.setattr(prepare, "prepare", slower)
    assert len(experiment.open_data(None)) == 1797
