import json
import re
from pathlib import Path

import pytest

from scalelong.config import ModelConfig, RunConfig, TrainConfig, to_dict, with_overrides
from scalelong.presets import run_preset
from scalelong.report.compared import (
    finding,
)
from scalelong.report.runs import Run, by_scaling, read_run, set_apart


def made_run(scaling, seed, loss, folder="x", **more):
    config = with_overrides(run_preset("digits"), [f"model.scaling={scaling}", f"train.seed={seed}"])
    return Run([{"step": 1, "loss": loss, **more}], Path(folder), config, {})


def make(folder, scaling, seed, losses):
    folder.mkdir()
    config = RunConfig(
        model=ModelConfig(preset="digits", scaling=scaling),
        train=TrainConfig(steps=10, batch_size=2, lr=1e-3, seed=seed),
    )
    (folder / "config.json").write_text(json.dumps(to_dict(config)))
    (folder / "environment.json").write_text("{}")
    rows = [{"step": i + 1, "loss": x, "signals": {"skip norm/0": 2 * x}} for i, x in enumerate(losses)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"step": 99, "lo')
    return folder


def test_series_and_last_values(tmp_path):
    run = read_run(make(tmp_path / "a", "ls", 0, [3.0, 1.0, 2.0]))
    assert run.series("loss") == ([1, 2, 3], [3.0, 1.0, 2.0])  # the line that was cut short is left out
    assert run.series("signals", "skip norm/0")[1] == [6.0, 2.0, 4.0]
    assert run.last("loss", over=2) == 1.5
    assert run.last("quality", "pixel_fid") is None


def test_a_run_that_logged_nothing_says_so(tmp_path):
    folder = make(tmp_path / "a", "none", 0, [])
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="has logged nothing yet"):
        read_run(folder)


def test_runs_that_differ_in_more_than_scaling_and_seed_are_told_to(tmp_path):
    def run(name, images, *settings, source="x"):
        config = with_overrides(run_preset("digits"), list(settings))
        (tmp_path / name).mkdir()
        about = {"source": source, "sha256": {"labels.npy": "0" * 64, "images.npy": images}}
        (tmp_path / name / "data.json").write_text(json.dumps(about))
        return Run([{"step": 1, "loss": 1.0}], tmp_path / name, config, {})

    none = run("none", "a" * 64, "train.seed=0")
    alike = run("ls", "a" * 64, "train.seed=1", "model.scaling=ls", "model.placement=norm")
    assert set_apart([none, alike]) == []
    others = run("b", "b" * 64, "train.lr=0.5", "model.changes.num_layers=2", "model.scaling=ls")
    layers, images, lr = sorted(set_apart([none, others]))
    assert layers == "model.changes.num_layers (the preset's, 2)"
    assert re.fullmatch(r"the images \(x [0-9a-f]{8}, x [0-9a-f]{8}\)", images)
    assert lr == f"train.lr ({none.config.train.lr}, 0.5)"
    began = {"how": "weights", "source": "mine", "step": None}
    (alike.folder / "began.json").write_text(json.dumps(began))
    assert set_apart([none, alike]) == ["first weights (drawn, weights mine)"]
    (alike.folder / "began.json").unlink()
    (others.folder / "data.json").unlink()
    assert len(set_apart([none, others])) == 2  # not recorded, in older runs
    assert finding(by_scaling([none, others])).startswith("Nothing is concluded: the runs differ in more than")


def test_no_run_folder_is_told_without_the_systems_own_words(tmp_path):
    with pytest.raises(
        ValueError, match=r"nope is no run folder: it has no config\.json\. scalelong train RECIPE --out"
    ):
        read_run(tmp_path / "nope")


def test_how_a_run_ended_is_its_last_line(tmp_path):
    folder = make(tmp_path / "a", "none", 0, [3.0, 1.0])
    assert read_run(folder).divergence == ""
    bad = {"step": 3, "nonfinite": {"step": 2, "what": "loss", "culprit": "x", "error": "step 2: the loss is"}}
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)[:2]
    (folder / "metrics.jsonl").write_text("".join(lines) + json.dumps(bad) + "\n")
    run = read_run(folder)
    assert run.divergence == "step 2: the loss is"
    assert (run.step, run.name) == (3, "none with seed 0")
    with (folder / "metrics.jsonl").open("a") as log:  # a branch, or another torch, has come by
        log.write('{"step": 4, "loss": 1.0}\n')
    assert read_run(folder).divergence == ""
