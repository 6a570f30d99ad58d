"""Weights in parts (FSDP2 on gloo, under torchrun) train, save and resume as whole ones do."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from scalelong import experiment
from scalelong.config import with_overrides
from scalelong.data.prepare import prepare
from scalelong.data.sources import digits
from scalelong.data.store import open_store
from scalelong.presets import run_preset
from scalelong.training import checkpoint, step
from tests.test_world import series
from tests.training.test_fit import tensors_of

SETTINGS = [
    "data.condition=class",
    "train.batch_size=12",
    "train.accumulate=2",
    "train.warmup_steps=2",
    "train.clip_norm=0.5",
    "train.log_every=1",
    "train.monitor_every=2",
    "train.sample_every=4",
    "train.checkpoint_every=2",
    "train.ema_rates=0.9",
    "train.posthoc_every=2",
    "train.steps=4",
]
UVIT = ["model.changes.hidden_size=32", "model.changes.num_layers=4"]
UNET = {
    "layers_per_block": 1,
    "block_out_channels": [8, 16],
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
    "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
    "norm_num_groups": 4,
    "attention_head_dim": 8,
    "dropout": 0.0,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "digits"
    prepare(digits(), folder)
    return folder


def train(data, out, *settings):
    """In this process, or as one of those that torchrun started. Run by name from there, see `launch`."""
    network = [] if "model.preset=cifar10-unet" in settings else UVIT
    config = with_overrides(run_preset("digits"), [*SETTINGS, *network, *settings])
    return experiment.train(config, open_store(data), Path(out), device="cpu", logger="none")


def start(processes, program, tmp_path):
    file = tmp_path / "program.py"
    file.write_text(f"import os\nfrom tests.training.test_sharding import train\n{program}")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    pipe = subprocess.PIPE
    return subprocess.Popen([*run, str(file)], stdout=pipe, stderr=pipe, text=True, env=environment)


def launch(processes, program, tmp_path):
    running = start(processes, program, tmp_path)
    try:
        out, err = running.communicate(timeout=400)
    finally:
        running.kill()
    return running.returncode, out, err


def sharded(data, runs, processes, tmp_path, *, parallel="fsdp"):
    """Several runs in one launch: importing takes most of the time. `runs`: folder -> settings."""
    lines = ["import torch.distributed as dist", "dist.init_process_group('gloo')"]
    for out, settings in runs.items():
        lines.append(f"train({str(data)!r}, {str(out)!r}, *{[*settings, f'train.parallel={parallel}']!r})")
    code, _, err = launch(processes, "\n".join([*lines, "dist.destroy_process_group()"]), tmp_path)
    assert code == 0, err


def assert_same_run(run, other, **tolerance):
    for path in (("loss",), ("gradient norm",), ("signals", "skip norm/0"), ("signals", "merge gradient/1")):
        a, b = (torch.tensor(series(folder, *path)) for folder in (run, other))
        assert len(a) >= 2
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    (at, a), (other_at, b) = tensors_of(run), tensors_of(other)
    assert at == other_at
    assert a.keys() == b.keys()
    for key in a:
        torch.testing.assert_close(a[key], b[key], rtol=1e-4, **{"atol": 1e-5, **tolerance})


@pytest.mark.filterwarnings("ignore:train.parallel=fsdp")
def test_a_run_in_one_part_trains_saves_and_resumes_as_a_whole_one(data, tmp_path, monkeypatch):
    """All that sharding changes in this process: DTensors, the groups of torch's FSDP, the files of parts."""
    for module in (experiment, step):
        monkeypatch.setattr(module, "is_sharded", lambda config, world: config.parallel == "fsdp")
    settings = ["model.scaling=ls", "train.checkpoint_activations=true"]
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for steps in (2, 4):
            train(data, tmp_path / "parts", *settings, "train.parallel=fsdp", f"train.steps={steps}")
    finally:
        torch.distributed.destroy_process_group()
    train(data, tmp_path / "whole", *settings)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    found = checkpoint.load_latest(tmp_path / "parts" / "checkpoints")
    assert (found.folder / "model" / "shard-00001-model-00001-of-00001.safetensors").is_file()


@pytest.mark.slow
def test_two_processes_with_half_the_weights_train_as_one(data, tmp_path):
    settings = ["model.scaling=ls", "train.checkpoint_activations=true"]
    sharded(data, {tmp_path / "two": settings}, 2, tmp_path)
    train(data, tmp_path / "one", *settings)
    assert_same_run(tmp_path / "two", tmp_path / "one")
    folder = checkpoint.load_latest(tmp_path / "two" / "checkpoints").folder
    for group in ("model", "optimiser", "ema-0.9", "ema-power-0.05"):
        small, large = sorted(file.stat().st_size for file in (folder / group).iterdir())
        assert small > 0.7 * large  # each wrote its half
    runs = [experiment.load_run(tmp_path / name, posthoc_width=0.08, device="cpu") for name in ("two", "one")]
    for p, q in zip(*(run.model.parameters() for run in runs), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_every_scaling_and_both_backbones(data, tmp_path):
    unet = ["model.preset=cifar10-unet", *(f"model.changes.{k}={json.dumps(v)}" for k, v in UNET.items())]
    cases = {
        "none": [],
        "cs": ["model.scaling=cs:0.7"],
        "scalar": ["model.scaling=scalar:0.9", "train.checkpoint_activations=true"],
        "per-skip": ["model.scaling=ls-per-skip"],
        "rezero": ["model.changes.block_scaling=rezero"],
        "unet": [*unet, "model.scaling=ls:ratio=2", "train.checkpoint_activations=true"],
        "unet-norm": [*unet, "model.scaling=scalar:0.9", "model.placement=norm"],
    }
    sharded(data, {tmp_path / f"two-{name}": settings for name, settings in cases.items()}, 2, tmp_path)
    for name, settings in cases.items():
        train(data, tmp_path / f"one-{name}", *settings)
        # Adam makes much of rounding where a gradient is all but 0, as in front of a group norm.
        assert_same_run(tmp_path / f"two-{name}", tmp_path / f"one-{name}", atol=1e-4 if "unet" in name else 1e-5)


@pytest.mark.slow
def test_low_precision_is_that_of_autocast(data, tmp_path):
    """As far from one process as data parallel training is, whose autocast sees whole float32 weights."""
    settings = ["model.scaling=ls", "train.precision=bf16"]
    for parallel in ("fsdp", "ddp"):
        sharded(data, {tmp_path / parallel: settings}, 2, tmp_path, parallel=parallel)
    for path in (("loss",), ("gradient norm",)):
        a, b = (torch.tensor(series(tmp_path / name, *path)) for name in ("fsdp", "ddp"))
        # Sums of gradients differ in their last bit, and a weight may round to its other bf16 neighbour by it.
        torch.testing.assert_close(a, b, rtol=5e-5, atol=1e-6)
    assert all(t.dtype == torch.float32 for t in tensors_of(tmp_path / "fsdp")[1].values())


@pytest.mark.slow
def test_a_run_goes_on_with_any_number_of_processes_in_parts_or_whole(data, tmp_path):
    """In parts on 2, whole on 1, in parts on 3, whole on 2: as if one process had done it all."""
    settings = ["model.scaling=ls"]
    train(data, tmp_path / "straight", *settings, "train.steps=8")
    for processes, parallel, steps in ((2, "fsdp", 2), (1, "fsdp", 4), (3, "fsdp", 6), (2, "ddp", 8)):
        program = f"""
from scalelong.data.loader import Loader
plain = Loader.fetch
def noted(self, start, count):
    if count > 1:  # one image is asked for to learn its size
        with open({str(tmp_path / "fetched")!r} + os.environ["RANK"], "a") as notes:
            print(start, count, file=notes)
    return plain(self, start, count)
Loader.fetch = noted
train({str(data)!r}, {str(tmp_path / "changing")!r}, "model.scaling=ls", "train.parallel={parallel}",
      "train.steps={steps}")
"""
        code, _, err = launch(processes, program, tmp_path)
        assert code == 0, err
    assert_same_run(tmp_path / "changing", tmp_path / "straight")
    notes = [line.split() for file in tmp_path.glob("fetched*") for line in file.read_text().splitlines()]
    seen = sorted(i for start, count in notes for i in range(int(start), int(start) + int(count)))
    assert seen == list(range(8 * 12))  # of 8 batches, every image once
    runs = [experiment.load_run(tmp_path / name, device="cpu") for name in ("straight", "changing")]
    one, other = (experiment.draw(run.config, run.model, 4, steps=4) for run in runs)
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_process_that_dies_while_it_writes_leaves_no_half_checkpoint(data, tmp_path):
    out = tmp_path / "run"
    begun = time.monotonic()
    program = f"""
from scalelong.training import parts
plain = parts.write_parts
def dying(folder, tensors):
    if os.environ["RANK"] == "1" and folder.name == "optimiser" and "000004" in folder.parent.name:
        raise RuntimeError("the second process fell over")
    plain(folder, tensors)
parts.write_parts = dying
train({str(data)!r}, {str(out)!r}, "train.parallel=fsdp", "train.steps=100")
"""
    code, _, err = launch(2, program, tmp_path)
    assert code != 0
    assert "the second process fell over" in err
    assert time.monotonic() - begun < 120  # most of it is importing
    assert checkpoint.load_latest(out / "checkpoints").step == 2
    assert train(data, out)  # goes on with one
    assert [f.name for f in sorted((out / "checkpoints").iterdir())] == ["step-000000002", "step-000000004"]


@pytest.mark.slow
def test_a_nan_stops_all_and_is_named_by_the_process_that_had_it(data, tmp_path):
    """In the outputs of one process at step 2, then in its gradients at the very first step."""
    program = f"""
import torch, torch.distributed as dist
from scalelong.training.step import Stepper
dist.init_process_group("gloo")
plain = Stepper._loss
second = os.environ["RANK"] == "1"
def inf_output(m, a, out): return out * float("inf")
def inf_gradient(m, a, out): out.register_hook(lambda g: g * float("inf")) if out.requires_grad else None
for name, step, hook in (("forward", 2, inf_output), ("backward", 0, inf_gradient)):
    def poisoned(self, piece, forward):
        block = self.model.in_blocks[1].mlp.fc2
        if second and self.step == step and not hasattr(block, "poisoned"):
            block.poisoned = block.register_forward_hook(hook)
        return plain(self, piece, forward)
    Stepper._loss = poisoned
    try:
        train({str(data)!r}, {str(tmp_path)!r} + "/" + name, "train.parallel=fsdp", "model.scaling=scalar:0.9",
              "train.precision=bf16")
    except FloatingPointError as error:
        with open({str(tmp_path)!r} + f"/{{name}} {{os.environ['RANK']}}.said", "w") as file:
            file.write(str(error))
"""
    code, _, err = launch(2, program, tmp_path)
    assert code == 0, err
    said = {file.stem: file.read_text() for file in tmp_path.glob("*.said")}
    assert "step 2: the loss is not finite; it came from process 1" in said["forward 0"]
    assert "the first module with a non-finite output is in_blocks.1.mlp.fc2" in said["forward 1"]
    assert "step 0: the gradient is not finite; it came from process 1" in said["backward 0"]
    assert "the first module with a non-finite gradient is in_blocks.1.mlp" in said["backward 1"]
    assert tensors_of(tmp_path / "forward")[0] == 2
    assert tensors_of(tmp_path / "backward")[0] == 0
    assert train(data, tmp_path / "backward", "model.scaling=scalar:0.9", "train.precision=bf16")


@pytest.mark.slow
def test_ctrl_c_leaves_a_whole_checkpoint(data, tmp_path):
    out = tmp_path / "run"
    program = f'train({str(data)!r}, {str(out)!r}, "train.parallel=fsdp", "train.steps=100000")'
    running = start(2, program, tmp_path)
    try:
        while not (out / "metrics.jsonl").is_file() or len((out / "metrics.jsonl").read_text()) < 2000:
            assert running.poll() is None, running.communicate()[1]
            time.sleep(0.1)
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=100)
    finally:
        running.kill()
    stopped_at = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert checkpoint.load_latest(out / "checkpoints").step == stopped_at
    assert not list((out / "checkpoints").glob(".*"))
