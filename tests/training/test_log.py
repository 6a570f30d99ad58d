"""metrics.jsonl: what is written comes back, and any JSON parser takes it."""

import json
import math
import shutil
import subprocess

import pytest

from scalelong.report.monitor import write_monitor_report
from scalelong.training.log import WATCHED, RunLog, commit_of, environment, read_metrics

ROW = {
    "loss": math.nan,
    "signals": {"a": math.inf, "b": -math.inf, "c": 1.5, "name": "NaNny"},
    "list": [1, math.nan],
}


def strict(line):
    """As parsers do that keep to the standard."""

    def refuse(name):
        raise ValueError(name)

    return json.loads(line, parse_constant=refuse)


def test_numbers_that_are_not_finite_are_strict_json_and_come_back(tmp_path):
    for resumed_at in (0, 2):
        with RunLog(tmp_path, resumed_at, logger="none") as log:
            log.write(resumed_at + 1, **ROW)
            log.write(resumed_at + 2, loss=1.0)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [strict(line)["loss"] for line in lines] == ["NaN", 1.0] * 2
    assert strict(lines[0])["signals"] == {"a": "Infinity", "b": "-Infinity", "c": 1.5, "name": "NaNny"}
    rows = read_metrics(tmp_path)
    for row in (rows[0], rows[2]):
        assert math.isnan(row["loss"])
        assert row["signals"] == ROW["signals"]
        assert math.isnan(row["list"][1])
    assert rows[1] == {"step": 2, "loss": 1.0}


def test_logs_with_bare_names_of_such_numbers_are_read_as_well(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": NaN}\n{"step": 2, "loss": -Infinity}\n{"step": 3, "lo'
    )
    first, second = read_metrics(tmp_path)
    assert math.isnan(first["loss"])
    assert second["loss"] == -math.inf


@pytest.mark.parametrize(
    ("called", "kept"),
    [
        ("/home/me/.venv/bin/scalelong", "scalelong"),
        ("/home/me/.venv/bin/torchrun", "torchrun"),
        ("/src/benchmarks/throughput.py", "throughput.py"),  # python -m makes it whole
        ("/src/scalelong/__main__.py", "scalelong"),
        ("examples/mine.py", "examples/mine.py"),
    ],
)
def test_the_command_is_kept_without_where_it_lies(called, kept, monkeypatch):
    monkeypatch.setattr("sys.argv", [called, "train", "--out", "runs/a"])
    assert environment()["command"] == [kept, "train", "--out", "runs/a"]


def test_a_tracker_gets_the_numbers_themselves(tmp_path):
    got = []
    with RunLog(tmp_path, logger="none") as log:
        log.trackers = [type("T", (), {"log": lambda _, step, n: got.append(n), "close": lambda _, failed: None})()]
        log.write(1, **ROW)
    assert got[0]["signals/a"] == math.inf
    assert math.isnan(got[0]["loss"])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_report_is_drawn_of_a_log_with_them(tmp_path, bad):
    with RunLog(tmp_path, logger="none") as log:
        for step in (1, 2, 3):
            more = {"gradient norm": bad if step == 2 else 1.0, "seconds_per_step": 0.1}
            log.write(step, loss=bad if step == 2 else 1.0, signals={"output/a": bad, "skip norm/0": 1.0}, **more)
        log.write(3, alarm={"step": 3, "signal": "loss", "layer": "", "factor": bad, "score": 9.0, "others": []})
    about = {"model": "A model.", "alarm_learns_steps": 60, "alarm_learnt_steps": 3}
    (tmp_path / WATCHED).write_text(json.dumps(about))
    write_monitor_report(tmp_path, tmp_path / "report.html", "StabilityMonitor(model)")
    page = (tmp_path / "report.html").read_text()
    assert f"loss at {bad:.3g} times" in page


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_is_that_of_the_code_and_says_when_it_was_changed(tmp_path):
    def git(*arguments):
        name = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
        run = subprocess.run(["git", "-C", tmp_path, *name, *arguments], capture_output=True, text=True, check=True)
        return run.stdout.strip()

    package, installed = tmp_path / "src", tmp_path / ".venv"
    for folder in (package, installed):
        folder.mkdir()
        (folder / "__init__.py").write_text("a = 1\n")
    assert commit_of(package) is None
    git("init")
    git("add", "src")
    git("commit", "-m", "first")
    assert commit_of(package) == git("rev-parse", "HEAD")
    assert commit_of(installed) is None  # in the repository's folder, and no part of it
    (tmp_path / "notes").write_text("no code")
    assert commit_of(package) == git("rev-parse", "HEAD")
    (package / "new.py").write_text("b = 2\n")
    assert commit_of(package) == git("rev-parse", "HEAD") + "-dirty"
    (package / "new.py").unlink()
    (package / "__init__.py").write_text("a = 2\n")
    assert commit_of(package) == git("rev-parse", "HEAD") + "-dirty"
