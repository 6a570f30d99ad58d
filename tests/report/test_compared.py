"""Tables and sentences about runs beside each other."""

import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from scalelong.config import with_overrides
from scalelong.presets import run_preset
from scalelong.report import figures
from scalelong.report.compared import (
    beyond_spread,
    by_chance,
    changes_by_noise,
    conclude,
    conclude_by_noise,
    finding,
    finding_by_noise,
    show,
    spread,
    summary_rows,
)
from scalelong.report.page import write_report
from scalelong.report.runs import Run, by_scaling, read_run
from scalelong.training.ema import EMA, move_averages, share_of_start
from tests.report.test_runs import made_run, make

NAN, INF = math.nan, math.inf


def lost(scaling, seed, step=1):
    """A run that diverged at once."""
    bad = {"step": step, "what": "loss", "culprit": "a module", "error": f"step {step}: the loss is not finite"}
    run = made_run(scaling, seed, 1.0)
    return Run([*run.rows, {"step": step + 1, "nonfinite": bad}], run.folder, run.config, {})


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
    assert rows["cs:0.7 at norm"]["minus none's"] == "-0.4 ± 0.1"
    assert rows["none at norm"]["minus none's"] == "–"
    twice = summary_rows(by_scaling([*runs, run("none", "norm", 0, 5.0)]))
    assert [row["held-out loss"] for row in twice] == ["2.667 ± 2", "1.1 ± 0.6"]
    assert [row["minus none's"] for row in twice] == ["–", "–"]


def test_a_column_is_there_where_any_run_has_it():
    runs = [made_run("none", 0, 1.0), made_run("ls", 0, 1.0, quality={"fid": 7.0})]
    assert [row["FID"] for row in summary_rows(by_scaling(runs))] == ["–", "7"]


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
        (
            {"ls": [-0.1, 0.1]},
            "No difference to none in loss is larger than the spread over 2 seeds: none is shown.",
        ),
        (
            {"cs:0.7": [-0.3, -0.2], "1/sqrt2": [0.0, 0.1], "ls": [0.1, -0.1]},
            "Seen, but not shown: cs:0.7 lowers the loss by 0.25 ± 0.05, beyond the spread over 2 seeds (chance "
            "alone shows as much of one scaling at least in 32% of comparisons); 4 seeds would tell. Of 1/sqrt2 "
            "and ls no difference is shown.",
        ),
        (
            {"cs:0.7": [-0.26, -0.25], "ls": [0.4, 0.5]},
            "Against none, cs:0.7 lowers the loss by 0.26 ± 0.005, beyond the spread over 2 seeds (chance alone "
            "shows as much of one scaling at least in 2% of comparisons). Seen, but not shown: ls raises the loss "
            "by 0.45 ± 0.05, beyond the spread over 2 seeds (chance alone shows as much of one scaling at least in "
            "13% of comparisons); 4 seeds would tell.",
        ),
        (
            {"ls": [-0.3, -0.2, -0.25, -0.25]},
            "Against none, ls lowers the loss by 0.25 ± 0.05, beyond the spread over 4 seeds (chance alone shows "
            "as much of one scaling at least in less than 1% of comparisons).",
        ),
        (
            {"ls": [-9.0]},
            "Whether a scaling differs from none in loss cannot be told from one seed, which has no spread.",
        ),
    ],
)
def test_the_sentence_follows_from_the_differences(differences, says):
    assert conclude(differences, "loss") == says


def by_noise(scaling, seed, *losses, **more):
    return made_run(scaling, seed, 1.0, **{"held out": {"loss": sum(losses), "by noise": list(losses), **more}})


def test_where_in_the_process_a_scaling_changes_the_loss():
    runs = [
        by_noise("none", 0, 2.0, 1.0, 0.1), by_noise("none", 1, 4.0, 1.0, 0.1), by_noise("none", 2, 4.0, 1.0, 0.1),
        by_noise("ls", 0, 1.0, 1.1, 0.12), by_noise("ls", 1, 1.8, 0.9, 0.13), by_noise("cs:0.7", 1, 4.0, 1.0, 0.1),
    ]  # fmt: skip
    found = changes_by_noise(by_scaling(runs))
    assert found["none"] == []
    assert found["ls"] == [pytest.approx([-0.5, 0.1, 0.2]), pytest.approx([-0.55, -0.1, 0.3])]
    assert found["cs:0.7"] == [[0.0, 0.0, 0.0]]
    assert conclude_by_noise(found) == (
        "Beyond the spread over 2 seeds, the loss against none's: ls is lower at 0 … 0.333 (by 52%) and higher "
        "at 0.667 … 1 (by 25%) (by chance alone 0.88 of 3 stretches would, and neighbours go together)."
    )
    assert conclude_by_noise({"none": [], "ls": found["cs:0.7"]}) == ""  # one seed
    several = {"ls": [[0.1, -0.1, 0.1, 0.2]] * 5, "cs:0.7": [[-0.1, -0.2, 0.0, -0.1]] * 5, "ie": [[1, 1], [-1, -1]]}
    assert conclude_by_noise(several) == (
        "Beyond the spread over 2 seeds, the loss against none's: ls is lower at 0.25 … 0.5 (by 10%) and higher at "
        "0 … 0.25 and 0.5 … 1 (by 10 … 20%); cs:0.7 is lower at 0 … 0.5 and 0.75 … 1 (by 10 … 20%); ie shows "
        "no difference (by chance alone 3.5 of 12 stretches would, and neighbours go together)."
    )
    rare = {"ls": [[0.1, 0.0, 0.1, -0.1], [0.1, 0.1, -0.1, 0.1]]}
    assert conclude_by_noise(rare) == (
        "1 of 4 stretches differ from none's beyond the spread over 2 seeds; by chance alone 1.2 of 4 stretches "
        "would, and neighbours go together: nothing is shown."
    )


def test_where_nothing_is_concluded_it_is_not_by_noise_either():
    none, ls = ([by_noise(scaling, seed, *losses) for seed in (0, 1)]
                for scaling, losses in (("none", (1.0, 1.0)), ("ls", (0.5, 0.5))))  # fmt: skip
    assert "ls is lower at 0 … 1 (by 50%)" in finding_by_noise(by_scaling([*none, *ls]), {})
    for gone in ("none", "ls"):
        assert finding_by_noise(by_scaling([*none, *ls]), by_scaling([lost(gone, 2)])) == ""
    for run in ls:
        run.rows.append({"step": 2000, "loss": 0.1})
    assert "not equally far" in finding(by_scaling([*none, *ls]))
    assert finding_by_noise(by_scaling([*none, *ls]), {}) == ""


def test_none_that_diverged_at_a_placement_is_no_reference_there():
    def placed(run):
        model = replace(run.config.model, placement="norm")
        return replace(run, config=replace(run.config, model=model))

    runs = [
        placed(by_noise(scaling, seed, 1.0 + (scaling == "ls"))) for scaling in ("none", "ls") for seed in (0, 1)
    ]
    gone = by_scaling([placed(lost("none", 2))])
    assert list(gone) == ["none at norm"]
    assert "ls at norm is higher at 0 … 1 (by 100%)" in finding_by_noise(by_scaling(runs), {})
    assert finding_by_noise(by_scaling(runs), gone) == ""


def test_runs_that_did_not_ask_by_noise_have_no_such_figure():
    old = [made_run(scaling, 0, 1.0, **{"held out": {"loss": 1.0}}) for scaling in ("none", "ls")]
    assert changes_by_noise(by_scaling(old)) == {"none": [], "ls": []}
    assert figures.changes({"none": [], "ls": []}, "change") == ""


def test_a_difference_counts_beyond_the_range_over_seeds():
    assert beyond_spread([-0.3, -0.2])
    assert not beyond_spread([-0.3, 0.0])  # the mean, 0.15, is within the range, 0.3


@pytest.mark.parametrize(("seeds", "scalings"), [(2, 1), (3, 1), (4, 1), (2, 3), (4, 3)])
def test_how_often_chance_alone_is_beyond_the_spread(seeds, scalings):
    random, found, trials = np.random.default_rng(1), 0, 4000
    for _ in range(trials):
        none = random.normal(size=seeds)
        found += any(beyond_spread((random.normal(size=seeds) - none).tolist()) for _ in range(scalings))
    assert by_chance(seeds, scalings) == pytest.approx(found / trials, abs=0.03)


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


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([], "–"), ([None, None], "–"), ([0.5], "0.5"), ([0.5, None], "0.5"), ([0.1, 0.2], "0.15 ± 0.05"),
        ([0.1, NAN, 0.2], "0.15 ± 0.05, not finite in 1 of 3"), ([NAN, INF], "not finite"),
        ([0.1, INF, None], "0.1, not finite in 1 of 2"),
    ],
)  # fmt: skip
def test_what_is_no_number_is_no_dash_and_no_mean(values, shown):
    assert show(values) == shown


@pytest.mark.parametrize("bad", [[0.1, NAN], [NAN, 0.1], [0.1, NAN, 0.1], [INF, INF], [-INF, 0.1]])
def test_nothing_is_concluded_from_what_is_not_finite(bad):
    assert not beyond_spread(bad)
    said = conclude({"ls": bad, "cs:0.7": [0.1] * 4}, "held-out loss")
    assert "cs:0.7 raises the held-out loss by 0.1" in said
    assert f"Of ls nothing is concluded: with {sum(not math.isfinite(b) for b in bad)} of {len(bad)} seeds" in said
    rows = [[0.1, value] for value in bad]
    assert "ls cannot be told, as it is not finite with" in conclude_by_noise({"ls": rows})


def test_a_held_out_loss_that_is_not_finite_is_not_replaced_by_the_training_loss():
    def run(scaling, seed, loss, held_out):
        return made_run(scaling, seed, loss, **{"held out": {"loss": held_out}})

    runs = [run("none", seed, 0.5, 0.5 + seed / 100) for seed in range(3)]
    runs += [run("ls", seed, 0.4, loss) for seed, loss in enumerate((0.6, 0.61, NAN))]
    assert finding(by_scaling(runs)).startswith(
        "Of ls nothing is concluded: with 1 of 3 seeds its held-out loss, or that of none, is not finite."
    )


def test_a_scaling_that_diverged_wins_nothing_by_its_other_seeds():
    runs = [made_run("none", seed, 1.0) for seed in range(3)] + [made_run("ls", seed, 0.5) for seed in range(2)]
    assert finding(by_scaling(runs)).startswith("Against none, ls lowers the loss by 0.5")
    assert "Of ls nothing is concluded: with 1 of 3 seeds" in finding(by_scaling([*runs, lost("ls", 2)]))
    without = [lost("none", seed) for seed in range(2)] + [made_run("ls", seed, 0.5) for seed in range(2)]
    assert "Of ls nothing is concluded: with 2 of 2 seeds" in finding(by_scaling(without))


def test_runs_that_are_not_equally_far_are_told_to():
    ahead, behind = made_run("none", 0, 1.0), made_run("ls", 0, 0.5)
    ahead.rows.append({"step": 2000, "loss": 0.1})
    assert finding(by_scaling([ahead, behind])) == (
        "Nothing is concluded: the runs are not equally far, at steps 1 to 2,000."
    )


def test_a_run_that_diverged_is_named_and_drawn_to_its_end(tmp_path):
    for scaling, seed in (("none", 0), ("ls", 0), ("ls", 1)):
        make(tmp_path / f"{scaling}{seed}", scaling, seed, [1.0, 0.5])
    runs = [read_run(tmp_path / name) for name in ("none0", "ls0")]
    ruined = Run(
        [*read_run(tmp_path / "ls1").rows, lost("ls", 1, 2).rows[-1]], tmp_path / "ls1", runs[1].config, {}
    )
    write_report([*runs, ruined], tmp_path / "page.html", "a command")
    page = (tmp_path / "page.html").read_text()
    assert "diverged: step 2: the loss is not finite" in page
    assert "A line that ends in a cross is of a run that diverged there." in page
    rows = page.split("<table")[1].split("</table>")[0]
    assert rows.count("<td>1</td>") == 2  # seeds: that run is in no mean
    write_report([ruined], tmp_path / "alone.html", "a command")
    assert "<h2>Loss</h2>" in (tmp_path / "alone.html").read_text()


def test_averages_that_hardly_moved_are_warned_of():
    """The spread over seeds is then that of the weights they share."""
    runs = [
        made_run(scaling, seed, 1.0, **{"held out": {"loss": 1.0 + seed}})
        for scaling in ("none", "ls")
        for seed in (0, 1)
    ]
    assert finding(by_scaling(runs)).endswith(
        "Beware: the averages that were judged are still 99% the first weights."
    )
    late = [Run([{**run.rows[0], "step": 500}], run.folder, run.config, {}) for run in runs]
    assert "Beware" not in finding(by_scaling(late))
    assert share_of_start(0.999, 40) == pytest.approx(0.96, abs=0.01)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    average = EMA(model, 0.99, warmup=True)
    for step in range(3):  # towards 0: what is left of it is the first weights
        move_averages(
            [list(average.weights.values())],
            [torch.zeros(1, 1)],
            [average.weight(torch.tensor(step), torch.tensor(1.0))],
        )
    assert share_of_start(0.99, 3, warmup=True) == pytest.approx(average.weights["weight"].item(), rel=1e-5)
