"""Real training runs of seconds, on the real digits."""

import gc
import math
import signal
import subprocess
import sys
import time
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from scalelong import experiment
from scalelong.config import with_overrides
from scalelong.data.loader import Loader
from scalelong.data.prepare import prepare
from scalelong.data.sources import digits
from scalelong.presets import run_preset
from scalelong.training import checkpoint
from scalelong.training import step as step_module
from scalelong.training.fit import Fit
from scalelong.training.guard import NonFiniteError
from scalelong.training.log import NoLog, divergence, read_metrics
from scalelong.training.signals import oscillation_index
from scalelong.training.step import Drawing, Stepper, parameter_groups, warmup
from scalelong.world import World

SMALL = [
    "model.changes.hidden_size=32",
    "model.changes.num_layers=4",
    "train.batch_size=32",
    "train.warmup_steps=5",
    "train.log_every=2",
    "train.monitor_every=4",
    "train.sample_every=1000",
    "train.checkpoint_every=5",
    "train.ema_rates=0.9,0.99",
]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return prepare(digits(), tmp_path_factory.mktemp("data") / "digits")


def config(*settings):
    return with_overrides(run_preset("digits"), [*SMALL, *settings])


def tensors_of(run):
    found = checkpoint.load_latest(run / "checkpoints")
    parts = sorted(f for f in found.folder.iterdir() if f.is_dir() or f.suffix == ".safetensors")
    names = [f.name.removesuffix(".safetensors") for f in parts]  # whole, or in parts
    return found.step, {f"{name}/{k}": v for name in names for k, v in found.tensors(name).items()}


def same(run, other):
    (step, a), (other_step, b) = tensors_of(run), tensors_of(other)
    assert step == other_step
    assert a.keys() == b.keys()
    return all(torch.equal(a[k], b[k]) for k in a)


def test_the_loss_falls(store, tmp_path):
    experiment.train(config("train.steps=120", "train.lr=3e-3"), store, tmp_path / "run")
    losses = [row["loss"] for row in read_metrics(tmp_path / "run") if "loss" in row]
    assert len(losses) == 60
    assert np.mean(losses[-5:]) < 0.6 * np.mean(losses[:2])


def test_samples_come_nearer_to_the_data(store, tmp_path):
    from scalelong.metrics.evaluate import quality_of, reference_of
    from scalelong.metrics.features import PixelFeatures

    run = experiment.fitted_to(config("train.steps=200", "train.lr=3e-3"), store)
    reference = reference_of(store, PixelFeatures())

    def distance(model):
        images = experiment.draw(run, model, 128, steps=15)
        return quality_of([images], reference, PixelFeatures(), "").fid

    before = distance(experiment.build_model(run))
    experiment.train(run, store, tmp_path / "run", device="cpu")
    after = distance(experiment.load_run(tmp_path / "run", device="cpu").model)
    assert after < before / 2


@pytest.mark.parametrize("settings", [["model.scaling=ls"], ["data.condition=class", "model.scaling=cs:0.7"]])
def test_resume_is_exact(store, tmp_path, settings):
    straight, halting = tmp_path / "straight", tmp_path / "halting"
    experiment.train(config("train.steps=14", *settings), store, straight)
    for halt in (5, 6, None):

        def stop(progress, halt=halt):
            if progress.step == halt:
                signal.raise_signal(signal.SIGTERM)

        done = experiment.train(config("train.steps=14", *settings), store, halting, show=stop)
        assert done == (halt is None)
    assert same(straight, halting)

    def untimed(run):
        return [{k: v for k, v in row.items() if k != "seconds_per_step"} for row in read_metrics(run)]

    assert untimed(straight) == untimed(halting)


KILLED = ["train.steps=40", "model.scaling=ls-per-skip", "train.checkpoint_every=3"]


@pytest.mark.parametrize("kills", [(8,), pytest.param((5, 11, 21, 22, 33), marks=pytest.mark.slow)])
def test_a_run_killed_at_any_moment_ends_bitwise_the_same(store, tmp_path, kills):
    code = f"""
import sys
from pathlib import Path
import torch
from scalelong import experiment
from scalelong.data.store import open_store
from tests.training.test_fit import KILLED, config
torch.set_num_threads({torch.get_num_threads()})
def show(progress):
    print(progress.step, flush=True)
experiment.train(config(*KILLED), open_store({str(store.folder)!r}), Path(sys.argv[1]), device="cpu", show=show)
"""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    rng = np.random.default_rng(0)
    for target in kills:
        process = subprocess.Popen([sys.executable, "-c", code, str(killed)], stdout=subprocess.PIPE, text=True)
        for line in process.stdout:
            if int(line) >= target:
                time.sleep(rng.uniform(0, 0.02))  # somewhere in a step, or in a save
                break
        process.send_signal(signal.SIGKILL)
        process.wait()
    for run in (killed, whole):
        assert experiment.train(config(*KILLED), store, run, device="cpu")
    assert same(killed, whole)


def test_ctrl_c_saves_and_the_same_call_goes_on(store, tmp_path):
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    experiment.train(config("train.steps=12"), store, straight, device="cpu")

    def interrupt(progress):
        if progress.step == 7:
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    assert not experiment.train(config("train.steps=12"), store, stopped, show=interrupt, device="cpu")
    assert checkpoint.load_latest(stopped / "checkpoints").step == 7
    assert signal.getsignal(signal.SIGTERM) == before
    assert experiment.train(config("train.steps=12"), store, stopped, device="cpu")
    assert same(straight, stopped)


def test_a_run_that_is_given_some_time_stops_in_it_and_goes_on(store, tmp_path):
    straight, by_bits = tmp_path / "straight", tmp_path / "by bits"
    experiment.train(config("train.steps=4"), store, straight, device="cpu")
    done = []
    while not done or not done[-1]:
        done.append(experiment.train(config("train.steps=4"), store, by_bits, device="cpu", stop_after_s=1e-9))
    assert done == [False, False, False, True]  # a step is always done
    assert same(straight, by_bits)
    assert experiment.train(config("train.steps=6"), store, by_bits, device="cpu", stop_after_s=600)


def test_a_nan_stops_before_the_update_names_its_origin_and_loses_nothing(store, tmp_path, monkeypatch):
    good, bad = tmp_path / "good", tmp_path / "bad"
    experiment.train(config("train.steps=7"), store, good, device="cpu")
    plain = Stepper._loss

    def poisoned(self, piece, forward):
        block = self.model.in_blocks[1].mlp.fc2
        if self.step == 7 and not block._forward_hooks:
            block.register_forward_hook(lambda m, a, out: out * float("inf"))
        return plain(self, piece, forward)

    monkeypatch.setattr(Stepper, "_loss", poisoned)
    with pytest.raises(NonFiniteError, match=r"step 7: the loss is not finite.*in_blocks\.1\.mlp\.fc2") as error:
        experiment.train(config("train.steps=20"), store, bad, device="cpu")
    assert error.value.step == 7
    assert same(good, bad)
    found = divergence(bad)
    assert (found["step"], found["what"], found["error"]) == (7, "loss", str(error.value))
    monkeypatch.setattr(Stepper, "_loss", plain)  # a cause that is gone: the log goes on, and says nothing of it
    experiment.train(config("train.steps=20"), store, bad, device="cpu")
    assert divergence(bad) is None
    assert not any("nonfinite" in row for row in read_metrics(bad))


def test_a_nan_whose_module_cannot_be_found_for_want_of_memory_is_told_and_loses_nothing(
    store, tmp_path, monkeypatch
):
    good, bad = tmp_path / "good", tmp_path / "bad"
    experiment.train(config("train.steps=7"), store, good, device="cpu")
    plain = Stepper._loss

    def poisoned(self, piece, forward):
        return plain(self, piece, forward) * (math.inf if self.step == 7 else 1)

    def no_room(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 31 GiB.\nGPU 0 has")

    monkeypatch.setattr(Stepper, "_loss", poisoned)
    monkeypatch.setattr(step_module, "find_culprit", no_room)
    with pytest.raises(NonFiniteError, match="step 7: the loss is not finite.*could not be run again.*31 GiB"):
        experiment.train(config("train.steps=20"), store, bad, device="cpu")
    assert same(good, bad)


def test_a_glance_tells_what_the_last_one_saw(store, monkeypatch):
    plain = Stepper._loss
    monkeypatch.setattr(Stepper, "_loss", lambda self, *a: plain(self, *a) / (self.step != 3))
    step = stepper(store, "train.steps=1")
    found = []
    for i in range(7):
        step.update(i)
        if i == 3:
            before = [p.detach().clone() for p in step.model.parameters()]
        if i % 2 == 0:
            try:
                step.glance()
            except NonFiniteError as error:
                found.append((i, error.step))
    assert found == [(6, 3)]  # at 4 it was sent, at 6 it had arrived
    assert all(torch.equal(a, b) for a, b in zip(before, step.model.parameters(), strict=True))


@pytest.mark.parametrize("stopped", [True, False], ids=["stopped right after it", "by a glance"])
def test_a_bad_step_between_two_looks_does_not_count(stopped, store, tmp_path, monkeypatch):
    good, bad = tmp_path / "good", tmp_path / "bad"
    experiment.train(config("train.steps=18"), store, good, device="cpu")
    plain = Stepper._loss
    monkeypatch.setattr(Stepper, "_loss", lambda self, *a: plain(self, *a) / (self.step != 18))
    rarely = ["train.log_every=100", "train.monitor_every=100", "train.checkpoint_every=100"]
    run = experiment.fitted_to(config("train.steps=40", *rarely), store)
    step = Stepper(
        experiment.build_model(run), experiment.process_of(run), Loader(store, seed=run.train.seed), run.train
    )
    fit = Fit(run, step, bad)
    fit._look_every = None  # glances, as on a GPU

    reached = []

    def interrupt(progress):
        reached.append(progress.step)
        fit.interruption.asked = stopped and progress.step == 20

    with pytest.raises(NonFiniteError, match="step 18"):
        fit.run(NoLog(), show=interrupt)
    assert reached[-1] == (20 if stopped else 29)  # what the glance at 20 sent is read at 30
    assert same(good, bad)


def test_all_pieces_of_a_batch_are_drawn_by_one_compiled_function(store, monkeypatch):
    compiled = []

    def counting(graph, inputs):
        compiled.append(graph)
        return graph

    step = stepper(store, "train.steps=1", "train.batch_size=12", "train.accumulate=12")
    drawing = Drawing(step.process, step.loader, step.config)
    whole = drawing.batch(step.pixels, None, step.step, step.places)
    draw = torch.compile(drawing.batch, dynamic=False, backend=counting)
    parts = [draw(step.pixels[i : i + 1], None, step.step, step.places[i : i + 1]) for i in range(12)]
    assert len(compiled) == 1
    assert torch.equal(torch.cat([timesteps for _, timesteps, _ in parts]), whole[1])


def test_accumulation_changes_nothing_but_rounding(store, tmp_path):
    for pieces in (1, 4):
        experiment.train(config("train.steps=5", f"train.accumulate={pieces}"), store, tmp_path / str(pieces))
    (_, a), (_, b) = tensors_of(tmp_path / "1"), tensors_of(tmp_path / "4")
    for key in a:
        if key.startswith("model/"):
            torch.testing.assert_close(a[key], b[key], rtol=1e-3, atol=2e-4)


def test_bf16_stays_near_fp32(store, tmp_path):
    for precision in ("fp32", "bf16"):
        experiment.train(config("train.steps=20", f"train.precision={precision}"), store, tmp_path / precision)
    a, b = ([r["loss"] for r in read_metrics(tmp_path / p) if "loss" in r] for p in ("fp32", "bf16"))
    np.testing.assert_allclose(a, b, rtol=0.03)


def stepper(store, *settings):
    from scalelong.diffusion.process import process_named

    run = experiment.fitted_to(config(*settings), store)
    return Stepper(experiment.build_model(run), process_named(run.process), Loader(store, seed=0), run.train)


def test_an_fp16_overflow_is_tried_again_on_the_same_batch(store):
    step = stepper(store, "train.steps=1", "train.precision=fp16")
    step.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    seen = []
    plain = step.forward
    step.forward = lambda x, *a, **k: seen.append(x.clone()) or plain(x, *a, **k)
    step.update(0)
    step.check()
    assert step.loss.isfinite()
    assert step.norm.isfinite()
    assert len(seen) > 1
    assert all(torch.equal(x, seen[0]) for x in seen)
    assert step.scaler.get_scale() < 2.0**30
    assert {int(s["step"]) for s in step.optimiser.state.values()} == {1}


def test_warm_up_is_linear_and_then_constant(store):
    assert [warmup(torch.tensor(s), 4).item() for s in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert warmup(torch.tensor(0), 0) == 1
    step = stepper(store, "train.steps=3", "train.lr=0.1")
    step.update(2)
    assert step.optimiser.param_groups[0]["lr"] == pytest.approx(0.1 * 3 / 5)


def test_gates_have_a_group_of_their_own(store):
    model = experiment.build_model(experiment.fitted_to(config("model.scaling=ls"), store))
    groups = {group["name"]: group["params"] for group in parameter_groups(model)}
    assert sum(p.numel() for p in groups["gates"]) == 17 + 1 + 17 + 17
    assert len(groups["weights"]) + len(groups["gates"]) == len(list(model.parameters()))


def test_clipping_bounds_the_update(store):
    free, clipped = stepper(store, "train.steps=1"), stepper(store, "train.steps=1", "train.clip_norm=1e-3")
    free.update(0)
    clipped.update(0)
    assert clipped.norm == free.norm > 1e-3  # the norm before clipping is what is reported
    total = torch.nn.utils.get_total_norm([p.grad for p in clipped.model.parameters() if p.grad is not None])
    assert total == pytest.approx(1e-3, rel=1e-3)


def test_seeds_share_their_weights_across_scalings(store):
    plain, gated = (
        experiment.build_model(experiment.fitted_to(config(f"model.scaling={spec}"), store)).state_dict()
        for spec in ("none", "ls")
    )
    assert set(gated) > set(plain)
    assert [name for name, p in plain.items() if not torch.equal(p, gated[name])] == []


def test_the_seed_decides_everything(store, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        experiment.train(config("train.steps=3", f"train.seed={seed}"), store, tmp_path / name)
    assert same(tmp_path / "a", tmp_path / "b")
    assert not same(tmp_path / "a", tmp_path / "c")


def test_dropout_is_drawn_by_the_step(store, tmp_path):
    unet = replace(
        run_preset("cifar10-unet"),
        data=config().data,
        model=replace(
            run_preset("cifar10-unet").model,
            changes={"block_out_channels": [32, 32, 32, 32], "attention_head_dim": 32, "layers_per_block": 1},
        ),
    )
    tiny = ["train.batch_size=4", "train.checkpoint_every=2", "train.sample_every=1000", "train.ema_rates=0.9"]
    for name, halts in (("straight", (4,)), ("halting", (2, 4))):
        for steps in halts:
            experiment.train(with_overrides(unet, [*tiny, f"train.steps={steps}"]), store, tmp_path / name)
    assert same(tmp_path / "straight", tmp_path / "halting")


def test_moments_lie_in_memory_as_their_parameters_do(store, tmp_path):
    """A UNet's weights are channels-last on a GPU, and the fused optimiser pairs numbers by place."""
    from scalelong.training.fit import Fit

    unet = with_overrides(
        run_preset("cifar10-unet"),
        [
            'model.changes={"block_out_channels": [32, 32, 32, 32], "layers_per_block": 1}',
            "model.changes.attention_head_dim=32",
            "train.batch_size=2",
            "data.flip=false",
        ],
    )
    run = experiment.fitted_to(unet, store)

    def fresh():
        model = experiment.build_model(run).to(memory_format=torch.channels_last)
        step = Stepper(model, experiment.process_of(run), Loader(store, seed=0), run.train)
        return Fit(run, step, tmp_path / "run")

    first, second = fresh(), fresh()
    first.stepper.update(0)
    first.save()
    second.resume()
    for fit in (first, second):
        fit.stepper.update(1)
    for p, q in zip(first.model.parameters(), second.model.parameters(), strict=True):
        state = second.stepper.optimiser.state[q]
        assert state["exp_avg"].stride() == q.stride()
        assert torch.equal(p, q)


def test_a_run_that_is_done_lets_its_data_go(store, tmp_path, monkeypatch):
    """On a GPU its copy of the images would stay there through the next run: nothing that lasts may hold it."""
    made = []
    begin = Loader.__init__
    monkeypatch.setattr(
        Loader, "__init__", lambda self, *a, **k: (begin(self, *a, **k), made.append(weakref.ref(self)))[0]
    )
    experiment.train(config("train.steps=1"), store, tmp_path / "run", logger="none")
    gc.collect()
    assert made
    assert not any(loader() for loader in made)


def test_a_step_and_its_data_go_with_the_last_name_for_them(store):
    """Without the collector: nothing of theirs holds itself."""
    gc.collect()
    gc.disable()
    try:
        step = stepper(store, "train.steps=1")
        step.update(0)
        held = [weakref.ref(step), weakref.ref(step.loader)]
        del step
        assert [thing() for thing in held] == [None, None]
    finally:
        gc.enable()


def test_an_event_that_fails_costs_no_training_and_is_made_up_for(store, tmp_path):
    calls = []

    def figures_of(model, walk):
        calls.append(1)
        if len(calls) == 1:
            raise OSError("the disk is full")
        return {"fid": 1.0}

    settings = config("train.steps=10", "train.checkpoint_every=5", "train.ema_rates=0.9")
    judges = [experiment.Judge("quality", figures_of, every=5)]
    with pytest.raises(OSError, match="full"):
        experiment.train(settings, store, tmp_path / "run", judges=judges)
    assert checkpoint.load_latest(tmp_path / "run" / "checkpoints").step == 5
    experiment.train(settings, store, tmp_path / "run", judges=judges)
    judged = [row["step"] for row in read_metrics(tmp_path / "run") if "quality" in row]
    assert judged == [5, 10]


def test_a_request_to_stop_at_the_last_step_leaves_what_is_made_after_it(store, tmp_path):
    def stop(progress):
        if progress.step == 3:
            signal.raise_signal(signal.SIGTERM)

    grid = tmp_path / "run" / "samples" / "step-000000003.png"
    assert not experiment.train(config("train.steps=3"), store, tmp_path / "run", show=stop)
    assert (checkpoint.load_latest(tmp_path / "run" / "checkpoints").step, grid.exists()) == (3, False)
    assert experiment.train(config("train.steps=3"), store, tmp_path / "run")
    assert grid.exists()


def test_every_signal_counts_for_its_oscillation(store, tmp_path):
    experiment.train(
        config("train.steps=12", "train.log_every=12", "train.monitor_every=2"), store, tmp_path / "run"
    )
    last = read_metrics(tmp_path / "run")[-1]
    seen = [row["signals"]["skip norm/0"] for row in read_metrics(tmp_path / "run") if row.get("signals")]
    assert len(seen) == 6
    assert last["oscillation"]["skip norm/0"] == pytest.approx(oscillation_index(seen))


@pytest.mark.parametrize("scaling", ["scalar", "ls", "cs:0.7", "skip-norm"])
def test_an_observed_step_never_waits_for_a_value(store, scaling, monkeypatch):
    """A captured step must not: .item() and its like would end the capture."""
    step = stepper(store, f"model.scaling={scaling}")
    step._load(0)
    monkeypatch.setattr(torch.Tensor, "item", lambda self: pytest.fail("the host waited for a value"))
    step._body(observed=True)


def test_checkpointed_activations_are_seen_once(store):
    signals = []
    for settings in ([], ["train.checkpoint_activations=true"]):
        step = stepper(store, *settings)
        step.update(0, observed=True)
        signals.append(step.signals())
    assert signals[0]["skip norm/0"] == pytest.approx(signals[1]["skip norm/0"], rel=1e-5)


def test_who_stops_a_run_does_not_wait_for_samples_and_gets_them_later(store, tmp_path):
    def stop(progress):
        if progress.step == 4:
            signal.raise_signal(signal.SIGTERM)

    settings = config("train.steps=6", "train.sample_every=4")
    assert not experiment.train(settings, store, tmp_path / "run", show=stop)
    samples = tmp_path / "run" / "samples"
    assert not samples.exists()
    assert experiment.train(settings, store, tmp_path / "run")
    assert sorted(file.name for file in samples.iterdir()) == ["step-000000004.png", "step-000000006.png"]


def test_a_judge_that_fails_costs_no_training(store, tmp_path):
    def fail(model, walk):
        raise torch.OutOfMemoryError

    settings = config("train.steps=6", "train.checkpoint_every=100")
    with pytest.raises(torch.OutOfMemoryError):
        experiment.train(settings, store, tmp_path / "run", judges=[experiment.Judge("quality", fail, every=4)])
    assert checkpoint.load_latest(tmp_path / "run" / "checkpoints").step == 4
    experiment.train(settings, store, tmp_path / "run")
    experiment.train(settings, store, tmp_path / "straight")
    assert same(tmp_path / "run", tmp_path / "straight")


def test_processes_ask_each_other_only_where_something_is_due(store, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(World, "any", lambda self, flag, device: asked.append(flag) or flag)
    rarely = ["train.log_every=100", "train.monitor_every=100", "train.checkpoint_every=100"]
    run = experiment.fitted_to(config("train.steps=40", *rarely), store)
    step = Stepper(
        experiment.build_model(run), experiment.process_of(run), Loader(store, seed=run.train.seed), run.train
    )
    fit = Fit(run, step, tmp_path / "run")
    fit._look_every = 10  # as on several GPUs
    assert fit.run(NoLog())
    assert len(asked) == 4


def test_who_stops_a_run_while_it_is_judged_does_not_wait_for_the_judge(store, tmp_path, capsys):
    seen = []

    def figures_of(model, walk):
        for i in walk(range(1000)):
            seen.append(i)
            if i == 3 and len(seen) == 4:
                signal.raise_signal(signal.SIGTERM)
        return {"fid": 1.0}

    settings = config("train.steps=6", "train.ema_rates=0.9", "train.checkpoint_every=100")
    judges = [experiment.Judge("quality", figures_of, every=4)]
    stopped, straight = tmp_path / "stopped", tmp_path / "straight"
    assert not experiment.train(settings, store, stopped, judges=judges)
    assert seen == [0, 1, 2, 3]
    assert "stopping after a checkpoint" in capsys.readouterr().err
    assert checkpoint.load_latest(stopped / "checkpoints").step == 4
    assert experiment.train(settings, store, stopped, judges=judges)
    assert [row["step"] for row in read_metrics(stopped) if "quality" in row] == [4, 6]
    experiment.train(settings, store, straight)
    assert same(straight, stopped)  # the weights were the run's own again when they were saved


def test_two_signals_at_once_are_one_request(store, tmp_path):
    def stop(progress):
        if progress.step == 2:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    assert not experiment.train(config("train.steps=6"), store, tmp_path / "run", show=stop)
    assert checkpoint.load_latest(tmp_path / "run" / "checkpoints").step == 2


def test_a_folder_belongs_to_one_training_at_a_time(store, tmp_path):
    inside = []

    def again(progress):
        if progress.step == 2:
            with pytest.raises(ValueError, match=r"another process is training in .*run; wait until it ends"):
                experiment.train(config("train.steps=4"), store, tmp_path / "run")
            inside.append(progress.step)

    assert experiment.train(config("train.steps=4"), store, tmp_path / "run", show=again)
    assert inside == [2]
    assert experiment.train(config("train.steps=5"), store, tmp_path / "run")
