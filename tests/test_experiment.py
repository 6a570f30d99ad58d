import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from scalelong import experiment
from scalelong.config import resolved_for, with_overrides
from scalelong.data import prepare
from scalelong.data.images import Item, Source
from scalelong.data.sources import digits
from scalelong.presets import run_preset
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


def test_what_the_data_decide_is_not_overridden_in_silence(store):  # noqa: F811
    with pytest.raises(
        ValueError,
        match=r"model\.changes\.sample_size is 32, and the data in .* decide it, which makes it 8; leave it out",
    ):
        experiment.fitted_to(config("model.changes.sample_size=32"), store)
    fitted = experiment.fitted_to(config("model.changes.sample_size=8"), store)
    assert experiment.fitted_to(fitted, store) == fitted


def test_another_run_in_the_folder_is_refused_with_what_differs(run, store):  # noqa: F811
    with pytest.raises(ValueError, match=r"holds another run: .*model\.scaling was 'ls' and is 'cs:0.7'"):
        experiment.train(config("train.steps=6", "data.condition=class", "model.scaling=cs:0.7"), store, run)
    with pytest.raises(ValueError, match=r"train\.lr was 0\.001 and is 0\.1"):
        experiment.train(
            config("train.steps=6", "data.condition=class", "model.scaling=ls", "train.lr=0.1"), store, run
        )


def by_class(store, run, *settings):  # noqa: F811
    """Ask a folder for a run by class on this data; nothing is trained."""
    fitted = experiment.fitted_to(config("train.steps=6", "data.condition=class", *settings), store)
    fitted = replace(fitted, train=resolved_for(fitted.train, "cpu"))
    experiment.check_folder(fitted, run, data=experiment.data_of(fitted, store))


def changed(store, **arrays):  # noqa: F811
    """The digits with other images or labels."""
    images = arrays.get("images", store.images)
    labels = arrays.get("labels", store.labels)
    items = [
        Item(str(i), np.asarray(image), int(label))
        for i, (image, label) in enumerate(zip(images, labels, strict=True))
    ]
    return Source("changed digits", len(items), store.manifest.classes, lambda: iter(items))


def test_a_run_goes_on_with_its_own_data_alone(run, store, tmp_path):  # noqa: F811
    again = prepare.prepare(digits(), tmp_path / "again")
    by_class(again, run, "model.scaling=ls")  # the same images, in another place
    inverted = prepare.prepare(changed(store, images=255 - np.asarray(store.images)), tmp_path / "inverted")
    before = {file: file.stat().st_mtime_ns for file in run.rglob("*")}
    with pytest.raises(
        ValueError,
        match=r"was trained on scikit-learn digits \(1,797 images, in .*\), and .*inverted holds other data: "
        r"changed digits \(1,797 images\), with another images\.npy\. Give the run's own data, or choose",
    ):
        experiment.train(config("train.steps=8", "data.condition=class", "model.scaling=ls"), inverted, run)
    assert {file: file.stat().st_mtime_ns for file in run.rglob("*")} == before


def test_only_what_a_run_reads_of_its_data_has_to_stay(run, store, tmp_path):  # noqa: F811
    turned = prepare.prepare(changed(store, labels=(store.labels + 1) % 10), tmp_path / "turned")
    with pytest.raises(ValueError, match=r"with another labels\.npy"):
        by_class(turned, run, "model.scaling=ls")
    plain = config("train.steps=1")
    unlabelled = experiment.fitted_to(plain, store)
    assert experiment.data_of(unlabelled, store).sha256 == experiment.data_of(unlabelled, turned).sha256


def test_a_run_from_before_its_data_was_kept_goes_on_and_keeps_it(store, tmp_path):  # noqa: F811
    experiment.train(config("train.steps=1"), store, tmp_path / "run")
    kept = (tmp_path / "run" / "data.json").read_text()
    (tmp_path / "run" / "data.json").unlink()
    experiment.train(config("train.steps=2"), store, tmp_path / "run")
    assert (tmp_path / "run" / "data.json").read_text() == kept


def test_a_note_of_the_data_that_cannot_be_read_is_named(run, store, tmp_path):  # noqa: F811
    for name in ("config.json", "data.json"):
        (tmp_path / name).write_text((run / name).read_text())
    (tmp_path / "data.json").write_text("{")
    with pytest.raises(ValueError, match=r"data\.json is not as train wrote it \(.*\); put it back"):
        by_class(store, tmp_path, "model.scaling=ls")


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


def test_loading_a_run_leaves_the_caller_s_randomness_alone(run):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    experiment.load_run(run, device="cpu")
    assert torch.equal(torch.rand(3), expected)


def test_drawing_is_by_seed_and_index(run):
    loaded = experiment.load_run(run)
    whole = experiment.draw(loaded.config, loaded.model, 12, seed=3, steps=4)
    part = experiment.draw(loaded.config, loaded.model, 2, seed=3, first=10, steps=4)
    torch.testing.assert_close(part, whole[10:], rtol=1e-4, atol=1e-5)
    assert whole.shape == (12, 1, 8, 8)
    guided = experiment.draw(loaded.config, loaded.model, 12, seed=3, steps=4, guidance=3.0)
    assert not torch.allclose(guided, whole)


def test_samples_drawn_some_at_a_time_are_those_drawn_at_once(run):
    loaded = experiment.load_run(run, device="cpu")
    labels = torch.tensor([3, 1, 4, 1, 5, 9, 2])
    how = {"steps": 2, "seed": 3}
    some = list(experiment.drawn(loaded.config, loaded.model, range(5, 12), batch=3, labels=labels, **how))
    assert [len(images) for images in some] == [3, 3, 1]
    whole = experiment.draw(loaded.config, loaded.model, 7, first=5, labels=labels, **how)
    torch.testing.assert_close(torch.cat(some), whole, rtol=1e-4, atol=1e-5)


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


def test_samples_have_the_classes_as_often_as_the_data(store):  # noqa: F811
    few = replace(store, labels=np.repeat([0, 1], [900, 100]), manifest=replace(store.manifest, count=1000))
    labels = experiment.labels_like(few, range(1000))
    assert labels.bincount().tolist() == [900, 100]
    assert 3 < labels[:100].sum() < 20  # in no order
    again = torch.cat([experiment.labels_like(few, part) for part in (range(400), range(400, 1000))])
    assert torch.equal(again, labels)
    assert torch.equal(experiment.labels_like(few, range(1000, 1010)), labels[:10])


def test_a_unet_takes_sides_that_its_blocks_can_halve(store):  # noqa: F811
    with pytest.raises(
        ValueError, match="a UNet of 5 blocks takes images whose sides are multiples of 16, got 8×8"
    ):
        experiment.fitted_to(
            with_overrides(run_preset("cifar10-unet"), ["model.changes.block_out_channels=8,8,8,8,8"]), store
        )
    experiment.fitted_to(run_preset("cifar10-unet"), store)


def test_a_recipe_by_class_can_be_trained_without(store):  # noqa: F811
    fitted = experiment.fitted_to(with_overrides(run_preset("imagenet64-uvit-m"), ["data.condition=none"]), store)
    assert fitted.model.changes["num_class_embeds"] is None


def test_a_setting_that_was_not_there_is_named(run, store, tmp_path):  # noqa: F811
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    told = json.loads((folder / "config.json").read_text())
    told["model"]["changes"]["dropout"] = None
    (folder / "config.json").write_text(json.dumps(told))
    with pytest.raises(ValueError, match=r"model\.changes\.dropout was None and is not set"):
        by_class(store, folder, "model.scaling=ls")
