import json
import math
import os
import re
from pathlib import Path

import numpy as np
import pytest

from scalelong.config import ModelConfig, RunConfig, TrainConfig, to_dict, with_overrides
from scalelong.presets import run_preset
from scalelong.report.runs import (
    BY_CHANCE,
    Run,
    beyond_spread,
    by_scaling,
    conclude,
    finding,
    read_run,
    set_apart,
    spread,
    summary_rows,
)


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
    assert math.isnan(run.last("quality", "pixel_fid"))


def test_groups_and_spread(tmp_path):
    runs = [
        read_run(make(tmp_path / name, scaling, seed, [loss]))
        for name, scaling, seed, loss in (("a", "none", 0, 1.0), ("b", "ls", 0, 5.0), ("c", "none", 1, 2.0))
    ]
    groups = by_scaling(runs)
    assert {k: len(v) for k, v in groups.items()} == {"none": 2, "ls": 1}
    rows = summary_rows(groups)
    assert rows[0]["loss"] == "1.5 ± 0.5"
    assert rows[1]["loss"] == "5"  # one seed has no spread
    assert "pixel FID" not in rows[0]  # nobody judged samples
    assert spread([1.0, 4.0, 2.5]) == (2.5, 1.5)
    assert all(math.isnan(v) for v in spread([]))


def test_a_run_that_logged_nothing_says_so(tmp_path):
    folder = make(tmp_path / "a", "none", 0, [])
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="has logged nothing yet"):
        read_run(folder)


def test_differences_to_none_are_of_the_same_placement_and_seed():
    def run(scaling, placement, seed, loss):
        config = with_overrides(
            run_preset("cifar10-unet"),
            [f"model.scaling={scaling}", f"model.placement={placement}", f"train.seed={seed}"],
        )
        return Run([{"step": 1, "held out": {"loss": loss}}], Path("x"), config, {})

    runs = [run("none", "norm", 0, 1.0), run("none", "norm", 1, 2.0), run("cs:0.7", "norm", 0, 0.5)]
    runs += [run("cs:0.7", "norm", 1, 1.7)]
    rows = {row["scaling"]: row for row in summary_rows(by_scaling(runs))}
    assert rows["cs:0.7 at norm"]["less that of none"] == "-0.4 ± 0.1"
    assert rows["none at norm"]["less that of none"] == "–"
    twice = summary_rows(by_scaling([*runs, run("none", "norm", 0, 5.0)]))
    assert [row["held-out loss"] for row in twice] == ["2.667 ± 2", "1.1 ± 0.6"]
    assert [row["less that of none"] for row in twice] == ["–", "–"]


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


def test_a_column_is_there_where_any_run_has_it():
    runs = [made_run("none", 0, 1.0), made_run("ls", 0, 1.0, quality={"fid": 7.0})]
    assert [row["FID"] for row in summary_rows(by_scaling(runs))] == ["–", "7"]


def test_no_run_folder_is_told_without_the_systems_own_words(tmp_path):
    with pytest.raises(ValueError, match=r"nope is no run folder: it has no config\.json\. scalelong train --out"):
        read_run(tmp_path / "nope")


@pytest.mark.parametrize(("second", "together"), [((150, 300), True), ((201, 300), False)])
def test_the_time_of_a_step_is_not_told_of_runs_that_trained_together(tmp_path, second, together):
    for name, (began, ended) in (("a", (100, 200)), ("b", second)):
        folder = make(tmp_path / name, "none", ord(name), [1.0])
        for file in folder.iterdir():
            os.utime(file, (0, ended if file.name == "metrics.jsonl" else began))
    rows = summary_rows(by_scaling([read_run(tmp_path / name) for name in "ab"]))
    assert ("ms per step" in rows[0]) != together


@pytest.mark.parametrize(
    ("differences", "says"),
    [
        ({}, ""),
        ({"ls": [-0.1, 0.1]}, "No scaling differs from none in loss beyond the spread over 2 seeds."),
        (
            {"cs:0.7": [-0.3, -0.2], "1/sqrt2": [0.0, 0.1], "ls": [0.1, -0.1]},
            "Against none, cs:0.7 lowers the loss by 0.25 ± 0.05, beyond the spread over 2 seeds; 1/sqrt2 and ls "
            "do not differ. Chance alone does as much to 30% of scalings, to one at least of several more often.",
        ),
        (
            {"cs:0.7": [-0.3, -0.2], "ls": [0.4, 0.5]},
            "Against none, cs:0.7 lowers the loss by 0.25 ± 0.05 and ls raises the loss by 0.45 ± 0.05, beyond the "
            "spread over 2 seeds. Chance alone does as much to 30% of scalings, to one at least of several more "
            "often.",
        ),
        (
            {"ls": [-9.0]},
            "Whether a scaling differs from none in loss cannot be told from one seed, which has no spread.",
        ),
    ],
)
def test_the_sentence_follows_from_the_differences(differences, says):
    assert conclude(differences, "loss") == says


def test_a_difference_counts_beyond_the_range_over_seeds():
    assert beyond_spread([-0.3, -0.2])
    assert not beyond_spread([-0.3, 0.0])  # the mean, 0.15, is within the range, 0.3


def test_how_often_chance_goes_beyond_the_spread():
    random = np.random.default_rng(0)
    for seeds, share in BY_CHANCE.items():
        noise = random.standard_normal((20_000, seeds)).tolist()
        assert sum(map(beyond_spread, noise)) / 20_000 == pytest.approx(share, abs=0.01)


def test_differences_are_seed_by_seed_and_of_held_out_images_where_all_have_them():
    runs = [made_run("none", s, s + 1.0) for s in (0, 1)] + [made_run("ls", s, s + 1.5 - s / 100) for s in (0, 1)]
    assert finding(by_scaling(runs)).startswith(
        "Against none, ls raises the loss by 0.5 ± 0.005"
    )  # seeds are 1 apart
    held_out = [
        made_run(scaling, seed, 1.0, **{"held out": {"loss": loss}})
        for scaling, seed, loss in (("none", 0, 1.0), ("none", 1, 2.0), ("ls", 0, 0.5), ("ls", 1, 1.5))
    ]
    assert finding(by_scaling(held_out)).startswith("Against none, ls lowers the held-out loss by 0.5 ± 0")
    assert finding(by_scaling([*runs[:2]])) == ""
    assert finding(by_scaling(runs[2:])) == ""  # nothing to compare with
