"""The page of one monitor's training, and of several."""

import html
import json
import re

import pytest
from typer.testing import CliRunner

from scalelong.cli.main import app
from scalelong.report.monitor import write_monitor_report, write_monitors_report
from scalelong.training.log import METRICS, WATCHED


def watched(folder, rows, model="Net, 10 parameters in training."):
    folder.mkdir(parents=True)
    about = {"model": model, "alarm_learns_steps": 150, "alarm_learnt_steps": 0}
    (folder / WATCHED).write_text(json.dumps(about))
    (folder / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def line(step, loss, norm=1.0, **more):
    more = {"alarm learnt": step} | more
    signals = {"skip norm/0": 5.0, "skip norm/1": norm, "update/a": 0.1, "output/a": 1.0}
    return {"step": step, "loss": loss, "gradient norm": norm, "weight norm": 3.0, "signals": signals, **more}


ALARM = {"step": 180, "signal": "update", "layer": "a", "factor": 3.0, "score": 9.0, "others": []}


def test_what_cannot_be_told_yet_is_a_dash(tmp_path):
    row = {"step": 2, "loss": 0.5, "gradient norm": 1.5, "seconds_per_step": 0.01, "alarm learnt": 2}
    write_monitor_report(watched(tmp_path / "run", [row]), tmp_path / "page.html", "a command")
    page = (tmp_path / "page.html").read_text()
    assert "2 steps, 10 ms each. Loss 0.5, gradient norm 1.5, its oscillation index – (" in page
    assert "nan" not in page
    assert "None could ring: the alarm learns what is usual in its first 150 steps, and saw 2." in page


@pytest.mark.parametrize(("last", "learnt", "rings"), [(150, 150, False), (151, 151, True), (1051, 60, False)])
def test_no_alarm_is_good_news_only_where_one_could_ring(tmp_path, last, learnt, rings):
    folder = watched(tmp_path / "run", [line(last, 0.5, **{"alarm learnt": learnt})])
    write_monitor_report(folder, tmp_path / "page.html", "a command")
    assert ("None could ring" not in (tmp_path / "page.html").read_text()) is rings


def test_trainings_are_drawn_over_each_other(tmp_path):
    plain = watched(tmp_path / "plain", [line(step, 0.5) for step in (50, 100)])
    scaled = watched(
        tmp_path / "ls",
        [*(line(step, 0.25, 2.0) for step in (50, 100, 200)), {"step": 180, "alarm": ALARM}],
        "Net, LS.",
    )
    rows = write_monitors_report([plain, scaled], tmp_path / "page.html", "a command")
    assert [(row["training"], row["step"], row["loss"], row["alarms"]) for row in rows] == [
        ("plain", "100", "0.5", "none could ring yet"),
        ("ls", "200", "0.25", "1"),
    ]
    page = html.unescape((tmp_path / "page.html").read_text())
    headings = re.findall("<h2>(.*?)</h2>", page)
    assert headings == [
        "Alarms", "Loss", "Gradient norm", "Weight norm", "Feature norms at the skips", "Updates: plain",
        "Updates: ls", "Outputs: plain", "Outputs: ls", "How it was made",
    ]  # fmt: skip
    loss = page.split("<h2>Loss")[1].split("<h2>")[0]
    assert ">plain</text>" in loss
    assert ">ls</text>" in loss
    assert "update of a at 3 times its usual value" in page
    assert "Net, LS." in page


def test_noise_levels_stand_in_their_order_whichever_was_seen_first(tmp_path):
    names = ["900 to 1000", "0 to 100", "300 to 400"]
    rows = [line(step, 0.5, **{"loss by noise": {name: 1.0}}) for step, name in enumerate(names, 1)]
    write_monitor_report(watched(tmp_path / "run", rows), tmp_path / "page.html", "a command")
    page = (tmp_path / "page.html").read_text()
    places = [page.index(f">{name}</text>") for name in ("0 to 100", "300 to 400", "900 to 1000")]
    assert places == sorted(places)


def test_trainings_of_one_name_are_told_apart(tmp_path):
    folders = [watched(tmp_path / name / "monitor", [line(50, 0.5)]) for name in ("none", "ls")]
    rows = write_monitors_report(folders, tmp_path / "page.html", "a command")
    assert [row["training"] for row in rows] == ["none/monitor", "ls/monitor"]
    with pytest.raises(ValueError, match="each training once"):
        write_monitors_report([folders[0], folders[0]], tmp_path / "other.html", "a command")
    assert not (tmp_path / "other.html").exists()


def test_the_command_draws_what_a_killed_loop_has_left(tmp_path):
    killed = watched(tmp_path / "killed", [line(50, 0.5)])
    other = watched(tmp_path / "other", [line(50, 0.25)])
    out = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["report", str(killed), "--out", str(out)], catch_exceptions=False)
    assert result.exit_code == 0
    assert "Stability of killed" in out.read_text()
    command = ["report", str(killed), str(other), "--out", str(out), "--json"]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert [row["loss"] for row in json.loads(result.stdout)["rows"]] == ["0.5", "0.25"]
    (tmp_path / "run").mkdir()
    for more, says in (
        ([str(tmp_path / "run")], "Ask for two pages"),
        (["--theory", "x.json"], "--theory is added"),
    ):
        refused = CliRunner().invoke(app, ["report", str(killed), *more])
        assert says in str(refused.exception)
