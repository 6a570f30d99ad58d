"""Verdicts follow from the data by their rules, and flip with it; figures are drawn from the data file alone."""

import dataclasses
import json
import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from typer.testing import CliRunner

from scalelong import experiment
from scalelong.cli import reproduce as command
from scalelong.cli.main import app
from scalelong.comparison import Judging
from scalelong.config import to_dict
from scalelong.data.prepare import prepare
from scalelong.data.sources import digits
from scalelong.presets import run_preset
from scalelong.reproduce import NAMES, fig3c, fig5, fig7, regimes, reproduction_named
from scalelong.reproduce.drawing import draw_curves, panels
from scalelong.reproduce.judging import below, luck
from scalelong.reproduce.plan import Variant, scalings, small
from scalelong.reproduce.running import final_quality, folders_of, is_done, train_all
from scalelong.reproduce.writing import conclude, write_data
from scalelong.skips.spec import parse_scaling
from scalelong.training.log import divergence


def run(*values, steps=(100, 200)):
    return {"steps": list(steps), "values": list(values)}


def seeds(*values):
    """Curves of one variant that end at these values."""
    return [run(20.0, value) for value in values]


def final(**values):
    return {"measure": "pixel FID", "values": {name.replace("_", " "): list(v) for name, v in values.items()}}


ROW = {"none": [5.0, 5.2], "1/√2": [4.6, 4.7], "CS": [4.0, 4.1], "LS": [4.2, 4.4]}
WORSE = ROW | {"CS": [4.65, 4.8], "LS": [4.65, 4.8]}  # than 1/√2, not than none
BLOCKS = {"stable 0.1": [5.0, 5.1], "stable 0.3": [5.0, 5.1], "ReZero": [4.0, 4.1]}
OTHERS = {name: [4.0, 4.1] for name in ("r = 4", "r = 8", "ELU", "Mish", "scalar", "IE")}


def cells(**outcomes):
    cell = {"depth": 12, "lr": "1e-2", "batch": 8}
    return {
        "cells": [
            cell | {"scaling": n, "seed": s, "outcome": o} for n, os in outcomes.items() for s, o in enumerate(os)
        ]
    }


# name: data for which the claim holds, and data for which it does not, each with its verdict
FLIPS = {
    "fig1": (
        {d: {"none": [run(9, 9)] * 2, "CS": [run(3, 3)] * 2, "LS": [run(4, 4)] * 2} for d in ("12", "16")},
        {d: {"none": [run(9, 9)] * 2, "CS": [run(9, 9.5)] * 2, "LS": [run(4, 4)] * 2} for d in ("12", "16")},
        "does not hold",
    ),
    "fig3a": ({"mean": 0.80, "data": "x"}, {"mean": 0.70, "data": "x"}, "does not hold"),
    "fig3b": (
        {"mean": 1.25, "share below 5": 0.97, "ratio of means": 1.22},
        {"mean": 1.2, "share below 5": 1.0, "ratio of means": 1.22},
        "holds only where the mean is meant",
    ),
    "fig3c": (
        {"curves": {"none": [[2.0, 8.0]] * 2, "CS": [[2.0, 4.0]] * 2, "LS": [[9.0, 12.0]] * 2}},
        {"curves": {"none": [[2.0, 8.0]] * 2, "CS": [[2.0, 4.0]] * 2, "LS": [[1.0, 7.5]] * 2}},
        "holds only where the scaling is CS",
    ),
    "fig5": (
        {"curves": {"none": [run(10, 5)] * 2, "CS": [run(5, 1)] * 2, "LS": [run(5, 4)] * 2}},
        {"curves": {"none": [run(10, 5)] * 3, "CS": [run(5, 1)] * 3, "LS": [run(5, 1), run(5, 1), run(9, 4)]}},
        "holds only where the scaling is CS",
    ),
    "fig6": (
        {"values": {"batch 8": ROW, "depth 16": ROW}},
        {"values": {"batch 8": ROW, "depth 16": WORSE}},
        "holds only where the setting is batch 8",
    ),
    "fig7": (
        {"gates": [[0.7, 0.7, 0.5]] * 2},
        {"gates": [[0.72, 0.71, 0.70]] * 2},
        "holds only where the band is meant",
    ),
    "table1": ({"values": ROW}, {"values": WORSE}, "does not hold"),
    "table2": (
        {"values": {"LS": [3.0, 3.1], **OTHERS}},
        {"values": {"LS": [3.0, 3.1], **OTHERS, "IE": [2.9, 4.0]}},
        "holds only where " + "; or where ".join(f"LS against {name}" for name in list(OTHERS)[:-1]),
    ),
    "table3": (
        {"values": {"CS": [3.0, 3.1], "LS": [3.1, 3.2], **BLOCKS}},
        {"values": {"CS": [3.0, 3.1], "LS": [4.1, 4.2], **BLOCKS}},
        "holds only where the alternative is stable 0.1; or where the alternative is stable 0.3",
    ),
    "table4": (
        {"curves": {"CS": seeds(6.6, 6.7), "CS reversed": seeds(12.0, 12.1)}},
        {"curves": {"CS": seeds(6.6, 12.05), "CS reversed": seeds(12.0, 12.1)}},
        "does not hold",
    ),
    "beyond": (
        final(none=[5.0, 5.2], CS=[4.5, 4.6], LS=[4.4, 4.5], **{"skip-norm": [4.0, 4.1]}),
        final(none=[5.0, 5.2], CS=[4.5, 4.6], LS=[4.0, 4.5], **{"skip-norm": [4.1, 4.2]}),
        "holds only where the other is none; or where the other is CS",
    ),
    "regimes": (
        cells(none=["diverges"] * 6 + ["trains"], CS=["trains"] * 7, LS=["trains"] * 7),
        cells(none=["diverges"] * 6 + ["trains"], CS=["trains"] * 7, LS=["trains"] * 6 + ["never learns"]),
        "holds only where the scaling is CS",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_verdicts_flip_with_the_data(name):
    good, bad, verdict = FLIPS[name]
    judge = reproduction_named(name).judge
    assert judge(good).verdict == "holds"
    assert judge(bad).verdict == verdict


@pytest.mark.parametrize("name", NAMES)
def test_every_variant_is_a_run_that_can_be_made(name, tmp_path):
    what = reproduction_named(name)
    for plan in (what.small, what.full):
        for member in plan.members(tmp_path) if plan else []:
            parse_scaling(member.config.model.scaling)
    members = what.small.members(tmp_path) if what.small else []
    assert len({m.folder for m in members}) == len(members)
    if members and name != "regimes":  # which goes below depth 12 on purpose
        assert all(m.config.model.changes.get("num_layers", 12) >= 12 for m in members)
    assert not members or len({m.seed for m in members}) >= 3


def test_figures_that_need_the_same_runs_share_them(tmp_path):
    first, second = (reproduction_named(name).small.members(tmp_path) for name in ("table1", "fig1"))
    configs = {m.folder: m.config for m in second}
    assert all(configs[m.folder] == m.config for m in first)


def test_where_a_curve_comes_down_to_a_goal():
    assert fig5.first_reached([100, 200, 300], [10.0, 6.0, 2.0], 4.0) == 250
    assert fig5.first_reached([100, 200], [10.0, 6.0], 20.0) == 100
    assert fig5.first_reached([100, 200], [10.0, 6.0], 5.0) is None


def only_first(data):
    """The data of one seed: lists of seeds are the lists of variants, or those under "gates"."""
    if isinstance(data, list):
        return data[:1]
    return {key: only_first(value) if isinstance(value, (dict, list)) else value for key, value in data.items()}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("fig3a", "fig3b", "regimes")])
def test_one_seed_is_not_judged(name):
    """The first two have no seeds, and regimes counts cells."""
    assert reproduction_named(name).judge(only_first(FLIPS[name][0])).verdict == "not judged"


def test_a_scaling_that_is_early_and_ends_worse_is_not_ahead():
    curves = {"none": [run(10, 5)] * 2, "CS": [run(5, 5)] * 2, "LS": [run(5, 5), run(5, 6)]}
    ahead, lucky = fig5.judge({"curves": curves}).checks
    assert ahead.holds
    assert not lucky.holds
    assert lucky.found.endswith("2.00, 2.00; ends worse in 1 of 2")


def test_more_seeds_say_how_a_comparison_failed():
    apart, mixed = below({"A": [5, 6], "B": [1, 2]}, "A", "B"), below({"A": [1, 3], "B": [2, 4]}, "A", "B")
    assert (apart.holds, apart.found.rpartition("; ")[2]) == (False, "clearly the other way round")
    assert (mixed.holds, mixed.found.rpartition("; ")[2]) == (False, "the ranges overlap")


def test_luck_is_the_sign_flip_test():
    assert luck([1] * 5) == 1 / 32
    assert luck([-1] * 3) == luck([0, 0]) == 1
    binomial = scipy.stats.binomtest(9, 15, alternative="greater").pvalue
    assert luck([1] * 9 + [-1] * 6) == pytest.approx(binomial)
    balances = [3, -1, 2, 2, 0]
    flipped = [sum(s * b for s, b in zip(signs, balances, strict=True)) for signs in product((-1, 1), repeat=5)]
    assert luck(balances) == sum(total >= sum(balances) for total in flipped) / 32


def test_outcomes_of_a_loss_curve():
    falling = [1 / (1 + i / 10) for i in range(100)]
    assert regimes.outcome(falling, diverged=False) == "trains"
    assert regimes.outcome(falling, diverged=True) == "diverges"
    assert regimes.outcome([*falling, *[0.5] * 30, *falling[-30:]], diverged=False) == "spikes"
    assert regimes.outcome([*falling, *[1.0] * 30], diverged=False) == "diverges"
    assert regimes.outcome([1.0 - i / 1000 for i in range(100)], diverged=False) == "never learns"


def test_batches_of_large_noise_levels_are_no_spikes():
    """Losses of batches of 8 scatter like this with nothing wrong: single ones reach twice the median."""
    rng = np.random.default_rng(0)
    healthy = rng.gamma(0.8, 1, (200, 300, 8)).mean(2) * (0.15 + 0.6 * np.exp(-np.arange(300) / 30))
    assert (healthy[:, 100:].max(1) > 2 * np.median(healthy[:, 100:], 1)).mean() > 0.9
    found = [regimes.outcome(losses.tolist(), diverged=False) for losses in healthy]
    assert found.count("trains") >= 199


def test_not_a_number_is_a_divergence():
    assert regimes.outcome([1.0, float("nan")] * 30, diverged=False) == "diverges"


def test_who_diverges_is_never_ahead():
    inf = float("inf")
    curves = {"none": [run(9, 5), run(9, inf), run(9, inf)], "CS": [run(9, inf), run(9, inf), run(9, 8)]}
    assert fig5.speedups({"curves": curves}) == {"CS": [0.0, 0.0, inf]}


def test_data_with_a_diverged_run_is_written_read_and_drawn(tmp_path):
    inf = float("inf")
    what = reproduction_named("table1")
    write_data(tmp_path, {"measure": "pixel FID", "values": ROW | {"none": [5.0, inf], "1/√2": [inf, inf]}}, {})
    assert conclude(what, tmp_path).verdict == "holds"
    assert "2 diverged" in (tmp_path / "figure.svg").read_text()
    (tmp_path / "data.json").write_text('{"about": {}, "values": {"measure": "pixel FID", "values": {}}}')
    with pytest.raises(ValueError, match="not as scalelong reproduce table1 writes it now.*run that again"):
        conclude(what, tmp_path)


def test_an_unknown_name_gets_the_list():
    with pytest.raises(ValueError, match="there is no figure or table named 'fig9'; there is fig1, fig3a"):
        reproduction_named("fig9")


def test_figure_and_verdict_are_made_from_the_data_file(tmp_path):
    values = {"measure": "pixel FID", "values": ROW}
    write_data(tmp_path / "table1", values, {})
    arguments = ["reproduce", "table1", "--from-data", "--out", str(tmp_path), "--json"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert json.loads(result.stdout)["verdict"] == "holds"
    assert (tmp_path / "table1/figure.png").stat().st_size > 1000
    verdict = json.loads((tmp_path / "table1/verdict.json").read_text())
    assert verdict == json.loads(result.stdout)


def tiny(variants, **changes):
    plan = small(variants)
    settings = ("train.steps=4", "model.changes.hidden_size=16", "model.changes.num_layers=4", "train.log_every=2",
                "train.monitor_every=2", "train.sample_every=4", "train.checkpoint_every=4")  # fmt: skip
    plan = dataclasses.replace(plan, settings=(*plan.settings, *settings), seeds=(0,), **changes)
    return dataclasses.replace(plan, judging=Judging("pixels", 16, 2, 2))


@pytest.mark.slow
def test_a_sweep_goes_on_where_it_was_and_a_diverged_run_is_a_result(tmp_path):
    store = experiment.open_data(None)
    lost = Variant("lost", ("train.lr=1e30", "train.warmup_steps=0"))
    group = tiny([*scalings(["none", "LS"]), lost]).members(tmp_path)
    assert train_all(group[:1], store, 1)
    before = {f: f.stat().st_mtime_ns for f in group[0].folder.rglob("*") if f.is_file()}
    assert train_all(group, store, 2)
    assert all(map(is_done, group))
    assert {f: f.stat().st_mtime_ns for f in before} == before  # what was done was left alone
    assert divergence(group[2].folder)["step"] < 4
    gates = fig7.collect(folders_of(group[1:2]) | {"LS": [group[1].folder]}, store)["gates"]
    assert len(gates[0]) == 2
    assert all(0.3 < gate < 0.7 for gate in gates[0])
    data = reproduction_named("fig5").collect(folders_of(group[:2]), store)
    assert data["curves"]["none"][0]["steps"] == [2, 4]


def written_run(folder, rows, seed=0):
    """A run folder with this log."""
    config = to_dict(run_preset("digits"))
    config["train"]["seed"] = seed
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "environment.json").write_text("{}")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_the_map_of_regimes_names_its_seeds_and_has_room_for_all_of_them(tmp_path):
    rows = [{"step": step, "loss": 1 / step} for step in range(1, 61)]
    folders = {"none, 12, 1e-2, 8": [written_run(tmp_path / str(seed), rows, seed) for seed in range(3, 9)]}
    folders["none, 12, 3e-2, 8"] = folders["none, 12, 1e-2, 8"]
    data = regimes.collect(folders, None)
    assert [cell["seed"] for cell in data["cells"]] == [*range(3, 9)] * 2
    (place,) = regimes.draw(data).axes
    marks = [mark.get_offsets()[0][0] for mark in place.collections if len(mark.get_offsets())]
    assert len(set(marks)) == 12
    assert all(abs(x) < 0.45 for x in marks[:6])
    assert all(abs(x - 1) < 0.45 for x in marks[6:])


def test_a_scaling_that_spoils_most_cells_is_called_clearly_worse():
    many = cells(none=["trains"] * 8, CS=["diverges"] * 8, LS=["diverges"] * 4 + ["trains"] * 4)
    spoils, unclear = regimes.judge(many).checks
    assert spoils.found.endswith("by luck: 0.0039, clearly the other way round")
    assert unclear.found.endswith("spoils 4 of 8 others; by luck: 1")
    assert not spoils.holds
    assert not unclear.holds


def test_the_size_of_the_input_is_told_with_how_far_off_it_is_and_why(tmp_path):
    found = reproduction_named("fig3a").judge({"mean": 0.9, "data": "x"})
    assert found.checks[0].found == "0.9000, 10.3 % above 0.8163"
    found = reproduction_named("fig3a").judge({"mean": 0.8, "data": "x"})
    assert found.checks[0].found == "0.8000, 2.0 % below 0.8163"
    store = prepare(digits(), tmp_path / "digits")
    told = CliRunner().invoke(
        app,
        ["reproduce", "fig3a", "--data", str(store.folder), "--out", str(tmp_path / "out")],
        catch_exceptions=False,
    )
    assert "no   on scikit-learn digits: 0.92" in told.stdout  # which data it is about
    pixels = store.images[:] / 127.5 - 1.0
    mean_square = float(re.search(r"that of the data is (\d\.\d+)", told.stdout)[1])
    assert mean_square == pytest.approx((pixels**2).mean(), abs=0.005)
    assert told.stderr == ""  # there is nothing to train


COMMITTED = Path(__file__).parents[2] / "results" / "reproduce-small"


@pytest.mark.parametrize("name", NAMES)
def test_committed_verdicts_follow_from_committed_data(name):
    read = {part: json.loads((COMMITTED / name / f"{part}.json").read_text()) for part in ("data", "verdict")}
    found = reproduction_named(name).judge(read["data"]["values"])
    assert json.loads(json.dumps(found.as_dict())) == read["verdict"]


ENDED_BADLY = {"step": 6, "nonfinite": {"step": 5, "what": "loss", "culprit": "", "error": "step 5"}}


def lost_run(folder, rows=()):
    """A run that diverged at step 5, with what it had logged by then."""
    return written_run(folder, [*rows, ENDED_BADLY])


def test_features_of_a_run_that_diverged_are_not_small(tmp_path):
    rows = [{"step": 2, "signals": {"main norm/0": 9.0}}]
    small_ones = [{"step": 2, "signals": {"main norm/0": 1.0}}]
    folders = {}
    for name in ("none", "CS", "LS"):
        for depth in ("", ", depth 16"):
            runs = [tmp_path / f"{name}{depth}{seed}" for seed in (0, 1)]
            make = written_run if name == "none" else lost_run
            folders[name + depth] = [make(folder, rows if name == "none" else small_ones) for folder in runs]
    data = reproduction_named("fig1").collect(folders, None)
    found = reproduction_named("fig1").judge(data)
    assert found.verdict == "does not hold"
    assert found.checks[0].found.startswith("CS inf")


def test_runs_that_diverged_have_no_samples_and_no_gates(tmp_path):
    """Their weights are not even loaded: there is no checkpoint here."""
    lost = [lost_run(tmp_path / str(seed)) for seed in (0, 1)]
    store = prepare(digits(), tmp_path / "digits")
    inf = float("inf")
    noise = reproduction_named("fig3c").collect({"none": lost}, store)
    assert noise["curves"] == {"none": [[inf] * 4] * 2}
    held = {"curves": noise["curves"] | {"CS": [[2.0, 4.0]] * 2, "LS": [[2.0, 4.0], [inf, inf]]}}
    assert reproduction_named("fig3c").judge(held).verdict == "holds only where the scaling is CS"
    gates = fig7.collect({"LS": lost}, store)
    assert gates == {"gates": [None, None]}
    assert fig7.judge(gates).verdict == "does not hold"
    one_lost = fig7.judge({"gates": [[0.7, 0.7, 0.5], None]})
    assert one_lost.verdict == "does not hold"
    assert one_lost.checks[0].found.endswith("; 1 diverged")


def test_a_run_that_diverged_before_its_first_line_is_a_result(tmp_path):
    good = written_run(tmp_path / "good", [{"step": 2, "quality": {"pixel_fid": 7.0}}])
    lost = lost_run(tmp_path / "lost")
    assert final_quality({"none": [good], "CS": [lost]}, None)["values"] == {"none": [7.0], "CS": [float("inf")]}
    assert final_quality({"CS": [lost]}, None)["values"] == {"CS": [float("inf")]}
    (cell,) = regimes.collect({"none, 12, 1e-2, 8": [lost]}, None)["cells"]
    assert (cell["outcome"], cell["last loss"], cell["diverged at"]) == ("diverges", None, 5)


@pytest.mark.parametrize("name", ["fig1", "fig3c", "fig5", "fig7"])
def test_figures_with_diverged_runs_are_drawn(name, tmp_path):
    inf = float("inf")
    lost, mixed = {"none": [run(9, 5)] * 2, "CS": [run(9, inf)] * 2, "LS": [run(9, inf), run(9, 4)]}, [0.7, 0.6]
    noise = {"none": [[2.0, 3.0, 4.0, 5.0]] * 2, "CS": [[inf] * 4] * 2, "LS": [[inf] * 4, [2.0, 3.0, 4.0, 5.0]]}
    data = {
        "fig1": {"12": lost, "16": lost},
        "fig3c": {"measure": "pixel FID", "levels": [0.0, 0.1, 0.2, 0.4], "curves": noise},
        "fig5": {"measure": "pixel FID", "curves": lost | {"none": [run(9, inf), run(9, 5)]}},
        "fig7": {"gates": [None, mixed]},
    }
    write_data(tmp_path, data[name], {})
    conclude(reproduction_named(name), tmp_path)
    assert (tmp_path / "figure.png").stat().st_size > 1000


@pytest.mark.parametrize("dry", [["--dry-run"], []])
def test_what_has_no_full_size_is_told_before_anything_is_trained(dry, tmp_path, monkeypatch):
    store = prepare(digits(), tmp_path / "digits")
    asked = []
    monkeypatch.setattr(command, "_one", lambda what, *rest: asked.append(what.name))
    args = ["reproduce", "--full", "--data", str(store.folder), *dry]
    told = CliRunner().invoke(app, [*args, "all"], catch_exceptions=False)
    assert asked == [name for name in NAMES if name != "regimes"]
    assert "left out, as beyond the paper and without --full: regimes." in told.output
    asked.clear()
    with pytest.raises(ValueError, match="regimes: beyond the paper, and without --full; leave it out"):
        CliRunner().invoke(app, [*args, "fig1", "regimes"], catch_exceptions=False)
    assert asked == []


def test_a_run_that_diverged_after_a_good_start_ends_at_infinity(tmp_path):
    rows = [{"step": step, "quality": {"pixel_fid": value}} for step, value in ((2, 9.0), (4, 7.0))]
    written_run(tmp_path / "none", rows)
    lost_run(tmp_path / "CS", rows)
    found = final_quality({name: [tmp_path / name] for name in ("none", "CS")}, None)
    assert found["values"] == {"none": [7.0], "CS": [float("inf")]}


@pytest.mark.slow
def test_extra_noise_worsens_samples(tmp_path):
    store = experiment.open_data(None)
    group = tiny(scalings(["none"])).members(tmp_path)
    train_all(group, store, 1)
    what = reproduction_named("fig3c")
    write_data(tmp_path / "fig3c", what.collect(folders_of(group), store), {})
    (curve,) = json.loads((tmp_path / "fig3c/data.json").read_text())["values"]["curves"]["none"]
    assert len(curve) == 4
    assert curve[0] != curve[-1]


def test_a_folder_without_data_is_named(tmp_path):
    with pytest.raises(ValueError, match="has no data.json; scalelong reproduce fig1 makes it"):
        conclude(reproduction_named("fig1"), tmp_path)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("low", [[3.0, NAN, 3.1], [NAN, 3.0, 3.1], [3.0, 3.1, NAN]])
def test_what_is_no_number_decides_nothing(low):
    high = [4.0, 4.1, 4.2]
    for values in ({"CS": low, "none": high}, {"CS": high, "none": low}):
        check = below(values, "CS", "none")
        assert check.holds is None
        assert "1 of 6 are no numbers" in check.found


def test_a_curve_that_ends_in_no_number_is_never_ahead():
    plain, ruined = run(10.0, 8.0, 6.0, steps=(1, 2, 3)), run(10.0, 4.0, NAN, steps=(1, 2, 3))
    data = {"measure": "FID", "curves": {"none": [plain] * 2, "CS": [ruined] * 2, "LS": [plain] * 2}}
    assert fig5.speedups(data)["CS"] == [0.0, 0.0]
    assert not fig5.judge(data).checks[0].holds
    data["curves"] |= {"none": [ruined] * 2, "CS": [plain] * 2}
    assert fig5.speedups(data)["CS"] == [INF, INF]
    assert fig5.judge(data).checks[0].holds
    assert "∞ (2)" in [text.get_text() for text in fig5.draw(data).axes[1].texts]


def test_a_shut_gate_or_no_number_is_no_decay():
    for bad in ([0.5, 0.0, 0.3], [0.5, NAN, 0.3]):
        for gates in ([[0.5, 0.4, 0.3], bad], [bad, [0.5, 0.4, 0.3]]):
            assert fig7.judge({"gates": gates}).checks[0].holds is False
    assert fig3c.added([5.0, 6.0, NAN]) == fig3c.added([INF, INF]) == INF


def test_a_run_that_diverged_ends_in_a_cross_and_shortens_no_other(tmp_path):
    _, (axes,) = panels(1)
    whole, short = run(9.0, 5.0, 3.0, steps=(1, 2, 3)), run(9.0, INF, steps=(1, 2))
    draw_curves(axes, {"CS": [whole, short], "LS": [short]}, "FID")
    lines = [(line.get_linestyle(), line.get_marker(), list(line.get_xdata())) for line in axes.lines]
    assert lines[:3] == [("--", "None", [1]), ("None", "x", [1]), ("-", "None", [1, 2, 3])]
    told = [text.get_text() for text in axes.get_legend().get_texts()]
    assert told == ["CS (1 diverged)", "LS (1 diverged)"]


def test_a_number_that_was_not_to_be_had_on_the_way_is_a_gap_and_no_divergence():
    _, (axes,) = panels(1)
    draw_curves(axes, {"CS": [run(NAN, 5.0, 3.0, steps=(1, 2, 3)), run(9.0, 7.0, 5.0, steps=(1, 2, 3))]}, "FID")
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["CS"]
    (line,) = axes.lines
    np.testing.assert_array_equal(line.get_ydata(), [NAN, 6.0, 4.0])


def test_data_files_are_json_for_everybody(tmp_path):
    values = {"measure": "FID", "values": {"none": [1.0, NAN], "CS": [INF, 2.0]}}
    write_data(tmp_path, values, {"command": "x"})
    text = (tmp_path / "data.json").read_text()
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert found["values"]["values"]["CS"] == ["Infinity", 2.0]
    conclude(reproduction_named("table4"), write_curves(tmp_path / "t4"))
    json.loads((tmp_path / "t4" / "verdict.json").read_text(), parse_constant=lambda name: pytest.fail(name))


def write_curves(folder):
    curves = {name: [run(9.0, INF), run(9.0, 5.0)] for name in ("CS", "CS reversed")}
    write_data(folder, {"measure": "FID", "curves": curves}, {})
    return folder
