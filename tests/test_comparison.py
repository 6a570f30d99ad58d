"""A real, very small comparison, and the page that it ends in."""

import html
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import scalelong
from scalelong import experiment
from scalelong.cli import main
from scalelong.cli.main import app
from scalelong.comparison import (
    DIGITS_SETTINGS,
    SCALINGS,
    SEEDS,
    Judging,
    members,
    run_all,
    run_one,
    train_or_record,
)
from scalelong.config import with_overrides
from scalelong.data.prepare import prepare
from scalelong.data.sources import open_source
from scalelong.presets import run_preset
from scalelong.report.runs import read_run
from scalelong.training.log import divergence, read_metrics
from scalelong.training.step import Stepper
from tests.test_held_out import made

SETTINGS = [
    "train.steps=6",
    "train.sample_every=3",
    "train.log_every=1",
    "train.monitor_every=1",
    "model.changes.hidden_size=32",
    "model.changes.num_layers=4",
    "train.batch_size=8",
]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    out, unseen = folder / "out", made(folder / "unseen").folder
    args = ["compare", "--out", str(out), "--scalings", "none,cs:0.7,ls", "--seeds", "0,1", "--json"]
    args += ["--evaluate-num", "64", "--held-out", str(unseen)]
    for setting in SETTINGS:
        args += ["--set", setting]
    result = CliRunner().invoke(app, args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "6 of 6 runs done, 36 of 36 steps" in result.stderr  # no terminal here
    return out, json.loads(result.stdout), args


def test_the_default_is_what_the_demo_promises():
    base = with_overrides(run_preset("digits"), DIGITS_SETTINGS)
    group = members(base, SCALINGS, SEEDS, Path("x"))
    assert {m.scaling for m in group} == {"none", "1/sqrt2", "cs:0.7", "ls"}
    assert len({m.seed for m in group}) >= 2
    assert len({m.folder for m in group}) == 8
    with_depth = experiment.build_model(with_overrides(base, ["model.changes.in_channels=1"]))
    assert len(with_depth.out_blocks) == 6  # depth 12: with one skip cs would be none


def test_runs_of_a_seed_differ_in_their_scaling_alone(compared):
    out, _, _ = compared
    configs = [json.loads((out / name / "config.json").read_text()) for name in ("none-seed0", "cs-0.7-seed0")]
    for config in configs:
        config["model"].pop("scaling")
    assert configs[0] == configs[1]
    first = [read_run(out / name).series("loss")[1][0] for name in ("none-seed0", "cs-0.7-seed0", "none-seed1")]
    assert abs(first[0] - first[1]) < 0.05  # the same images, times and noise
    assert first[0] != first[2]


def test_the_table_has_a_row_per_scaling_with_its_spread(compared):
    _, result, _ = compared
    assert [row["scaling"] for row in result["rows"]] == ["none", "cs:0.7", "ls"]
    for row in result["rows"]:
        assert row["seeds"] == "2"
        assert re.fullmatch(r"\S+ ± \S+", row["pixel FID"])


def test_what_the_comparison_shows_is_said(compared):
    out, result, _ = compared
    assert re.match("Seen, but not shown: |No difference to none in held-out loss", result["finding"])
    assert result["finding"] in html.unescape((out / "report.html").read_text())


def test_held_out_losses_are_compared_seed_by_seed(compared):
    out, result, _ = compared
    rows = {row["scaling"]: row for row in result["rows"]}
    assert rows["none"]["minus none's"] == "–"
    last = {
        name: [read_metrics(out / f"{name}-seed{seed}")[-1]["held out"]["loss"] for seed in (0, 1)]
        for name in ("none", "cs-0.7")
    }
    differences = [cs - none for cs, none in zip(last["cs-0.7"], last["none"], strict=True)]
    assert rows["cs:0.7"]["minus none's"].split()[0] == f"{sum(differences) / 2:.2g}"
    page = html.unescape((out / "report.html").read_text())
    where = page.split("<h2>Where in the process")[1].split("<h2>")[0]
    assert re.search("stretches differ from none's beyond|Beyond the spread over 2 seeds, the loss against", where)


def test_the_page_is_whole_and_needs_nothing_from_outside(compared):
    out, _, _ = compared
    page = (out / "report.html").read_text()
    for heading in ("Loss", "Quality against steps", "Feature norms", "Gradient norms", "Coefficients", "Samples"):
        assert f"<h2>{heading}" in page
    assert page.count("<svg") == 9
    assert page.count("data:image/png;base64,") == 6
    assert "What this can and cannot show" in page
    assert "scalelong" in page.split("How it was made")[1]
    outside = re.findall(r'(?:src|href)="(?!data:|#)([^"]+)', page)
    assert not outside
    assert "<script" not in page


@pytest.mark.slow
def test_a_model_of_ones_own_is_compared(tmp_path):
    """Its arguments decide the network, its weights are where every run begins."""
    scalelong.UViT(
        sample_size=8, patch_size=4, in_channels=1, hidden_size=32, num_layers=4, num_attention_heads=2
    ).save_pretrained(tmp_path / "mine")
    data = prepare(open_source("digits"), tmp_path / "data").folder
    base = with_overrides(run_preset("digits"), ["train.steps=1", "train.lr=1e-30", "train.batch_size=4"])
    group = members(
        base, ["none", "cs:0.7"], [0, 1], tmp_path / "out", Judging(features="none"), str(tmp_path / "mine")
    )
    assert {m.config.model.changes["hidden_size"] for m in group} == {32}
    member = group[1]
    assert run_one(member, data)
    run = experiment.load_run(member.folder)  # its averages: of weights that did not move
    weights = scalelong.UViT.from_pretrained(tmp_path / "mine").state_dict()
    found = run.model.state_dict()
    assert all(torch.allclose(found[name], weight, atol=1e-20) for name, weight in weights.items())  # 0 has moved
    assert run.config.model.scaling == "cs:0.7"
    args = ["compare", "digits", "--data", str(data), "--init", str(tmp_path / "mine"), "--dry-run"]
    output = CliRunner().invoke(app, [*args, "--out", str(tmp_path / "o")], catch_exceptions=False).output
    assert '"hidden_size": 32' in output
    assert "begun with the weights of" in output


def test_a_comparison_does_not_begin_with_weights_that_have_a_scaling(tmp_path):
    model = scalelong.UViT(sample_size=8, hidden_size=32, num_layers=4, num_attention_heads=2, scaling="ls")
    model.save_pretrained(tmp_path / "mine")
    with pytest.raises(ValueError, match="varies the scaling, and .*mine was trained with its own, 'ls'; give"):
        members(run_preset("digits"), ["none"], [0], tmp_path, init=str(tmp_path / "mine"))


def test_a_finished_comparison_is_not_trained_again(compared):
    out, _, args = compared
    before = {f: f.stat().st_mtime_ns for f in out.rglob("*.safetensors")}
    result = CliRunner().invoke(app, args, catch_exceptions=False)
    assert result.exit_code == 0
    assert {f: f.stat().st_mtime_ns for f in out.rglob("*.safetensors")} == before
    assert "has other runs too" not in result.stderr


def test_runs_of_a_larger_comparison_in_the_folder_are_pointed_to(compared, tmp_path):
    out, _, args = compared
    mine = tmp_path / "out"
    shutil.copytree(out, mine)
    fewer = [{str(out): str(mine), "none,cs:0.7,ls": "none,ls"}.get(arg, arg) for arg in args]
    result = CliRunner().invoke(app, fewer, catch_exceptions=False)
    assert (
        f"{mine} has other runs too, cs-0.7-seed0, cs-0.7-seed1: for a page of all, scalelong report"
        in result.stderr
    )


def test_report_reads_run_folders(compared, tmp_path):
    out, _, _ = compared
    page = tmp_path / "page.html"
    runs = [str(out / "none-seed0"), str(out / "ls-seed0")]
    result = CliRunner().invoke(app, ["report", *runs, "--out", str(page)], catch_exceptions=False)
    assert result.exit_code == 0
    assert "none" in result.stdout
    assert page.read_text().count("data:image/png") == 2


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["compare", "--seeds", "a"], "whole numbers separated by commas, such as 0,1; got 'a'"),
        (["compare", "--scalings", ","], "--scalings needs at least one entry"),
        (["compare", "--scalings", "cs:9"], "κ lies in"),
        (["compare", "--scalings", "ls,cs:0.7,ls"], "each scaling and seed once, got ls with seed 0 twice"),
        (["compare", "--set", "model.scaling=ls"], "choose it with --scalings, got --set model.scaling=ls"),
        (["compare", "--set", "train.seed=3"], "choose it with --seeds, got --set train.seed=3"),
        (["compare", "--out", __file__], "is a file; --out is a folder for the runs and their report"),
        (
            ["report", "nowhere"],
            "nowhere is no run folder: it has no config.json. scalelong train RECIPE --out nowhere makes one.",
        ),
    ],
)
def test_bad_usage_exits_2_with_a_sentence(args, says, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["scalelong", *args])
    with pytest.raises(SystemExit) as stopped:
        main.main()
    assert stopped.value.code == 2
    assert says in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


def test_a_run_that_diverges_is_named_and_exits_1(monkeypatch, capsys, tmp_path):
    settings = [x for s in (*SETTINGS, "train.lr=1e30", "train.warmup_steps=0") for x in ("--set", s)]
    args = ["compare", "--out", str(tmp_path / "out"), "--scalings", "none", "--seeds", "0", *settings]
    monkeypatch.setattr(sys, "argv", ["scalelong", *args])
    with pytest.raises(SystemExit) as stopped:
        main.main()
    assert stopped.value.code == 1
    error = " ".join(capsys.readouterr().err.split())
    assert "is not finite; the first module with a non-finite" in error
    assert "Traceback" not in error


def beat(member, folder):
    """What a worker does in place of training: it writes for a minute."""
    for _ in range(600):
        with (folder / "beats").open("a") as file:
            file.write(".")
        time.sleep(0.1)
    return True


@pytest.mark.slow
def test_workers_end_when_the_comparison_is_killed(tmp_path):
    """The same command then starts workers of its own in the same folders."""
    beats = tmp_path / "beats"
    code = "import sys; from pathlib import Path; from scalelong.comparison import run_all; "
    code += "from tests.test_comparison import beat; "
    code += "run_all([None, None], Path(sys.argv[1]), workers=1, watch=lambda done: None, run=beat)"
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parents[1])
    try:
        for _ in range(600):
            if beats.exists():
                break
            time.sleep(0.1)
        assert beats.exists()
    finally:
        parent.kill()
        parent.wait()
    time.sleep(2)
    written = beats.stat().st_size
    time.sleep(1)
    assert beats.stat().st_size == written


def stop_at_once(member, folder):
    """As a run that Ctrl-C reached: the terminal sends it to all."""
    (folder / str(member)).touch()
    if member == 0:
        os.kill(multiprocessing.parent_process().pid, signal.SIGINT)
        time.sleep(1)
    return member != 0


def test_ctrl_c_begins_no_other_run(tmp_path):
    """The pool has more than it works on in a queue of its own, which cannot be called back."""
    done = run_all([0, 1, 2, 3], tmp_path, workers=1, watch=lambda done: None, run=stop_at_once)
    assert done == [False] * 4
    assert [file.name for file in tmp_path.iterdir()] == ["0"]


def wait_to_be_told(member, folder):
    """As a run whose process alone is not told of Ctrl-C, or of a scheduler's end."""
    told = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    (folder / "ready").touch()
    for _ in range(200):
        if told:
            (folder / "saved").touch()
            return False
        time.sleep(0.1)
    return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_runs_are_told_when_the_comparison_alone_is(tmp_path, number):
    def end_it():
        while not (tmp_path / "ready").exists():
            time.sleep(0.1)
        os.kill(os.getpid(), number)

    before = signal.getsignal(signal.SIGTERM)
    threading.Thread(target=end_it, daemon=True).start()
    assert run_all([0, 1], tmp_path, workers=1, watch=lambda done: None, run=wait_to_be_told) == [False, False]
    assert (tmp_path / "saved").exists()
    assert signal.getsignal(signal.SIGTERM) is before


def be_interrupted(member, folder):
    """As a run that Ctrl-C reached while its process was starting."""
    os.kill(multiprocessing.parent_process().pid, signal.SIGINT)
    raise KeyboardInterrupt


def die_of_it(member, folder):
    """Before it could say so."""
    os.kill(multiprocessing.parent_process().pid, signal.SIGINT)
    time.sleep(1)
    os._exit(1)


@pytest.mark.parametrize("run", [be_interrupted, die_of_it])
def test_a_run_that_ctrl_c_met_as_it_began_was_not_done(tmp_path, run):
    assert run_all([0, 1], tmp_path, workers=1, watch=lambda done: None, run=run) == [False, False]


def die(member, folder):
    os._exit(1)


def test_a_process_that_died_of_itself_is_no_interruption(tmp_path):
    with pytest.raises(BrokenProcessPool):
        run_all([0], tmp_path, workers=1, watch=lambda done: None, run=die)


def test_runs_that_diverged_are_said_and_the_others_are_reported(compared, tmp_path, capsys, monkeypatch):
    out, _, args = compared
    mine = tmp_path / "out"
    shutil.copytree(out, mine)
    args = [str(mine) if arg == str(out) else arg for arg in args]
    bad = {"step": 2, "what": "loss", "culprit": "x", "error": "step 2: NaN"}

    def ruin(folder):
        with (folder / "metrics.jsonl").open("a") as log:
            log.write(json.dumps({"step": 3, "nonfinite": bad}) + "\n")

    for seed in (0, 1):
        ruin(mine / f"ls-seed{seed}")
    found = json.loads(CliRunner().invoke(app, args, catch_exceptions=False).stdout)
    assert found["diverged"] == [f"ls with seed {seed} diverged: step 2: NaN" for seed in (0, 1)]
    assert [row["scaling"] for row in found["rows"]] == ["none", "cs:0.7"]
    assert found["diverged"][1] in html.unescape((mine / "report.html").read_text())
    for folder in mine.glob("*-seed*"):
        ruin(folder)
    monkeypatch.setattr(sys, "argv", ["scalelong", *args])
    with pytest.raises(SystemExit):
        main.main()
    assert "Every run diverged" in capsys.readouterr().err


def test_that_a_run_diverged_is_written_into_its_folder(tmp_path, monkeypatch):
    (member,) = members(with_overrides(run_preset("digits"), SETTINGS), ["none"], [0], tmp_path, None)
    plain = Stepper._loss
    monkeypatch.setattr(Stepper, "_loss", lambda self, *args: plain(self, *args) * float("nan"))
    data = experiment.open_data(None).folder
    assert train_or_record(member, data)
    assert divergence(member.folder)["error"].startswith("step 0: the loss is not finite")
    assert read_run(member.folder).divergence.startswith("step 0: the loss is not finite")
    monkeypatch.setattr(experiment, "train", lambda *args, **how: pytest.fail("it would diverge again"))
    assert train_or_record(member, data)
