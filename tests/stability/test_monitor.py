"""The monitor in real loops of small models, against what the loop itself can compute."""

import contextlib
import copy
import gc
import json
import math
import pickle
import re
import sys
import types
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import scalelong
from scalelong import StabilityMonitor
from scalelong.stability.alarm import Alarm
from scalelong.stability.levels import NoiseLevels
from scalelong.stability.monitor import AlarmError, StabilityWarning
from scalelong.training.guard import NonFiniteError
from tests.contracts.zoo import CASES

BAD = float("nan")


class Loop:
    """A plain PyTorch loop on one of the zoo's models."""

    def __init__(self, case="uvit", scaling=None):
        self.case = CASES[case]
        self.model = self.case.model().train()
        if scaling:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                scalelong.apply(self.model, scaling)
        self.called = self.model
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def loss(self):
        return self.case.call(self.called).square().mean()

    def run(self, monitor, steps, before=lambda step: None):
        for step in range(1, steps + 1):
            before(step)
            self.optimiser.zero_grad()
            loss = self.loss()
            loss.backward()
            monitor.step(loss)
            self.optimiser.step()


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def spoil(model, name):
    def at(step):
        if step == 3:
            with torch.no_grad():
                model.get_submodule(name).weight.view(-1)[3] = BAD

    return at


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("uvit", "in_blocks.1.mlp.fc1"),
        ("uvit", "out_blocks.0.attn.proj"),
        ("unet2d", "up_blocks.0.resnets.1.conv2"),
        ("hunyuan", "blocks.5.attn2.to_v"),
    ],
)
def test_a_planted_nan_is_named_and_raised_before_the_update(case, name, tmp_path):
    loop = Loop(case)
    monitor = StabilityMonitor(loop.model, tmp_path, logger="none", report=case == "unet2d")
    other = next(n for n, p in loop.model.named_parameters() if not n.startswith(name))
    before = {}

    def at(step):
        spoil(loop.model, name)(step)
        before[step] = loop.model.get_parameter(other).detach().clone()

    with (
        pytest.raises(NonFiniteError, match=f"step 3: the loss .* non-finite output is {name}, whose own weight"),
        monitor,
    ):
        loop.run(monitor, 5, at)
    assert torch.equal(loop.model.get_parameter(other), before[3])
    (bad,) = [row["nonfinite"] for row in rows_of(tmp_path) if "nonfinite" in row]
    assert bad["culprit"].startswith("the first module")
    if case == "unet2d":
        assert name in (tmp_path / "report.html").read_text()


class Spoil(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * BAD


def test_a_nan_of_the_backward_pass_is_named_and_nothing_is_touched(tmp_path):
    loop = Loop()
    fc2 = loop.model.out_blocks[1].mlp.fc2
    plain = fc2.forward
    fc2.forward = lambda x: Spoil.apply(plain(x))
    seen = {}

    def look(error):
        seen.update(error=error, gradients=[p.grad.clone() for p in loop.model.parameters()])

    monitor = StabilityMonitor(loop.model, tmp_path, logger="none", report=False, on_nonfinite=look)
    loop.optimiser.zero_grad()
    loss = loop.loss()
    loss.backward()
    gradients = [p.grad for p in loop.model.parameters()]
    copies = [g.clone() for g in gradients]
    random = torch.get_rng_state()
    monitor.step(loss)
    assert seen["error"].culprit == "the first module with a non-finite gradient is out_blocks.1.mlp.fc2"
    for p, g, copied in zip(loop.model.parameters(), gradients, copies, strict=True):
        assert p.grad is g
        assert torch.equal(g, copied) or (g.isnan() == copied.isnan()).all()
    assert torch.equal(torch.get_rng_state(), random)
    monitor.close()


def test_an_input_and_a_target_that_are_not_finite_are_told_apart(tmp_path):
    loop = Loop()
    for factor, words in (((BAD, 1.0), "the input of the model"), ((1.0, BAD), "gives a non-finite gradient")):
        with StabilityMonitor(
            loop.model, tmp_path / words[:9], logger="none", report=False, on_nonfinite="warn"
        ) as monitor:
            output = loop.model(**loop.case.inputs | {"sample": loop.case.inputs["sample"] * factor[0]}).sample
            loss = (output * factor[1]).square().mean()
            loss.backward()
            with pytest.warns(StabilityWarning, match=words):
                monitor.step(loss)


def test_a_nan_of_the_first_piece_of_an_accumulated_batch(tmp_path):
    loop = Loop()
    inputs = loop.case.inputs
    with StabilityMonitor(loop.model, tmp_path, logger="none", report=False) as monitor:
        for factor in (BAD, 1.0):
            loss = loop.model(**inputs | {"sample": inputs["sample"] * factor}).sample.square().mean()
            loss.backward()
        with pytest.raises(NonFiniteError, match="the gradient is not finite; in call 1 of the 2 .* the input of"):
            monitor.step(loss)


def test_a_very_large_gradient_is_written_and_does_not_end_the_loop(tmp_path):
    loop = Loop()
    with StabilityMonitor(loop.model, tmp_path, interval=2, logger="none", report=False) as monitor:
        for _ in range(2):
            loss = loop.loss()
            loss.backward()
            loop.model.in_blocks[0].mlp.fc1.weight.grad[0, 0] = 1e25
            monitor.step(loss)
    (row,) = rows_of(tmp_path)
    assert row["gradient norm"] == pytest.approx(1e25)
    assert all(map(math.isfinite, row["signals"].values()))


def test_going_on_is_the_users_word_and_each_trouble_is_told_once(tmp_path):
    errors = []
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    with pytest.warns(UserWarning, match="goes on without the signals of skips"):
        monitor = StabilityMonitor(model, tmp_path, logger="none", report=False, on_nonfinite=errors.append)
    for step in range(1, 9):
        loss = model(torch.full((2, 3), BAD if step in (2, 3, 6) else 1.0)).mean()
        model.zero_grad()
        loss.backward()
        monitor.step(loss)
    monitor.close()
    assert [e.step for e in errors] == [2, 6]


def test_a_loop_that_catches_the_error_goes_on_as_if_it_had_been_told_to(tmp_path):
    loop = Loop()
    with StabilityMonitor(loop.model, tmp_path, interval=2, logger="none", report=False) as monitor:
        for factor in (1.0, BAD, 1.0, 1.0):
            loop.model.zero_grad()
            loss = loop.loss() * factor
            loss.backward()
            with contextlib.suppress(NonFiniteError):
                monitor.step(loss)
            assert not monitor._call.fresh
    bad, row = rows_of(tmp_path)
    assert (bad["step"], row["step"]) == (2, 4)
    once = loop.model.out_blocks[2].register_forward_pre_hook(lambda m, args: norms.append(args[0].norm().item()))
    norms = []
    loop.loss()
    once.remove()
    assert row["signals"]["main norm/0"] == pytest.approx(norms[0])


def test_the_log_agrees_with_the_loops_own_numbers(tmp_path):
    loop = Loop(scaling="ls-per-skip")
    own = {}

    def see(module, args):
        own["main"], own["skip"] = (a.detach().norm().item() for a in args)

    loop.model.out_blocks[2].register_forward_pre_hook(see)
    losses = []
    probe = loop.model.in_blocks[1].mlp.fc1.weight
    with StabilityMonitor(loop.model, tmp_path, interval=4, logger="none", report=False) as monitor:
        for step in range(1, 9):
            loop.optimiser.zero_grad()
            loss = loop.loss()
            loss.backward()
            losses.append(loss.item())
            if step == 8:
                norm = math.hypot(*(p.grad.norm().item() for p in loop.model.parameters() if p.grad is not None))
                weights = math.hypot(*(p.norm().item() for p in loop.model.parameters()))
            if step == 7:
                before = probe.detach().clone()
            monitor.step(loss)
            loop.optimiser.step()
            if step == 7:
                update = ((probe - before).norm() / before.norm()).item()
    first, row = rows_of(tmp_path)
    assert (first["step"], row["step"]) == (4, 8)
    assert row["loss"] == pytest.approx(sum(losses[4:]) / 4)
    assert row["gradient norm"] == pytest.approx(norm, rel=1e-5)
    assert row["weight norm"] == pytest.approx(weights, rel=1e-5)
    signals = row["signals"]
    assert signals["main norm/0"] == pytest.approx(own["main"], rel=1e-5)
    coefficient = signals["coefficient/0"]
    assert signals["skip norm/0"] == pytest.approx(coefficient * own["skip"], rel=0.1)
    assert signals["gate/skip 0"] == pytest.approx(coefficient / (1 - coefficient), rel=1e-4)
    assert signals["update/in_blocks.1"] == pytest.approx(
        update, rel=0.3
    )  # of a sample of the block's largest weight
    assert {f"merge gradient/{i}" for i in range(3)} <= set(signals)
    assert not [m for m in loop.model.modules() if m._forward_hooks]


def test_loss_by_noise_level(tmp_path):
    model = nn.Linear(2, 1)
    with pytest.warns(UserWarning, match="no long skips"):
        monitor = StabilityMonitor(
            model, tmp_path, interval=2, logger="none", report=False, timestep_range=(0, 1000)
        )
    for timesteps, losses in (([0, 50, 999], [1.0, 3.0, 5.0]), ([99, 500, -1], [5.0, 7.0, 3.0])):
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        monitor.step(loss, timesteps=torch.tensor(timesteps), losses=torch.tensor(losses)[:, None].expand(3, 4))
    monitor.close()
    assert rows_of(tmp_path)[0]["loss by noise"] == {"0 to 100": 3.0, "500 to 600": 7.0, "900 to 1000": 5.0}


def test_training_is_bitwise_the_same_with_a_monitor(tmp_path):
    plain, watched = Loop(scaling="ls"), Loop(scaling="ls")
    watched.model.load_state_dict(plain.model.state_dict())
    plain.run(type("None", (), {"step": lambda self, loss: None})(), 6)
    with StabilityMonitor(watched.model, tmp_path, interval=2, logger="none", report=False) as monitor:
        watched.run(monitor, 6)
    for a, b in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_sampling_and_copies_in_between_are_not_seen(tmp_path):
    loop = Loop()
    with StabilityMonitor(loop.model, tmp_path / "a", interval=2, logger="none", report=False) as monitor:
        copies = [copy.deepcopy(loop.model), pickle.loads(pickle.dumps(loop.model))]
        loop.run(monitor, 1)  # the hooks at the skips are there for the next step
        copies += [copy.deepcopy(loop.model), pickle.loads(pickle.dumps(loop.model))]
        for model in copies[2:]:
            model(**loop.case.inputs).sample.sum().backward()
        loop.run(monitor, 3)
        for model in copies:
            model(**loop.case.inputs).sample.sum().backward()
        with torch.no_grad():
            loop.model(**{k: v * 100 if k == "sample" else v for k, v in loop.case.inputs.items()})
        assert not monitor.pulse._norms
    other = Loop()
    with StabilityMonitor(other.model, tmp_path / "b", interval=2, logger="none", report=False) as monitor:
        other.run(monitor, 4)
    pairs = zip(rows_of(tmp_path / "a"), rows_of(tmp_path / "b"), strict=True)
    assert all(a["signals"] == b["signals"] for a, b in pairs)


def test_the_signals_of_a_step_are_without_validation_and_what_was_repeated(tmp_path):
    loop = Loop(scaling="ls")
    rows = []
    for extra in (False, True):
        folder = tmp_path / str(extra)
        with StabilityMonitor(
            loop.model, folder, interval=1, logger="none", report=False, on_nonfinite="warn"
        ) as monitor:
            loop.optimiser.zero_grad()
            loss = loop.loss()
            loss.backward()
            if extra:
                loop.model.eval()
                loop.model(**{k: v * 100 if k == "sample" else v for k, v in loop.case.inputs.items()})
                loop.model.train()
                with pytest.warns(StabilityWarning, match="the target or the loss itself"):
                    monitor.step(loss * BAD)
            else:
                monitor.step(loss)
        rows.append(rows_of(folder)[-1]["signals"])
    assert rows[0] == rows[1]


def test_checkpointed_activations_are_counted_once(tmp_path):
    rows = []
    for checkpointing in (False, True):
        loop = Loop()
        if checkpointing:
            loop.model.enable_gradient_checkpointing()
        with StabilityMonitor(
            loop.model, tmp_path / str(checkpointing), interval=2, logger="none", report=False
        ) as monitor:
            loop.run(monitor, 2)
        rows.append(rows_of(tmp_path / str(checkpointing))[0]["signals"])
    assert rows[1] == pytest.approx(rows[0], rel=1e-4)


@pytest.mark.slow
def test_a_compiled_model_stays_one_graph_and_shows_its_skips_at_the_interval(tmp_path):
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    loop = Loop(scaling="ls")
    loop.called = torch.compile(loop.model, backend="eager")
    with (
        pytest.raises(NonFiniteError, match="is out_blocks.1.mlp.fc1"),
        StabilityMonitor(loop.called, tmp_path, interval=2, logger="none", report=False) as monitor,
    ):
        loop.run(monitor, 4, spoil(loop.model, "out_blocks.1.mlp.fc1"))
    assert counters["stats"]["unique_graphs"] == 1
    assert {"skip norm/2", "coefficient/2", "output/mid_block"} <= set(rows_of(tmp_path)[0]["signals"])


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def fresh_compiler():
    """What was compiled so often that torch gives up runs as it is, and calls hooks."""
    torch._dynamo.reset()


@pytest.mark.usefixtures("process_group", "fresh_compiler")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_wrapped_by_ddp(compiled, tmp_path):
    loop = Loop()
    inner = torch.compile(loop.model, backend="eager") if compiled else loop.model
    loop.called = nn.parallel.DistributedDataParallel(inner)
    with (
        pytest.raises(NonFiniteError, match="is mid_block.attn.proj"),
        StabilityMonitor(loop.called, tmp_path / "run", interval=2, logger="none", report=False) as monitor,
    ):
        loop.run(monitor, 4, spoil(loop.model, "mid_block.attn.proj"))
    assert "skip norm/0" in rows_of(tmp_path / "run")[0]["signals"]


def test_another_process_does_not_mind_the_log_that_the_first_has_begun(tmp_path, monkeypatch):
    for rank, answer in ((0, pytest.raises(ValueError, match="log of another")), (1, contextlib.nullcontext())):
        (tmp_path / "metrics.jsonl").touch()
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        with answer, StabilityMonitor(CASES["uvit"].model(), tmp_path):
            pass
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.usefixtures("fresh_compiler")
def test_a_forward_that_is_compiled_after_the_monitor_was_made(tmp_path):
    loop = Loop()
    with StabilityMonitor(loop.model, tmp_path, interval=2, logger="none", report=False) as monitor:
        loop.model.forward = torch.compile(loop.model.forward, backend="eager")
        loop.run(monitor, 2)
    assert "skip norm/0" in rows_of(tmp_path)[0]["signals"]


def call_the_compiled_model(loop):
    loop.called = torch.compile(loop.model, backend="eager")


def compile_the_loss(loop):
    loop.loss = torch.compile(loop.loss, backend="eager")


def compile_in_the_class(loop):
    forward = torch.compile(type(loop.model).forward, backend="eager")
    loop.model.__class__ = type("Compiled", (type(loop.model),), {"forward": forward})


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (call_the_compiled_model, "give the monitor what the loop calls"),
        (compile_the_loss, "give the monitor what the loop calls"),
        (compile_in_the_class, "A part of the model was compiled"),
    ],
)
def test_skips_that_a_graph_hides_are_left_out_with_one_sentence(change, words, tmp_path):
    loop = Loop()
    change(loop)
    with (
        pytest.warns(StabilityWarning, match=f"step 2: no skip was seen.*{words}") as told,
        StabilityMonitor(loop.model, tmp_path, interval=2, logger="none", report=False) as monitor,
    ):
        loop.run(monitor, 4)
    assert len([w for w in told if w.category is StabilityWarning]) == 1
    assert [("skip norm/0" in row["signals"], "gradient norm" in row) for row in rows_of(tmp_path)] == [
        (False, True)
    ] * 2


def test_two_steps_of_the_monitor_for_one_call_of_the_model(tmp_path):
    loop = Loop()
    with StabilityMonitor(loop.model, tmp_path, interval=1, logger="none", report=False) as monitor:
        loss = loop.loss()
        loss.backward()
        monitor.step(loss)
        with pytest.warns(StabilityWarning, match="call monitor.step once per update"):
            monitor.step(loss)
    assert ["skip norm/0" in row["signals"] for row in rows_of(tmp_path)] == [True, False]


@pytest.fixture
def late(monkeypatch):
    """As on a GPU, where values arrive two steps later, and outputs are seen in each of the first steps."""
    from scalelong.stability.inbox import Inbox

    def arrived(self, *, wait=False):
        while len(self._under_way) > (0 if wait else 2):
            step, host, note, _ = self._under_way.popleft()
            yield step, host.numpy(), note

    monkeypatch.setattr(Inbox, "arrived", arrived)
    monkeypatch.setattr(StabilityMonitor, "_finds_late", True)


@pytest.mark.usefixtures("late")
def test_what_arrives_late_names_the_block(tmp_path):
    loop = Loop()
    with (
        pytest.raises(
            NonFiniteError, match="step 3: .* block with a non-finite output is in_blocks.2; it was found"
        ),
        StabilityMonitor(loop.model, tmp_path, logger="none", report=False) as monitor,
    ):
        loop.run(monitor, 9, spoil(loop.model, "in_blocks.2.mlp.fc1"))


def test_what_arrives_late_of_a_step_whose_outputs_were_not_looked_at_says_so(tmp_path):
    loop = Loop()
    with StabilityMonitor(loop.model, tmp_path, logger="none", report=False) as monitor:
        values = np.full(len(monitor.pulse.names), -1.0, dtype=np.float32)
        values[0], values[monitor.pulse.telling] = np.nan, 1.0  # the first output is seen in every step
        assert "were not looked at in this step; it was found 2 steps later" in monitor._late_culprit(-2, values)


def lossy(loop, monitor, steps, bad=()):
    """Steps of which some have a NaN for a loss, and no update."""
    for step in steps:
        loop.optimiser.zero_grad()
        loss = loop.loss() * (float("nan") if step in bad else 1)
        loss.backward()
        monitor.step(loss)
        if step not in bad:
            loop.optimiser.step()


@pytest.mark.usefixtures("late")
def test_a_checkpoint_tells_what_is_under_way(tmp_path):
    loop = Loop()
    monitor = StabilityMonitor(loop.model, tmp_path, logger="none", report=False)
    lossy(loop, monitor, range(1, 5), bad=[4])
    with pytest.raises(NonFiniteError, match="step 4: the loss is not finite"):
        monitor.state_dict()
    assert monitor.state_dict()["steps"] == 4
    assert monitor.detector.seen == 3
    monitor.close()


@pytest.mark.usefixtures("late")
def test_after_an_error_the_state_can_still_be_had(tmp_path):
    loop = Loop()
    monitored = StabilityMonitor(loop.model, tmp_path, logger="none", report=False)
    with contextlib.suppress(KeyError), monitored as monitor:
        lossy(loop, monitor, range(1, 5), bad=[4])
        raise KeyError("the loop's own")
    assert monitor.state_dict()["steps"] == 4


@pytest.mark.usefixtures("late")
def test_after_a_checkpoint_is_loaded_nothing_is_told_of_the_steps_undone(tmp_path):
    loop, told = Loop(), []
    with StabilityMonitor(loop.model, tmp_path, logger="none", report=False, on_nonfinite=told.append) as monitor:
        lossy(loop, monitor, range(1, 11))
        state = monitor.state_dict()
        lossy(loop, monitor, range(11, 13), bad=[12])
        monitor.load_state_dict(state)
        lossy(loop, monitor, range(11, 16))
    assert not told
    assert monitor.detector.seen == 15


@pytest.mark.usefixtures("late")
def test_a_nan_that_is_read_at_the_end_is_not_looked_for_with_the_weights_after_it(tmp_path):
    loop = Loop()
    with (
        pytest.raises(NonFiniteError, match="step 3: .*no block's output was seen .*found after its update"),
        StabilityMonitor(loop.model, tmp_path, logger="none", report=False) as monitor,
    ):
        lossy(loop, monitor, range(1, 4), bad=[3])


def test_where_a_nan_is_found_late_outputs_are_seen_when_trouble_is_likely(tmp_path, monkeypatch):
    monkeypatch.setattr(StabilityMonitor, "_finds_late", True)
    loop = Loop()
    with StabilityMonitor(loop.model, tmp_path, interval=1000, logger="none", report=False) as monitor:
        shown = set()

        def run(steps):
            for _ in range(steps):
                if monitor.pulse.showing:
                    shown.add(monitor.steps + 1)
                loop.run(monitor, 1)

        monitor.pulse.arm(1, everything=False, outputs=True)
        assert not monitor.pulse.updating  # an update of one step is no measure of those of two
        run(60)
        assert shown == {*range(1, 51), 52, 56, 60}
        monitor.alarms.append(Alarm(step=60, signal="loss", layer="", factor=2.0, score=8.0))
        run(3)
        assert {62, 63} <= shown  # 61 was about to come


def test_what_arrives_when_its_gradients_are_gone_is_not_looked_at_again(tmp_path, monkeypatch):
    from scalelong.stability.inbox import Inbox

    arrived = Inbox.arrived
    monkeypatch.setattr(Inbox, "arrived", lambda self, *, wait=False: arrived(self) if wait else iter(()))
    loop = Loop()
    monitor = StabilityMonitor(loop.model, tmp_path, logger="none", report=False)
    monitor.pulse.arm(1, everything=True)
    loss = loop.loss()
    loss.backward()
    loop.model.pos_embed.grad[0] = float("inf")
    monitor.step(loss)
    loop.model.zero_grad(set_to_none=False)
    with pytest.raises(NonFiniteError, match="step 1: the gradient is not finite"):
        monitor.close()


def test_an_overflow_that_the_scaler_skips_is_no_error(tmp_path):
    loop = Loop()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    with StabilityMonitor(loop.model, tmp_path, interval=2, logger="none", scaler=scaler) as monitor:
        for _ in range(2):
            loop.optimiser.zero_grad()
            loss = loop.loss()
            scaler.scale(loss * 1e10).backward()
            scaler.unscale_(loop.optimiser)
            monitor.step(loss)
            scaler.step(loop.optimiser)
            scaler.update()
    assert rows_of(tmp_path)[0]["skipped steps"] == 2


def small_loop(monitor_of, fault, steps=260):
    """A regression by three layers; `fault(model)` from step 200 on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="no long skips")
        monitor = monitor_of(model)
    with monitor:
        for step in range(steps):
            if step >= 200:
                fault(model)
            x = torch.randn(64, 8)
            loss = F.mse_loss(model(x), x[:, :1])
            optimiser.zero_grad()
            loss.backward()
            monitor.step(loss)
            optimiser.step()
    return monitor


def grow(model):
    with torch.no_grad():
        model[2].weight.mul_(1.1)


def test_the_alarm_names_the_layer_and_does_what_it_is_told(tmp_path):
    heard = []
    monitor = small_loop(
        lambda m: StabilityMonitor(m, tmp_path / "a", on_alarm=heard.append, logger="none", report=False), grow
    )
    assert heard == monitor.alarms
    assert heard[0].layer == "2"
    assert 200 < heard[0].step < 220
    assert next(row["alarm"]["layer"] for row in rows_of(tmp_path / "a") if "alarm" in row) == "2"
    with pytest.raises(AlarmError, match="output of 2|update of 2") as raised:
        small_loop(
            lambda m: StabilityMonitor(m, tmp_path / "b", on_alarm="raise", logger="none", report=False), grow
        )
    assert raised.value.alarm == heard[0]


def test_a_loop_that_resumes_goes_on_with_log_and_alarm(tmp_path):
    loop = Loop()
    with StabilityMonitor(loop.model, tmp_path, interval=2, logger="none", report=False) as monitor:
        loop.run(monitor, 4)
        state = json.loads(json.dumps(monitor.state_dict()))
    with pytest.raises(ValueError, match="holds the log of another training"):
        StabilityMonitor(loop.model, tmp_path)
    with StabilityMonitor(loop.model, tmp_path, interval=2, logger="none", report=False, first_step=2) as monitor:
        monitor.load_state_dict(state | {"steps": 2})
        loop.run(monitor, 2)
    assert [row["step"] for row in rows_of(tmp_path)] == [2, 4]
    assert monitor.detector.seen == 6
    with pytest.raises(ValueError, match="this monitor is closed"):
        monitor.step(1.0)


def test_parameters_that_are_unfrozen_later_are_watched_from_then_on(tmp_path):
    loop = Loop()
    loop.model.requires_grad_(False)
    loop.model.out_blocks.requires_grad_(True)
    with StabilityMonitor(loop.model, tmp_path, interval=2, logger="none", report=False) as monitor:
        loop.run(monitor, 3)
        loop.model.requires_grad_(True)
        with pytest.raises(NonFiniteError, match="step 4: .* gradient is that of in_blocks.0.norm1.bias"):
            loop.run(monitor, 1, lambda _: loop.model.in_blocks[0].norm1.bias.register_hook(lambda g: g * BAD))
        loop.model.in_blocks[0].norm1.bias._backward_hooks.clear()
        loop.run(monitor, 2)
        assert monitor.detector.seen == 5
        state = monitor.state_dict()
    rows = [row["signals"] for row in rows_of(tmp_path) if "signals" in row]
    assert ["gradient/in_blocks.0" in signals for signals in rows] == [False, True]
    loop.model.requires_grad_(False)
    loop.model.out_blocks.requires_grad_(True)
    with StabilityMonitor(loop.model, tmp_path / "again", logger="none", report=False) as monitor:
        loop.model.requires_grad_(True)
        monitor.load_state_dict(state)
        assert monitor.detector.seen == 5


def test_tensorboard_gets_the_same_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loop = Loop()
    with StabilityMonitor(loop.model, tmp_path, interval=1) as monitor:
        loop.run(monitor, 1)
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (row,) = rows_of(tmp_path)
    assert board.Scalars("signals/skip norm/0")[0].value == pytest.approx(row["signals"]["skip norm/0"])
    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page
    assert "http" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "https://matplotlib.org", ""
    ).replace("http://creativecommons.org", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"interval": 0}, "interval is a number of steps"),
        ({"first_step": -1}, "first_step is"),
        ({"on_alarm": "shout"}, "on_alarm is 'warn', 'raise' or a function"),
        ({"on_nonfinite": None}, "on_nonfinite is"),
        ({"logger": "paper"}, "the logger is one of"),
        ({"timestep_range": (5, 5)}, "timestep_range is"),
    ],
)
def test_bad_settings_are_refused_and_leave_nothing(arguments, words, tmp_path):
    model = CASES["uvit"].model()
    with pytest.raises(ValueError, match=words):
        StabilityMonitor(model, tmp_path / "run", **arguments)
    assert not (tmp_path / "run").exists()
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.usefixtures("fresh_compiler")
def test_a_monitor_that_nobody_closes_lets_compiled_code_run_again(tmp_path):
    model = torch.compile(Loop().model, backend="eager")
    monitor = StabilityMonitor(model, tmp_path, interval=1, logger="none", report=False)
    compiled = torch.compile(lambda x: x + torch.compiler.is_compiling(), backend="eager")
    assert compiled(0) == 0
    del monitor
    gc.collect()
    assert compiled(0) == 1


def test_a_log_that_cannot_be_opened_leaves_no_hooks(tmp_path):
    (tmp_path / "run").touch()
    model = CASES["uvit"].model()
    with pytest.raises(FileExistsError):
        StabilityMonitor(model, tmp_path / "run")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_other_wrong_calls_get_a_sentence(tmp_path):
    with pytest.raises(ValueError, match="takes the model that the loop calls, got str"):
        StabilityMonitor("unet", tmp_path)
    model = CASES["uvit"].model()
    with pytest.raises(ValueError, match="no parameter to train"):
        StabilityMonitor(copy.deepcopy(model).requires_grad_(False), tmp_path)
    with StabilityMonitor(model, tmp_path, logger="none") as monitor:
        with pytest.raises(ValueError, match="needs both"):
            monitor.step(1.0, timesteps=torch.zeros(1))
        with pytest.raises(ValueError, match="of the same images, got 3 and 2"):
            monitor.step(1.0, timesteps=torch.zeros(2), losses=torch.zeros(3))
        with pytest.raises(ValueError, match="of the same images, got a single number and 2"):
            monitor.step(1.0, timesteps=torch.zeros(2), losses=torch.tensor(1.0))
        with pytest.raises(ValueError, match=r"one number, got a tensor of shape \(4, 2\); give its mean"):
            monitor.step(torch.zeros(4, 2))
        assert monitor.steps == 0


@pytest.fixture
def lightning(monkeypatch):
    package = types.ModuleType("lightning.pytorch")
    package.Callback = type("Callback", (), {})
    monkeypatch.setitem(sys.modules, "lightning", types.ModuleType("lightning"))
    monkeypatch.setitem(sys.modules, "lightning.pytorch", package)
    return package


def test_in_lightnings_order_of_hooks(tmp_path, lightning):
    loop = Loop()
    monitor = StabilityMonitor(loop.model, tmp_path, interval=2, logger="none", report=False)
    callback = monitor.lightning_callback()
    assert isinstance(callback, lightning.Callback)
    trainer = types.SimpleNamespace(accumulate_grad_batches=2)
    losses = []
    for _ in range(2):
        loop.optimiser.zero_grad()
        for _ in range(2):
            loss = loop.loss() / 2
            callback.on_before_backward(trainer, None, loss)
            loss.backward()
        callback.on_before_optimizer_step(trainer, None, loop.optimiser)
        loop.optimiser.step()
        losses.append(loss.item() * 2)
    assert callback.state_dict()["steps"] == 2
    callback.on_train_end(trainer, None)
    assert rows_of(tmp_path)[0]["loss"] == pytest.approx(sum(losses) / 2)


def test_lightnings_scaler_is_taken_and_the_loss_is_told_unscaled(tmp_path, lightning):
    loop = Loop()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    trainer = types.SimpleNamespace(
        accumulate_grad_batches=1, precision_plugin=types.SimpleNamespace(scaler=scaler)
    )
    monitor = StabilityMonitor(loop.model, tmp_path, interval=2, logger="none", report=False)
    callback = monitor.lightning_callback()
    losses = []
    for overflow in (float("inf"), 1.0):
        loop.optimiser.zero_grad()
        loss = loop.loss()
        losses.append(loss.item())
        scaled = scaler.scale(loss)
        callback.on_before_backward(trainer, None, scaled)
        scaled.backward()
        loop.model.in_blocks[0].mlp.fc1.weight.grad[0, 0] *= overflow
        scaler.unscale_(loop.optimiser)
        callback.on_before_optimizer_step(trainer, None, loop.optimiser)
        scaler.step(loop.optimiser)
        scaler.update()
    callback.on_train_end(trainer, None)
    (row,) = rows_of(tmp_path)
    assert row["skipped steps"] == 1
    assert row["loss"] == pytest.approx(losses[1])


@pytest.mark.slow
@pytest.mark.parametrize("overflows", [False, True])
def test_in_a_real_lightning_trainer(overflows, tmp_path):
    pl = pytest.importorskip("lightning.pytorch")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)  # beyond what half precision holds
    plugins = [pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)] if overflows else []
    case = CASES["uvit"]

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = case.model()

        def training_step(self, batch, index):
            return case.call(self.net).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    module = Module()
    monitor = StabilityMonitor(module.net, tmp_path, interval=2, logger="none", report=False)
    trainer = pl.Trainer(
        max_steps=4, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        callbacks=[monitor.lightning_callback()], plugins=plugins,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(range(8)))
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [2, 4]
    assert [row.get("skipped steps") for row in rows] == ([2, 4] if overflows else [None, None])


def test_the_page_says_when_the_alarm_was_still_learning(tmp_path):
    loop = Loop()
    with StabilityMonitor(loop.model, tmp_path / "short", interval=2, logger="none") as monitor:
        loop.run(monitor, 4)
    page = (tmp_path / "short" / "report.html").read_text()
    assert "None could ring: the alarm learns what is usual in its first 150 steps, and saw 4." in page
    with StabilityMonitor(loop.model, tmp_path / "long", interval=2, logger="none") as monitor:
        loop.run(monitor, 2)
        monitor.detector.seen = 151
    assert "could ring" not in (tmp_path / "long" / "report.html").read_text()


def test_the_page_names_the_model_and_its_scaling(tmp_path):
    for number, scaling in enumerate((None, "cs:0.7")):
        loop = Loop("unet2d")
        if scaling:
            scalelong.apply(loop.model, scaling, placement="norm")
        with StabilityMonitor(loop.model, tmp_path / str(number), logger="none") as monitor:
            loop.run(monitor, 1)
        page = (tmp_path / str(number) / "report.html").read_text()
        assert re.search(r"UNet2DModel, [\d,]+ parameters in training", page)
        assert ("skips scaled by cs:0.7 at norm." in page) == bool(scaling)


def test_of_an_input_that_is_not_finite_no_other_learning_rate_is_advised(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    told = []
    with StabilityMonitor(model, tmp_path, logger="none", report=False, on_nonfinite=told.append) as monitor:
        for x in (torch.full((1, 2), BAD), torch.ones(1, 2)):
            loss = model(x).mean() * (1 if x.isnan().any() else BAD)
            loss.backward()
            monitor.step(loss)
            model.zero_grad()
            monitor._in_trouble = False
    assert ["learning rate" in str(error) for error in told] == [False, True]
    assert "what this batch is read from" in str(told[0])


def test_a_time_that_is_no_number_is_no_time_without_noise():
    levels = NoiseLevels(0, 1000)
    levels.add(torch.tensor([BAD, 500.0, 0.0]), torch.tensor([5.0, 1.0, 3.0]))
    assert levels.take() == {"0 to 100": 3.0, "500 to 600": 1.0, "a time that is no number": 5.0}


def test_a_loop_that_goes_on_without_a_loss_shows_that(tmp_path):
    """Lines of the steps before would look as if all were well."""
    loop = Loop()
    monitor = StabilityMonitor(loop.model, tmp_path, interval=5, on_nonfinite=lambda error: None)
    loop.run(monitor, 20, spoil(loop.model, "in_blocks.1.mlp.fc1"))
    monitor.close()
    rows = [row for row in rows_of(tmp_path) if "signals" in row]
    assert [row["steps not finite"] for row in rows] == [3, 5, 5, 5]
    assert isinstance(rows[0]["loss"], float)  # of the two that were
    assert [row["loss"] for row in rows[1:]] == ["NaN"] * 3
    page = (tmp_path / "report.html").read_text()
    assert "Steps that were not finite: 18. Loss not finite" in page


class Aside(nn.Module):
    """A block that no loss sees."""

    def __init__(self):
        super().__init__()
        self.used, self.aside = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        self.aside(x)
        return self.used(x)


def test_an_output_that_the_loss_does_not_see_is_told_once_and_ends_nothing(tmp_path):
    model = Aside()
    with pytest.warns(UserWarning, match="The monitor goes on without the signals of skips"):
        monitor = StabilityMonitor(model, tmp_path, interval=4)
    with torch.no_grad():
        model.aside.weight[0, 0] = BAD

    def train():
        for _ in range(12):
            model.zero_grad()
            loss = model(torch.randn(2, 4)).square().mean()
            loss.backward()
            monitor.step(loss)

    with pytest.warns(StabilityWarning, match="the output of aside is not finite; loss and gradients are") as told:
        train()
    assert len(told) == 1
    monitor.close()
    found = "the output of aside is not finite; loss and gradients are finite"
    assert [row["output"] for row in rows_of(tmp_path) if "output" in row] == [found]
    page = (tmp_path / "report.html").read_text()
    assert found in page
    assert "Steps that were not finite" not in page


@pytest.mark.parametrize("how", ["before backward", "after zero_grad", "times 0", "as it should be"])
def test_a_loop_whose_gradients_are_never_there_is_told_once(tmp_path, how):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        monitor = StabilityMonitor(model, tmp_path, interval=10, report=False)
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)
    with warnings.catch_warnings(record=True) as told, monitor:
        warnings.simplefilter("always")
        for _ in range(50):
            loss = model(torch.randn(2, 4)).square().mean() * (how != "times 0")
            if how == "before backward":
                monitor.step(loss)
            loss.backward()
            if how in ("times 0", "as it should be"):
                monitor.step(loss)
            optimiser.step()
            optimiser.zero_grad()
            if how == "after zero_grad":
                monitor.step(loss)
    found = [str(w.message) for w in told if "was exactly 0 or not there" in str(w.message)]
    assert len(found) == (how != "as it should be")


def test_an_output_whose_norm_float32_cannot_hold_is_not_called_infinite(tmp_path):
    model = Aside()
    with pytest.warns(UserWarning, match="goes on without the signals of skips"):
        monitor = StabilityMonitor(model, tmp_path, interval=4)
    with torch.no_grad():
        model.aside.weight.fill_(1e20)

    def train():
        for _ in range(4):
            model.zero_grad()
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            monitor.step(loss)

    with pytest.warns(StabilityWarning, match="aside is not finite, or is larger than 1e19, where float32 ends"):
        train()
    monitor.close()


def test_every_bad_step_counts_to_the_last_and_over_a_resume(tmp_path):
    """Of a loop that goes on: lines are written at the interval and at the end, and say how many since the last."""

    def train(first, count, bad, **how):
        model = nn.Linear(4, 4)
        monitor = StabilityMonitor(model, tmp_path, interval=10, first_step=first, **how)
        with monitor:
            for step in range(first + 1, first + count + 1):
                loss = model(torch.randn(2, 4)).mean() * (BAD if step in bad else 1)
                model.zero_grad()
                loss.backward()
                monitor.step(loss)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(0, 28, {3, 4, 25, 26, 27, 28}, on_nonfinite="warn")
        assert "Steps that were not finite: 6." in (tmp_path / "report.html").read_text()
        train(28, 4, {30}, on_nonfinite="warn")
    assert "Steps that were not finite: 7." in (tmp_path / "report.html").read_text()
    assert json.loads((tmp_path / "monitor.json").read_text())["alarm_learnt_steps"] == 3
