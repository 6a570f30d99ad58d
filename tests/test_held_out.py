import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from scalelong import experiment, held_out
from scalelong.cli.main import app, main
from scalelong.config import LatentConfig, with_overrides
from scalelong.data.images import Item, Source
from scalelong.data.loader import Batch
from scalelong.data.prepare import prepare
from scalelong.data.store import open_store
from scalelong.diffusion.process import process_named
from scalelong.held_out import HeldOut, check_fits, check_like
from scalelong.judging import judge_held_out
from scalelong.presets import run_preset
from scalelong.training.log import read_metrics

TINY = ["model.changes.hidden_size=16", "model.changes.num_layers=2", "train.batch_size=4", "train.ema_rates=0.5"]


def made(folder, count=12, size=8, classes=None, offset=0):
    def pictures():
        for i in range(count):
            pixels = np.random.default_rng(offset + i).integers(0, 256, (size, size, 1), np.uint8)
            yield Item(f"picture {i}", pixels, label=None if classes is None else i % len(classes))

    return prepare(Source("made", count, classes, pictures), folder)


def settings(*changes):
    return with_overrides(run_preset("digits"), [*TINY, "train.steps=4", *changes])


class Nothing(torch.nn.Module):
    """Predicts 0, whatever it is shown."""

    def forward(self, sample, timestep, return_dict=False, **given):
        return (torch.zeros_like(sample),)


@pytest.mark.parametrize("target", ["epsilon", "x0"])
def test_predicting_nothing_has_the_target_s_own_size_as_loss(tmp_path, target):
    """The target ε has variance 1; the target x0 is the image, whose mean square is known from the pixels."""
    store = made(tmp_path / "data", 200)
    config = experiment.fitted_to(settings(f"target={target}"), store)
    found = HeldOut(config, store, batch=64).measure(Nothing())
    images = np.asarray(store.images[:]).astype(np.float64) / 127.5 - 1
    want = 1.0 if target == "epsilon" else np.square(images).mean()
    assert found.loss == pytest.approx(want, abs=0.02 if target == "epsilon" else 1e-6)
    assert found.images == 200
    assert len(found.by_noise) == found.draws
    assert np.mean(found.by_noise) == pytest.approx(found.loss)


def test_a_perfect_denoiser_of_single_images_has_no_loss_where_it_can_have_none(tmp_path):
    """One image, and a network that knows it: ε = (x_t - α x_0)/σ exactly, at every time that was drawn."""
    store = made(tmp_path / "data", 2)
    config = experiment.fitted_to(settings(), store)
    image = HeldOut(config, store).loader.batch(0, 2).images
    process = process_named("vp-sde")

    class Knows(torch.nn.Module):
        def forward(self, sample, timestep, return_dict=False):
            alpha, sigma = (c.float()[:, None, None, None] for c in process.alpha_sigma(timestep))
            return ((sample - alpha * image) / sigma,)

    assert HeldOut(config, store).measure(Knows()).loss < 1e-6


def test_losses_do_not_depend_on_batches_seeds_of_runs_or_the_model_s_mode(tmp_path):
    store = made(tmp_path / "data")
    config = experiment.fitted_to(settings(), store)
    model = experiment.build_model(config).train()
    whole = HeldOut(config, store).measure(model)
    assert model.training
    other_seed = experiment.fitted_to(settings("train.seed=7"), store)
    assert HeldOut(other_seed, store, batch=5).measure(model.eval()).loss == pytest.approx(whole.loss, rel=1e-6)
    assert HeldOut(config, store, seed=1).measure(model).loss != whole.loss
    each = torch.cat([HeldOut(config, store).losses(model, b, None) for b in HeldOut(config, store).batches()], 1)
    assert whole.standard_error == pytest.approx(each.mean(0).std().item() / len(store) ** 0.5)


def test_what_does_not_fit_the_run_is_refused(tmp_path):
    config = experiment.fitted_to(settings("data.condition=class"), made(tmp_path / "data", classes=["a", "b"]))
    check_fits(config, made(tmp_path / "same", classes=["a", "b"]))
    with pytest.raises(ValueError, match="sample_size is 8 there, got 4"):
        check_fits(config, made(tmp_path / "small", size=4, classes=["a", "b"]))
    with pytest.raises(ValueError, match="num_class_embeds is 3 there, got 4"):
        check_fits(config, made(tmp_path / "more", classes=["a", "b", "c"]))
    with pytest.raises(ValueError, match="has none"):
        check_fits(config, made(tmp_path / "none"))
    with pytest.raises(ValueError, match="2 images or more"):
        HeldOut(config, made(tmp_path / "again", classes=["a", "b"]), num=1)
    with pytest.raises(ValueError, match="got 1 of"):
        HeldOut(config, made(tmp_path / "one", 1, classes=["a", "b"]))
    with pytest.raises(ValueError, match="classes of the training, a, b, got b, c"):
        check_like(config, open_store(tmp_path / "data"), made(tmp_path / "named", offset=100, classes=["b", "c"]))


def test_the_training_s_own_images_are_refused(tmp_path):
    """Under another name and with other labels, too."""
    store = made(tmp_path / "data", classes=["a", "b"])
    config = experiment.fitted_to(settings(), store)
    check_like(config, store, made(tmp_path / "unseen", offset=100))
    for same in (store, made(tmp_path / "copy")):
        with pytest.raises(ValueError, match=rf"not seen in training.*{same.folder.name} holds images of"):
            check_like(config, store, same)
    out, arguments = tmp_path / "run", ["--held-out", str(tmp_path / "copy"), "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(app, ["train", "digits", "--data", str(tmp_path / "data"), *arguments])
    assert isinstance(result.exception, ValueError)
    assert not out.exists()


def test_some_of_the_training_s_own_images_are_counted(tmp_path, monkeypatch):
    store = made(tmp_path / "data")
    config = experiment.fitted_to(settings(), store)
    with pytest.warns(
        UserWarning, match="7 of the 12 held-out images in .*overlap are among those of the training"
    ):
        check_like(config, store, overlap := made(tmp_path / "overlap", offset=5))
    with pytest.raises(ValueError, match="not seen in training"):
        check_like(config, store, made(tmp_path / "part", count=5))
    monkeypatch.setattr(held_out, "_READ_AT_MOST", 100)
    check_like(config, store, overlap)  # too large to look


def test_latents_of_another_autoencoder_are_refused(tmp_path):
    store = made(tmp_path / "data")
    space = LatentConfig(autoencoder="a", weights="w", scaling_factor=0.18, shift_factor=0.0, image_shape=(8, 8, 1))
    ours = replace(experiment.fitted_to(settings(), store), latents=space)
    assert held_out._prepared(ours) == held_out._prepared(
        replace(ours, latents=replace(space, autoencoder="moved"))
    )
    for change in ({"weights": "v"}, {"scaling_factor": 1.0}, {"shift_factor": 0.1}):
        assert held_out._prepared(ours) != held_out._prepared(replace(ours, latents=replace(space, **change)))


@pytest.mark.parametrize("process", ["edm", "flow:logit-normal", "vp-sde"])
def test_a_time_that_is_rounded_up_to_the_end_is_finite(tmp_path, process):
    """Position 175,840 of seed 0 draws a uniform of 1 - 2^-22 or more in its last stretch."""
    store = made(tmp_path / "data", 2)
    asked = HeldOut(experiment.fitted_to(settings(f"process={process}"), store), store)
    batch = asked.loader.batch(0, 2)
    late = Batch(batch.images[:1], None, torch.tensor([175_840]))
    assert asked.times.uniform(late.indices * 8 + 7) >= 1 - 2**-22
    assert asked.losses(Nothing(), late, None).isfinite().all()


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))],
)
def test_a_run_logs_it_and_evaluate_finds_the_same(tmp_path, device):
    """On a GPU between captured steps, and compared with the CPU."""
    store, unseen = made(tmp_path / "data"), made(tmp_path / "unseen", offset=100)
    config = settings("train.ema_rates=0.5,0.9")
    judge = judge_held_out(config, store, unseen, device, num=100, every=2)
    experiment.train(config, store, tmp_path / "run", device=device, judges=[judge], logger="none")
    rows = {row["step"]: row["held out"] for row in read_metrics(tmp_path / "run") if "held out" in row}
    assert list(rows) == [2, 4]
    for rate in (0.5, 0.9):
        command = ["evaluate", str(tmp_path / "run"), "--data", str(tmp_path / "unseen"), "--loss"]
        result = CliRunner().invoke(app, [*command, "--ema", str(rate), "--json", "--device", "cpu"])
        found = json.loads(result.stdout)
        # On a GPU the run is in bf16, and so is what it logs.
        close = {"rel": 1e-6 if device == "cpu" else 1e-2}
        assert found["loss"] == pytest.approx(rows[4][f"loss at {rate}"], **close)
        assert found["by_noise"] == pytest.approx(rows[4][f"by noise at {rate}"], **close)
        assert found["images"] == 12


def test_a_run_in_bf16_logs_its_loss_in_bf16_and_says_so(tmp_path):
    store, unseen = made(tmp_path / "data"), made(tmp_path / "unseen", offset=100)
    judges = [
        judge_held_out(settings(f"train.precision={precision}"), store, unseen, "cpu", num=12)
        for precision in ("fp32", "bf16")
    ]
    assert [judge.about.endswith(", bf16") for judge in judges] == [False, True]
    model = experiment.build_model(experiment.fitted_to(settings(), store))
    whole, half = (judge.figures_of(model, iter)["loss"] for judge in judges)
    assert half == pytest.approx(whole, rel=1e-2)
    assert half != whole


def test_other_held_out_images_are_asked_about_anew(tmp_path):
    store = made(tmp_path / "data")
    first, second = (made(tmp_path / str(offset), offset=offset) for offset in (100, 200))
    for unseen in (first, second, second):
        judge = judge_held_out(settings(), store, unseen, "cpu", num=100, every=4)
        experiment.train(settings(), store, tmp_path / "run", device="cpu", judges=[judge], logger="none")
    rows = [row["held out"] for row in read_metrics(tmp_path / "run") if "held out" in row]
    assert len(rows) == 2  # the third time the same was asked
    assert rows[0]["loss"] != rows[1]["loss"]
    assert rows[0]["of"] != rows[1]["of"]


def test_what_cannot_be_asked_is_told_before_anything_is_done(tmp_path, monkeypatch, capsys):
    def told(*command):
        monkeypatch.setattr("sys.argv", ["scalelong", *map(str, command)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, capsys.readouterr()

    made(tmp_path / "data")
    changes = [part for s in [*TINY, "train.steps=1"] for part in ("--set", s)]
    train = ["train", "digits", "--data", tmp_path / "data", *changes, "--out", tmp_path / "run"]
    code, said = told(*train, "--held-out", tmp_path / "nowhere", "--dry-run")
    assert code == 2
    assert "nowhere" in said.err
    told(*train)
    ask = ["evaluate", tmp_path / "run", "--data", tmp_path / "data", "--loss"]
    assert told(*ask, "--dry-run")[1].out.startswith("the loss of")
    code, said = told(*ask, "--caption-check")
    assert code == 2
    assert "one at a time" in said.err
    code, said = told(*ask[:-1], "--caption-check", "--dry-run")
    assert code == 2
    assert "needs a run on text" in said.err


def test_the_command_logs_it(tmp_path):
    made(tmp_path / "data")
    made(tmp_path / "unseen", offset=100)
    changes = [part for s in [*TINY, "train.steps=2"] for part in ("--set", s)]
    given = ["--data", str(tmp_path / "data"), "--held-out", str(tmp_path / "unseen"), *changes]
    CliRunner().invoke(
        app,
        ["train", "digits", *given, "--held-out-every", "1", "--out", str(tmp_path / "run")],
        catch_exceptions=False,
    )
    assert [row["step"] for row in read_metrics(tmp_path / "run") if "held out" in row] == [1, 2]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Loss on held-out images" in page
    assert "Where in the process" not in page  # nothing to compare with


@pytest.mark.slow
def test_large_images_are_compared_without_pixel_distances(tmp_path):
    """A covariance of all their pixels would take minutes; their loss does not."""
    made(tmp_path / "data", size=64)
    made(tmp_path / "unseen", size=64, offset=100)
    changes = [part for s in [*TINY, "model.changes.patch_size=16", "train.steps=1"] for part in ("--set", s)]
    given = ["--data", str(tmp_path / "data"), "--held-out", str(tmp_path / "unseen"), *changes]
    command = ["compare", "digits", *given, "--scalings", "none", "--seeds", "0", "--out", str(tmp_path / "all")]
    result = CliRunner().invoke(app, [*command, "--json"], catch_exceptions=False)
    assert float(json.loads(result.stdout)["rows"][0]["held-out loss"].split()[0]) > 0
    assert not any("quality" in row for row in read_metrics(tmp_path / "all" / "none-seed0"))
    refused = CliRunner().invoke(app, [*command, "--features", "pixels", "--dry-run"])
    assert "tiny images" in str(refused.exception)
