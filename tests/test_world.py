"""Several processes on the CPU (gloo, under torchrun) do what one does."""

import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from scalelong import experiment
from scalelong.cli.main import app
from scalelong.config import with_overrides
from scalelong.data.prepare import prepare
from scalelong.data.sources import digits
from scalelong.data.store import open_store
from scalelong.presets import run_preset
from scalelong.training.log import read_metrics
from scalelong.world import World
from tests.training.test_fit import tensors_of

SETTINGS = [
    "model.changes.hidden_size=32",
    "model.changes.num_layers=4",
    "model.scaling=ls",
    "data.condition=class",
    "train.batch_size=12",
    "train.accumulate=2",
    "train.warmup_steps=2",
    "train.log_every=1",
    "train.monitor_every=2",
    "train.sample_every=4",
    "train.checkpoint_every=2",
    "train.ema_rates=0.9",
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "digits"
    prepare(digits(), folder)
    return folder


LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node"],
    "accelerate": ["accelerate.commands.launch", "--multi_gpu", "--num_processes"],  # gloo where there is no GPU
}


def launch(processes, *command, check=True, launcher="torchrun"):
    run = [sys.executable, "-m", *LAUNCHERS[launcher], str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*run, "-m", "scalelong", *command], capture_output=True, text=True, check=check, env=environment
    )


def train(processes, data, out, steps, launcher="torchrun"):
    if processes == 1:
        config = with_overrides(run_preset("digits"), [*SETTINGS, f"train.steps={steps}"])
        experiment.train(config, open_store(data), out, device="cpu", logger="none")
        return None
    changes = [part for setting in [*SETTINGS, f"train.steps={steps}"] for part in ("--set", setting)]
    command = ["train", "digits", "--data", str(data), "--out", str(out), "--device", "cpu", *changes]
    return launch(processes, *command, "--logger", "none", "--json", launcher=launcher)


def series(run, *path):
    found = []
    for row in read_metrics(run):
        for key in path:
            row = row.get(key, {}) if isinstance(row, dict) else {}
        found += [row] if isinstance(row, float) else []
    return found


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("accelerate", marks=pytest.mark.slow)])
def test_two_processes_train_as_one(data, tmp_path, launcher):
    done = train(2, data, tmp_path / "two", 4, launcher)
    assert json.loads(done.stdout)["done"]  # one of them speaks
    train(1, data, tmp_path / "one", 4)
    for path in (("loss",), ("gradient norm",), ("signals", "skip norm/0"), ("signals", "coefficient/1")):
        two, one = (series(tmp_path / name, *path) for name in ("two", "one"))
        assert len(one) >= 2
        torch.testing.assert_close(torch.tensor(two), torch.tensor(one), rtol=1e-5, atol=1e-6)
    (step, two), (_, one) = tensors_of(tmp_path / "two"), tensors_of(tmp_path / "one")
    assert step == 4
    for key in one:
        torch.testing.assert_close(two[key], one[key], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_two_processes_judge_as_one(data, tmp_path):
    train(1, data, tmp_path / "one", 2)
    evaluate = ["evaluate", str(tmp_path / "one"), "--data", str(data), "--features", "pixels", "--device", "cpu"]
    # torchrun takes --num for one of its own options, cut short.
    options = ["-n", "11", "--batch", "4", "--steps", "3", "--json"]
    ours = json.loads(launch(2, *evaluate, *options).stdout)
    theirs = json.loads(CliRunner().invoke(app, [*evaluate, *options], catch_exceptions=False).stdout)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert ours[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), key


@pytest.mark.slow
def test_two_processes_draw_what_one_draws(data, tmp_path):
    train(1, data, tmp_path / "run", 2)
    pictures = []
    for processes in (1, 2):
        file = tmp_path / f"{processes}.png"
        sample = ["sample", str(tmp_path / "run"), "-n", "7", "--steps", "3", "--device", "cpu", "--out", str(file)]
        launch(processes, *sample)
        pictures.append(np.asarray(Image.open(file)).astype(int))
    assert pictures[0].std() > 10
    assert np.abs(pictures[0] - pictures[1]).max() <= 1  # of 255: sums of other lengths round otherwise


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_any_number_of_processes(data, tmp_path):
    """Two, then one, then three: the stream goes on as if one process had done it all."""
    train(1, data, tmp_path / "straight", 6)
    for processes, steps in ((2, 2), (1, 4), (3, 6)):
        train(processes, data, tmp_path / "changing", steps)
    a, b = (torch.tensor(series(tmp_path / name, "loss")) for name in ("straight", "changing"))
    assert len(a) == 6
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    runs = [experiment.load_run(tmp_path / name, device="cpu") for name in ("straight", "changing")]
    one, other = (experiment.draw(run.config, run.model, 4, steps=4) for run in runs)
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_process_that_dies_ends_the_others(data, tmp_path):
    code = f"""
import os
from pathlib import Path
from scalelong import experiment
from scalelong.config import with_overrides
from scalelong.data.store import open_store
from scalelong.presets import run_preset
from tests.test_world import SETTINGS
def show(progress):
    if os.environ["RANK"] == "1" and progress.step == 3:
        Path({str(tmp_path / "fell")!r}).touch()
        raise RuntimeError("the second process fell over")
config = with_overrides(run_preset("digits"), [*SETTINGS, "train.steps=100000"])
experiment.train(config, open_store({str(data)!r}), Path({str(tmp_path / "run")!r}), device="cpu", show=show)
"""
    program = tmp_path / "program.py"
    program.write_text(code)
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    took_s = time.time() - (tmp_path / "fell").stat().st_mtime
    assert run.returncode != 0
    assert "the second process fell over" in run.stderr
    assert took_s < 30  # it is over, and not ended by some time limit of torch's, minutes later


@pytest.mark.slow
def test_a_process_that_dies_while_the_first_judges_ends_that_too(data, tmp_path):
    """The launcher asks the first to stop, and would kill it half a minute later."""
    code = f"""
import os, signal, threading, time
from pathlib import Path
from scalelong import experiment
from scalelong.config import with_overrides
from scalelong.data.store import open_store
from scalelong.presets import run_preset
from tests.test_world import SETTINGS
begun, given_up = Path({str(tmp_path / "begun")!r}), Path({str(tmp_path / "given up")!r})
def figures_of(model, walk):
    begun.touch()
    try:
        for _ in walk(range(100_000)):
            time.sleep(0.02)
    finally:
        given_up.touch()
def die():
    while not begun.exists():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)
if os.environ["RANK"] == "1":
    threading.Thread(target=die, daemon=True).start()
config = with_overrides(run_preset("digits"), [*SETTINGS, "train.steps=10"])
judges = [experiment.Judge("quality", figures_of, every=2)]
experiment.train(config, open_store({str(data)!r}), Path({str(tmp_path / "run")!r}), device="cpu", judges=judges)
"""
    program = tmp_path / "program.py"
    program.write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", program]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env=environment)
    assert run.returncode != 0
    assert (tmp_path / "given up").exists()


@pytest.mark.slow
def test_a_nan_of_one_process_stops_all_and_is_named_there(data, tmp_path):
    code = f"""
import os
from pathlib import Path
from scalelong import experiment
from scalelong.config import with_overrides
from scalelong.data.store import open_store
from scalelong.presets import run_preset
from scalelong.training.step import Stepper
from tests.test_world import SETTINGS
plain = Stepper._loss
def poisoned(self, piece, forward):
    block = self.model.in_blocks[1].mlp.fc2
    if self.step == 2 and os.environ["RANK"] == "1" and not block._forward_hooks:
        block.register_forward_hook(lambda m, a, out: out * float("inf"))
    return plain(self, piece, forward)
Stepper._loss = poisoned
config = with_overrides(run_preset("digits"), [*SETTINGS, "train.steps=9"])
try:
    experiment.train(config, open_store({str(data)!r}), Path({str(tmp_path / "run")!r}), device="cpu")
except FloatingPointError as error:
    print(os.environ["RANK"], error, flush=True)
"""
    program = tmp_path / "program.py"
    program.write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", program]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240, env=environment)
    said = dict(line.split(" ", 1) for line in run.stdout.splitlines() if line[:2] in ("0 ", "1 "))
    assert "step 2: the loss is not finite; it came from process 1" in said["0"]
    assert "in_blocks.1.mlp.fc2" in said["1"]
    assert tensors_of(tmp_path / "run")[0] == 2


def test_a_batch_that_cannot_be_shared_is_refused():
    assert World(1, 3).part(24, 2) == 8
    with pytest.raises(ValueError, match=r"3 × 2; got 32"):
        World(1, 3).part(32, 2)


def test_shares_are_all_of_it_in_order():
    for total in (0, 1, 7, 12):
        shares = [World(rank, 3).share(total) for rank in range(3)]
        assert [i for share in shares for i in share] == list(range(total))
