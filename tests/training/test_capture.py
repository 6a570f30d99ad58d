"""The captured step on a GPU: what it computes is what the eager step computes, and a bad step changes nothing."""

import pytest
import torch

from scalelong import experiment
from scalelong.config import with_overrides
from scalelong.data.loader import Loader
from scalelong.diffusion.process import process_named
from scalelong.presets import run_preset
from scalelong.training.guard import NonFiniteError
from scalelong.training.step import Stepper
from tests.training.test_fit import same, store  # noqa: F401 - a fixture

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="a graph is captured on a GPU")

# 8×8 digits as 64 patches and the time token: our attention kernel runs, too.
SMALL = [
    "model.changes.patch_size=1",
    "model.changes.hidden_size=128",
    "model.changes.num_attention_heads=4",
    "model.changes.num_layers=4",
    "train.batch_size=32",
    "train.warmup_steps=5",
    "train.log_every=5",
    "train.monitor_every=4",
    "train.sample_every=1000",
    "train.checkpoint_every=10",
    "train.ema_rates=0.9,0.99",
    "train.steps=30",
]


def config(*settings):
    return with_overrides(run_preset("digits"), [*SMALL, *settings])


def stepper(store, *settings):  # noqa: F811
    run = experiment.fitted_to(config(*settings), store)
    model = experiment.build_model(run).cuda().train()
    loader = Loader(store, seed=run.train.seed, device="cuda", label_dropout=None)
    return Stepper(model, process_named(run.process), loader, run.train)


def losses_of(step, count):
    found = []
    for i in range(count):
        step.update(i, observed=(i + 1) % 4 == 0)
        found.append(step.loss.item())
    step.check()
    return torch.tensor(found)


@pytest.mark.parametrize("scaling", ["none", "cs:0.7", "ls", "skip-norm"])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 0.02)])
def test_eager_compiled_and_captured_steps_agree(store, scaling, precision, tolerance):  # noqa: F811
    settings = [f"model.scaling={scaling}", f"train.precision={precision}"]
    want = losses_of(
        stepper(store, f"model.scaling={scaling}", "train.precision=fp32", "train.execution=eager"), 20
    )
    for execution in ("eager", "compiled", "captured"):
        torch.compiler.reset()
        step = stepper(store, *settings, f"train.execution={execution}")
        torch.testing.assert_close(losses_of(step, 20), want, rtol=tolerance, atol=0)
        assert len(step.graphs) == (2 if execution == "captured" else 0)


def test_captured_signals_are_those_of_the_eager_step(store):  # noqa: F811
    found = []
    for execution in ("eager", "captured"):
        step = stepper(store, "model.scaling=ls", "train.precision=fp32", f"train.execution={execution}")
        for i in range(4):
            step.update(i, observed=i == 3)
        found.append(step.signals())
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        assert value == pytest.approx(found[1][name], rel=2e-3, abs=1e-6), name


def test_a_bad_step_changes_no_bit_and_is_named(store):  # noqa: F811
    step = stepper(store, "train.execution=captured", "train.precision=bf16")
    for i in range(3):
        step.update(i)
    step.check()
    with torch.no_grad():
        step.model.final_layer.bias.fill_(3e38)  # finite, and too much for the square
    state = lambda: [  # noqa: E731
        *step.model.parameters(),
        *(w for ema in step.emas for w in ema.weights.values()),
        *(t for s in step.optimiser.state.values() for t in s.values()),
    ]
    before = [t.detach().clone() for t in state()]
    for i in range(3, 7):  # the host looks only after some steps more
        step.update(i)
    with pytest.raises(NonFiniteError, match="step 3: the loss is not finite") as error:
        step.check()
    assert error.value.step == 3
    assert all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))


def test_a_resumed_captured_run_goes_on_as_it_would_have(store, tmp_path):  # noqa: F811
    for name, stops in (("straight", [30]), ("halting", [10, 30])):
        for steps in stops:
            experiment.train(config(f"train.steps={steps}"), store, tmp_path / name, device="cuda")
    assert same(tmp_path / "straight", tmp_path / "halting")


def test_a_bad_step_between_two_looks_loses_nothing(store, tmp_path, monkeypatch):  # noqa: F811
    rare = ["train.log_every=1000", "train.monitor_every=1000", "train.checkpoint_every=1000"]
    experiment.train(config("train.steps=12", *rare), store, tmp_path / "good", device="cuda")
    plain, reached = Stepper._loss, []
    # After the division by 0 the gradients are NaN, and what is captured finds that out by itself.
    monkeypatch.setattr(Stepper, "_loss", lambda self, *a: plain(self, *a) / (self.step != 12))
    with pytest.raises(NonFiniteError, match="step 12"):
        experiment.train(
            config("train.steps=90", *rare), store, tmp_path / "bad", device="cuda",
            show=lambda progress: reached.append(progress.step),
        )  # fmt: skip
    assert max(reached) < 30  # sent at 20, arrived by 30
    assert same(tmp_path / "good", tmp_path / "bad")


def test_a_run_after_one_that_diverged(store, tmp_path, monkeypatch):  # noqa: F811
    plain = Stepper._loss
    monkeypatch.setattr(Stepper, "_loss", lambda self, *a: plain(self, *a) / (self.step != 7))
    with pytest.raises(NonFiniteError, match="step 7"):
        experiment.train(config(), store, tmp_path / "diverged", device="cuda")
    monkeypatch.undo()
    held = torch.cuda.memory_allocated()
    assert experiment.train(config("train.steps=12"), store, tmp_path / "next", device="cuda")
    assert torch.cuda.memory_allocated() <= held


@pytest.mark.parametrize("settings", [["train.accumulate=16"], ["train.checkpoint_activations=true"]])
def test_pieces_and_checkpointed_activations_are_captured_too(store, settings):  # noqa: F811
    want = losses_of(stepper(store, "train.precision=fp32", "train.execution=eager"), 12)
    step = stepper(store, "train.precision=fp32", "train.execution=captured", *settings)
    torch.testing.assert_close(losses_of(step, 12), want, rtol=1e-4, atol=0)


def test_samples_between_captured_steps_change_nothing(store):  # noqa: F811
    from scalelong.diffusion.fast import FastNetwork

    found = []
    for looks in (False, True):
        step = stepper(store, "train.precision=bf16", "train.execution=captured")
        first = losses_of(step, 6)
        if looks:
            step.model.eval()
            FastNetwork(step.model)(torch.randn(50, 1, 8, 8, device="cuda"), torch.tensor(500.0, device="cuda"))
            step.model.train()
        found.append(torch.cat([first, losses_of(step, 6)]))
    assert torch.equal(*found)


def unet_stepper(store, *settings):  # noqa: F811
    """Of a small UNet with dropout."""
    sizes = ['model.changes={"block_out_channels": [32, 32, 32, 32], "layers_per_block": 1}']
    sizes += ["model.changes.attention_head_dim=32", "train.batch_size=8", "train.precision=fp32"]
    asked = with_overrides(run_preset("cifar10-unet"), [*sizes, "train.execution=captured", *settings])
    run = experiment.fitted_to(asked, store)
    model = experiment.build_model(run).cuda().train()
    return Stepper(model, process_named(run.process), Loader(store, seed=0, device="cuda"), run.train)


def test_dropout_that_is_drawn_again_is_not_captured(store):  # noqa: F811
    step = unet_stepper(store, "train.checkpoint_activations=true")
    assert step.config.execution == "compiled"
    assert losses_of(step, 5).isfinite().all()
    assert not step.graphs


def test_dropout_in_a_graph_is_drawn_by_the_step(store):  # noqa: F811
    losses = []
    for first in (0, 3):  # the second run captures at the very step that is compared
        step = unet_stepper(store)
        step.bad_step.fill_(0)  # frozen: the weights stay those of the start
        for i in range(first, 4):
            step.update(i)
        losses.append(step.loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
