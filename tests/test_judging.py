import json
import math

import pytest
import torch
from typer.testing import CliRunner

from scalelong import experiment
from scalelong.cli.main import app
from scalelong.diffusion.sampling import check_finite
from scalelong.judging import judge_quality
from scalelong.metrics.evaluate import quality_of, reference_of
from scalelong.metrics.features import PixelFeatures
from scalelong.training.log import read_metrics
from tests.training.test_fit import config, store  # noqa: F401 - a fixture


def test_each_average_is_judged_as_evaluate_would(store, tmp_path):  # noqa: F811
    run = config("train.steps=5", "train.ema_rates=0.5,0.9")
    judge = judge_quality(run, store, PixelFeatures(), num=16, steps=4, every=2)
    experiment.train(run, store, tmp_path / "run", device="cpu", judges=[judge])
    rows = {row["step"]: row["quality"] for row in read_metrics(tmp_path / "run") if "quality" in row}
    assert list(rows) == [2, 4, 5]  # at the interval, and at the end
    last = rows[5]
    for rate in (0.5, 0.9):
        loaded = experiment.load_run(tmp_path / "run", ema_rate=rate, device="cpu")
        images = experiment.draw(loaded.config, loaded.model, 16, seed=1, steps=4)
        want = quality_of([images], reference_of(store, PixelFeatures()), PixelFeatures(), "").fid
        assert last[f"pixel_fid at {rate}"] == pytest.approx(want, rel=1e-4)
    assert last["ema"] == 0.5  # 5 steps: the slow one has not settled
    assert last["pixel_fid"] == last["pixel_fid at 0.5"]


def test_samples_that_are_no_numbers_are_judged_as_such_and_end_no_training(store, tmp_path, monkeypatch):  # noqa: F811
    run = config("train.steps=2", "train.sample_every=1")
    judge = judge_quality(run, store, PixelFeatures(), num=8, steps=2, every=1)
    monkeypatch.setattr("scalelong.runs.drawing.sample", none_finite)
    with pytest.warns(UserWarning, match=r"8 of 8 samples.* are not finite|no picture at step"):
        assert experiment.train(run, store, tmp_path / "run", device="cpu", judges=[judge])
    rows = [row["quality"] for row in read_metrics(tmp_path / "run") if "quality" in row]
    assert len(rows) == 2
    assert all(math.isnan(row[name]) for row in rows for name in ("pixel_fid", "pixel_kid", "pixel_precision"))
    assert not list((tmp_path / "run").glob("samples/*.png"))


def none_finite(model, process, indices, shape, **how):
    check_finite(torch.full((len(indices), *shape), math.nan), "samples")


def test_from_the_command_line(tmp_path):
    settings = ["model.changes.hidden_size=16", "model.changes.num_layers=2", "train.steps=2", "train.batch_size=4"]
    changes = [part for setting in settings for part in ("--set", setting)]
    judged = ["--evaluate-every", "1", "--evaluate-num", "4", "--features", "pixels"]
    command = ["train", "digits", *changes, *judged, "--out", str(tmp_path / "run"), "--device", "cpu", "--json"]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert json.loads(result.stdout)["done"]
    assert [row["step"] for row in read_metrics(tmp_path / "run") if "quality" in row] == [1, 2]
    assert "pixel FID" in (tmp_path / "run" / "report.html").read_text()
