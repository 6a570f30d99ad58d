"""Runs that begin with other weights, and branches of runs: real trainings of seconds on the real digits."""

import json
import shutil
import warnings
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from diffusers import UNet2DModel

import scalelong
from scalelong import experiment
from scalelong.backbones.build import build
from scalelong.config import with_overrides
from scalelong.data.prepare import prepare
from scalelong.data.sources import digits
from scalelong.export import export
from scalelong.presets import run_preset
from scalelong.training import checkpoint
from tests.texts import pictures
from tests.training.test_fit import config, same, store  # noqa: F401 - a fixture

UNET = {
    "block_out_channels": [8, 16],
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
    "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
    "norm_num_groups": 4,
    "attention_head_dim": 8,
    "layers_per_block": 1,
}


@pytest.fixture(scope="module")
def run(store, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("runs") / "run"
    experiment.train(config("train.steps=6", "train.lr=3e-3"), store, folder)
    return folder


def first_model(asked, store, begin):  # noqa: F811
    """The network of a run at step 0."""
    fitted = experiment.fitted_to(begin.fitted(asked), store)
    return fitted, begin.model(fitted, "cpu")


def outputs(model):
    torch.manual_seed(0)
    with torch.no_grad():
        return model.eval()(torch.randn(3, 1, 8, 8), torch.tensor([10.0, 400.0, 900.0])).sample


def test_a_run_begins_with_the_average_of_another(run, store, tmp_path):  # noqa: F811
    begin = experiment.Weights(str(run))
    _, model = first_model(config(), store, begin)
    torch.testing.assert_close(
        outputs(model), outputs(experiment.load_run(run, device="cpu").model), rtol=0, atol=0
    )
    experiment.train(config("train.steps=2"), store, tmp_path / "next", begin=begin)
    began = json.loads((tmp_path / "next" / "began.json").read_text())
    assert (began["how"], began["source"], began["step"]) == ("weights", str(run.resolve()), 6)
    assert experiment.last_step(tmp_path / "next") == 2


@pytest.mark.parametrize(
    ("scaling", "keeps"), [("ls", True), ("cs:0.7", True), ("cs:0.7", False), ("ls-per-skip", True)]
)
def test_a_scaling_for_weights_that_had_none(run, store, tmp_path, scaling, keeps):  # noqa: F811
    asked = config(f"model.scaling={scaling}", f"model.keep_function={str(keeps).lower()}", "train.steps=2")
    before = outputs(experiment.load_run(run, device="cpu").model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _, model = first_model(asked, store, experiment.Weights(str(run)))
    assert bool(told) != keeps
    assert torch.allclose(outputs(model), before, rtol=1e-4, atol=1e-5) == keeps
    assert str(scalelong.scaling_of(model).scaling) == scaling
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        experiment.train(asked, store, tmp_path / "next", begin=experiment.Weights(str(run)))
    again = experiment.load_run(tmp_path / "next", device="cpu")
    assert scalelong.scaling_of(again.model).keep_function == keeps
    assert again.config == experiment.read_config(tmp_path / "next")
    # Two updates away from the weights that it began with, and not of fresh ones.
    assert (outputs(again.model) - before).abs().max() < 0.2 * before.abs().max()


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))],
)
def test_gates_are_drawn_by_the_seed_whatever_else_was_drawn_and_on_any_device(run, store, device):  # noqa: F811
    def gates(seed, before):
        torch.manual_seed(before)
        begin = experiment.Weights(str(run))
        fitted = experiment.fitted_to(begin.fitted(config("model.scaling=ls", f"train.seed={seed}")), store)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            handle = scalelong.scaling_of(begin.model(fitted, device))
        return torch.cat([p.detach().cpu().flatten() for p in handle.parameters()])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, model = first_model(config("model.scaling=ls", "train.seed=0"), store, experiment.Weights(str(run)))
    want = torch.cat([p.detach().flatten() for p in scalelong.scaling_of(model).parameters()])
    assert torch.equal(gates(0, 1), want)
    assert torch.equal(gates(0, 2), want)
    assert not torch.equal(gates(1, 1), want)


def test_a_scaling_that_the_weights_have_is_kept(store, run, tmp_path):  # noqa: F811
    asked = config("model.scaling=ls", "train.steps=3", "train.lr=3e-3", "model.keep_function=true")
    experiment.train(asked, store, tmp_path / "ls")
    begin = experiment.Weights(str(tmp_path / "ls"))
    fitted, model = first_model(config(), store, begin)
    assert (fitted.model.scaling, fitted.model.keep_function) == ("ls", True)
    trained = experiment.load_run(tmp_path / "ls", device="cpu").model
    torch.testing.assert_close(outputs(model), outputs(trained), rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"trained with the scaling 'ls' at 'concat', and 'cs:0.7' .* asked for"):
        begin.fitted(config("model.scaling=cs:0.7"))
    export(experiment.load_run(tmp_path / "ls", device="cpu"), tmp_path / "pipeline")
    _, model = first_model(config(), store, experiment.Weights(str(tmp_path / "pipeline")))
    torch.testing.assert_close(outputs(model), outputs(trained), rtol=0, atol=0)


def test_a_network_of_diffusers_gives_its_shape_too(tmp_path):
    torch.manual_seed(1)
    unet = UNet2DModel(sample_size=8, in_channels=3, out_channels=3, **UNET)
    scalelong.apply(unet, "cs:0.7", placement="norm")
    unet.save_pretrained(tmp_path / "unet")
    data = prepare(pictures(), tmp_path / "data")
    asked = with_overrides(
        run_preset("cifar10-unet"),
        ["train.steps=1", "train.batch_size=4", "train.warmup_steps=0", "sampling.steps=1"],
    )
    experiment.train(asked, data, tmp_path / "run", device="cpu", begin=experiment.Weights(str(tmp_path / "unet")))
    found = experiment.read_config(tmp_path / "run").model
    assert list(found.changes["block_out_channels"]) == [8, 16]
    assert (found.scaling, found.placement) == ("cs:0.7", "norm")
    weights = checkpoint.load_latest(tmp_path / "run" / "checkpoints").tensors("model")
    for name, tensor in unet.state_dict().items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=2 * asked.train.lr)
    shutil.rmtree(tmp_path / "unet")  # what a run began with may go
    experiment.train(with_overrides(asked, ["train.steps=2"]), data, tmp_path / "run", device="cpu")
    assert experiment.last_step(tmp_path / "run") == 2
    unet.save_pretrained(tmp_path / "unet")
    with pytest.raises(ValueError, match="is a UNet2DModel, and digits trains a UViT"):
        experiment.Weights(str(tmp_path / "unet")).fitted(run_preset("digits"))


def test_other_classes_begin_anew_and_other_shapes_are_refused(run, store, tmp_path):  # noqa: F811
    by_class = config("data.condition=class", "train.steps=1")
    experiment.train(by_class, store, tmp_path / "ten")
    fewer = with_overrides(by_class, ["data.label_dropout=0"])  # ten classes, and none for no class
    with pytest.warns(
        UserWarning, match=r"label_emb.weight is of other classes in .*ten: it begins anew, \[10, 32\]"
    ):
        _, model = first_model(fewer, store, experiment.Weights(str(tmp_path / "ten")))
    trained = experiment.load_run(tmp_path / "ten", device="cpu").model
    assert torch.equal(model.pos_embed, trained.pos_embed)
    assert model.label_emb.weight.shape == (10, 32)
    with pytest.raises(ValueError, match=r"do not fit: pos_embed is \[1, 17, 32\] there and \[1, 18, 32\] here"):
        experiment.train(by_class, store, tmp_path / "new", begin=experiment.Weights(str(run)))
    assert not (tmp_path / "new").exists()


def test_a_run_killed_before_its_first_checkpoint_begins_with_its_weights_again(run, store, tmp_path):  # noqa: F811
    begin, asked = experiment.Weights(str(run)), config("train.steps=3")
    experiment.train(asked, store, tmp_path / "straight", begin=begin)
    experiment.train(asked, store, tmp_path / "killed", begin=begin)
    shutil.rmtree(tmp_path / "killed" / "checkpoints")
    experiment.train(asked, store, tmp_path / "killed")
    assert same(tmp_path / "straight", tmp_path / "killed")


def test_a_branch_with_the_same_settings_is_the_run_itself(run, store, tmp_path):  # noqa: F811
    straight = config("train.steps=9", "train.lr=3e-3")
    experiment.train(straight, store, shutil.copytree(run, tmp_path / "straight"))
    before = {file: file.stat().st_mtime_ns for file in run.rglob("*")}
    experiment.train(straight, store, tmp_path / "branch", begin=experiment.Branch(run))
    assert same(tmp_path / "straight", tmp_path / "branch")
    assert {file: file.stat().st_mtime_ns for file in run.rglob("*")} == before
    slower = with_overrides(straight, ["train.lr=1e-5", "train.clip_norm=1", "train.seed=7"])
    experiment.train(slower, store, tmp_path / "slower", begin=experiment.Branch(run))
    assert not same(tmp_path / "straight", tmp_path / "slower")
    assert experiment.read_config(tmp_path / "slower").train.lr == 1e-5


def test_a_branch_keeps_what_its_tensors_are_of(run, store, tmp_path):  # noqa: F811
    branch = experiment.Branch(run)
    for setting, told in (
        ("model.scaling=cs:0.5", r"model\.scaling was 'none' and is 'cs:0\.5'"),
        ("train.batch_size=16", r"train\.batch_size was 32 and is 16"),
        ("train.ema_rates=0.5", r"train\.ema_rates was"),
        ("target=v", r"target was 'auto' and is 'v'"),
    ):
        with pytest.raises(ValueError, match=f"a branch keeps .*{told}"):
            experiment.train(config("train.steps=9", setting), store, tmp_path / "no", begin=branch)
    with pytest.raises(ValueError, match=r"is at step 6, and train\.steps is 6; a branch takes more"):
        experiment.train(config("train.steps=6"), store, tmp_path / "no", begin=branch)
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(run / "config.json", empty)
    with pytest.raises(ValueError, match="has no whole checkpoint to branch from"):
        experiment.train(config("train.steps=9"), store, tmp_path / "no", begin=experiment.Branch(empty))
    assert not (tmp_path / "no").exists()


def test_a_run_goes_on_as_it_began(run, store, tmp_path):  # noqa: F811
    out = tmp_path / "out"
    experiment.train(config("train.steps=7"), store, out, begin=experiment.Branch(run))
    other = shutil.copytree(run, tmp_path / "other")
    for begin, how in ((experiment.Weights(str(run)), "--init"), (experiment.Branch(other), "--branch")):
        with pytest.raises(ValueError, match=f"out holds a run that began as a branch of .*; leave {how} out"):
            experiment.train(config("train.steps=8"), store, out, begin=begin)
    with pytest.raises(ValueError, match="other holds a run that began by itself; leave --init out"):
        experiment.train(config("train.steps=8"), store, other, begin=experiment.Weights(str(run)))
    experiment.train(config("train.steps=8"), store, out, begin=experiment.Branch(run))
    assert experiment.last_step(out) == 8


@pytest.mark.parametrize("how", ["branch", "weights"])
def test_what_is_stopped_while_it_begins_is_no_run_from_scratch(run, store, tmp_path, monkeypatch, how):  # noqa: F811
    asked, out = config("train.steps=8"), tmp_path / "stopped"
    begin = experiment.Branch(run) if how == "branch" else experiment.Weights(str(run))
    experiment.train(asked, store, tmp_path / "straight", begin=begin)
    look = checkpoint.load_latest

    def stopped(root):
        if (out / "config.json").exists() or (how == "weights" and out.exists()):
            raise KeyboardInterrupt
        return look(root)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "load_latest", stopped)
        with pytest.raises(KeyboardInterrupt):
            experiment.train(asked, store, out, begin=begin)
    again = {} if (out / "config.json").exists() else {"begin": begin}
    experiment.train(asked, store, out, **again)
    assert same(tmp_path / "straight", out)


def test_a_branch_without_its_checkpoint_does_not_begin(run, store, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(checkpoint, "copy", lambda found, root: None)
    with pytest.raises(ValueError, match="has no whole copy of what it begins with; give the same command again"):
        experiment.train(config("train.steps=8"), store, tmp_path / "out", begin=experiment.Branch(run))


def test_a_branch_may_begin_with_fp16(run, store, tmp_path):  # noqa: F811
    asked = config("train.steps=8", "train.precision=fp16")
    experiment.train(asked, store, tmp_path / "half", begin=experiment.Branch(run))
    state = checkpoint.load_latest(tmp_path / "half" / "checkpoints").state
    assert state["step"] == 8
    assert state["scaler"]["scale"] > 1
    again = config("train.steps=9", "train.precision=fp32")
    experiment.train(again, store, tmp_path / "single", begin=experiment.Branch(tmp_path / "half"))
    assert experiment.last_step(tmp_path / "single") == 9


def test_other_data_of_a_branch_are_told(run, store, tmp_path):  # noqa: F811
    every = digits()
    fewer = replace(every, description="fewer digits", count=500, items=lambda: islice(every.items(), 500))
    asked, other = config("train.steps=7"), prepare(fewer, tmp_path / "fewer")
    with pytest.warns(UserWarning, match=r"digits \(1,797 images\), and its branch goes on with other data: fewer"):
        experiment.train(asked, other, tmp_path / "branch", begin=experiment.Branch(run))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.simplefilter("ignore", DeprecationWarning)  # of diffusers
        experiment.train(asked, store, tmp_path / "same", begin=experiment.Branch(run))


def test_weights_that_read_text_are_none_for_a_run_without(store, tmp_path):  # noqa: F811
    asked = config("train.steps=1")
    reading = build("digits", **asked.model.changes, cross_attention_dim=8, text_len=4)
    reading.save_pretrained(tmp_path / "reading")
    with pytest.raises(ValueError, match=r"do not fit: context_embed.bias is \[32\] there and missing here"):
        experiment.train(asked, store, tmp_path / "run", begin=experiment.Weights(str(tmp_path / "reading")))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"out_channels": 6}, "takes 3 and gives 6, as with a learned variance; begin with other weights"),
        ({"class_embed_type": "identity"}, "has class_embed_type='identity'; begin with other weights"),
    ],
)
def test_a_network_that_is_called_otherwise_is_refused(tmp_path, other, says):
    how = {"sample_size": 8, "in_channels": 3, "out_channels": 3, **UNET, **other}
    UNet2DModel(**how).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=says):
        experiment.Weights(str(tmp_path)).fitted(run_preset("cifar10-unet"))


def test_a_run_without_a_checkpoint_has_no_weights_yet(run, store, tmp_path):  # noqa: F811
    (tmp_path / "young").mkdir()
    for name in ("config.json", "environment.json"):
        shutil.copy(run / name, tmp_path / "young")
    begin = experiment.Weights(str(tmp_path / "young"))
    with pytest.raises(ValueError, match="young has no whole checkpoint"):
        experiment.train(config("train.steps=1"), store, tmp_path / "run", begin=begin)
    assert not (tmp_path / "run").exists()


def test_the_same_call_goes_on_where_the_source_was_moved(run, store, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run, "source")
    begins = {"weights": experiment.Weights("source"), "branch": experiment.Branch(Path("source"))}
    for name, begin in begins.items():
        experiment.train(config("train.steps=7"), store, tmp_path / name, begin=begin)
    Path("source").rename("moved")
    for name, begin in begins.items():
        experiment.train(config("train.steps=8"), store, tmp_path / name, begin=begin)
        assert experiment.last_step(tmp_path / name) == 8
