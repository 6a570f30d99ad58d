"""The same numbers in metrics.jsonl, TensorBoard and W&B; a resumed run goes on with its W&B run."""

import importlib.machinery
import sys
import types

import pytest

from scalelong import experiment
from scalelong.training.guard import NonFiniteError
from scalelong.training.log import read_metrics
from tests.training.test_fit import config, store  # noqa: F401 - a fixture


class FakeRun:
    def __init__(self, given):
        self.given, self.rows, self.metrics, self.exit_code = given, [], {}, None

    def define_metric(self, name, step_metric=None):
        self.metrics[name] = step_metric

    def log(self, row):
        self.rows.append(row)

    def finish(self, exit_code=None):
        self.exit_code = exit_code


@pytest.fixture
def wandb_runs(monkeypatch):
    """What a stand-in for the package was asked to do: one entry per call of wandb.init."""
    runs = []
    fake = types.ModuleType("wandb")
    fake.__spec__ = importlib.machinery.ModuleSpec("wandb", None)  # other packages look whether it is there
    fake.Error = type("Error", (Exception,), {})
    fake.init = lambda **given: runs.append(FakeRun(given)) or runs[-1]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return runs


def numbers(row):
    """A line of metrics.jsonl with its groups as group/name."""
    flat = {}
    for name, value in row.items():
        flat |= {f"{name}/{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def test_wandb_gets_the_config_and_every_number(store, tmp_path, wandb_runs):  # noqa: F811
    experiment.train(config("train.steps=4", "model.scaling=ls"), store, tmp_path / "run", logger="wandb")
    (run,) = wandb_runs
    assert run.given["project"] == "scalelong"
    assert run.given["name"] == "run"
    assert run.given["dir"] == str(tmp_path / "run")
    assert run.given["config"]["model"]["scaling"] == "ls"
    assert run.given["config"]["model"]["changes"]["sample_size"] == 8  # as fitted to the data
    assert run.metrics == {"step": None, "*": "step"}
    assert run.rows == [numbers(row) for row in read_metrics(tmp_path / "run")]
    assert any(name.startswith("signals/skip norm/") for name in run.rows[-1])
    assert run.exit_code == 0
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))


def test_a_resumed_run_goes_on_with_its_wandb_run(store, tmp_path, wandb_runs, monkeypatch):  # noqa: F811
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    for name, steps in (("run", 3), ("run", 6), ("other", 3)):
        experiment.train(config(f"train.steps={steps}"), store, tmp_path / name, logger="wandb")
    first, second, other = (run.given for run in wandb_runs)
    assert first["id"] == second["id"] != other["id"]
    assert second["resume"] == "allow"
    assert second["config"]["train"]["steps"] == 6
    assert second["allow_val_change"]  # or W&B would refuse the changed train.steps
    assert first["project"] == "mine"


def test_a_run_that_fails_is_shown_as_failed(store, tmp_path, wandb_runs):  # noqa: F811
    with pytest.raises(NonFiniteError):
        experiment.train(
            config("train.steps=9", "train.lr=1e30", "train.warmup_steps=0"),
            store,
            tmp_path / "run",
            logger="wandb",
        )
    assert wandb_runs[0].exit_code == 1


def test_a_refused_login_says_what_to_do(store, tmp_path, wandb_runs, monkeypatch):  # noqa: F811
    def refuse(**given):
        raise sys.modules["wandb"].Error("No API key configured.")

    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    with pytest.raises(ValueError, match=r"No API key configured\..*wandb login.*WANDB_MODE=offline"):
        experiment.train(config("train.steps=1"), store, tmp_path / "run", logger="wandb")


def test_none_writes_metrics_alone(store, tmp_path):  # noqa: F811
    experiment.train(config("train.steps=2"), store, tmp_path / "run", logger="none")
    assert not (tmp_path / "run" / "tensorboard").exists()
    assert [row["step"] for row in read_metrics(tmp_path / "run") if "loss" in row] == [2]


@pytest.mark.parametrize(
    ("logger", "says"),
    [("wandb", "pip install wandb"), ("mlflow", "one of tensorboard, wandb, none, got 'mlflow'")],
)
def test_a_logger_that_cannot_be_had_is_refused_before_anything_is_written(
    logger,
    says,
    store,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as where it is not installed
    with pytest.raises(ValueError, match=says):
        experiment.train(config("train.steps=1"), store, tmp_path / "run", logger=logger)
    assert not (tmp_path / "run").exists()


def test_tensorboard_has_what_metrics_has(store, tmp_path):  # noqa: F811
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in (3, 6):
        experiment.train(config(f"train.steps={steps}"), store, tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    logged = {row["step"]: row["loss"] for row in read_metrics(tmp_path / "run") if "loss" in row}
    shown = {event.step: event.value for event in events.Scalars("loss")}
    assert shown == pytest.approx(logged)
    assert set(logged) == {2, 3, 4, 6}


def test_the_real_wandb_offline(store, tmp_path, monkeypatch):  # noqa: F811
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = tmp_path / "run"
    for steps in (2, 4):
        experiment.train(config(f"train.steps={steps}"), store, run, logger="wandb")
    kept = (run / "wandb_id").read_text()
    files = sorted(run.glob(f"wandb/offline-run-*-{kept}/run-{kept}.wandb"))
    content = b"".join(file.read_bytes() for file in files)
    losses = [row["loss"] for row in read_metrics(run) if "loss" in row]
    assert len(losses) == 2
    assert all(repr(loss).encode() in content for loss in losses)
    assert b"hidden_size" in content  # the config
