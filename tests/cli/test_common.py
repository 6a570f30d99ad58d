"""How far a command is: a bar that fits into a terminal, plain lines where there is none."""

import io
import json
import re
import sys
import time
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from scalelong.cli import lines, main
from scalelong.cli.common import bars_on, print_result, progress_bar, say_cpu, tracked
from scalelong.cli.lines import ProgressLines, in_words
from scalelong.config import with_overrides
from scalelong.presets import run_preset


@pytest.mark.parametrize("description", ["training cifar10-uvit-s-deep uniform:0.707", "cs:0.7 seed 0"])
def test_a_bar_in_80_columns_keeps_its_numbers(description):
    stream = io.StringIO()
    bar = bars_on(Console(file=stream, width=80, force_terminal=True, color_system=None))
    bar.add_task(description, total=300_000, completed=21, note="loss 0.1234, 1,234 images/s")
    bar.print(bar.get_renderable())
    line = stream.getvalue()
    for whole in ("21/300000", "loss 0.1234, 1,234 images/s", "0:00:00", "left -:--:--", description[:5]):
        assert whole in line


class Told:
    """A clock to turn, and what was said."""

    def __init__(self):
        self.seconds, self.lines = 0.0, []

    def bar(self, **how):
        return ProgressLines(clock=lambda: self.seconds, say=self.lines.append, **how)


def test_without_a_terminal_a_long_task_speaks_while_it_waits():
    told = Told()
    with told.bar(every_s=0.01) as bar:
        task = bar.add_task("training digits none", total=600, note="")
        bar.update(task, completed=100)  # of a run that goes on
        told.seconds = 120.0
        bar.update(task, completed=200, note="loss 0.1")
        for _ in range(500):
            if told.lines[-1:] == ["training digits none: 200 of 600, loss 0.1, after 2 min, about 8 min left"]:
                break
            time.sleep(0.01)
        else:
            pytest.fail(f"nothing was said for five seconds but {told.lines}")
        assert bar.tasks[0].speed == pytest.approx(100 / 120)


def test_the_time_left_leaves_out_what_comes_before_the_first_step():
    told = Told()
    with told.bar() as bar:
        task = bar.add_task("training digits none", total=101, note="")
        told.seconds = 60.0  # compiling
        bar.update(task, completed=1)
        told.seconds = 70.0
        bar.update(task, completed=51)
    assert told.lines == ["training digits none: 51 of 101, after 1 min, about 10 s left"]


def test_before_a_task_is_known_nothing_is_said_and_one_may_begin_half_done():
    told = Told()
    with told.bar():
        pass
    assert told.lines == []
    with told.bar() as bar:
        task = bar.add_task("training digits none", total=100, completed=40, note="")
        told.seconds = 60.0
        assert told.lines == []
        bar.update(task, completed=41)
        told.seconds = 70.0
        bar.update(task, completed=51)
    assert told.lines == ["training digits none: 51 of 100, after 1 min, about 49 s left"]
    with told.bar() as bar:
        bar.add_task("training digits none", total=100, completed=40, note="")
    assert told.lines[1:] == ["training digits none: 40 of 100, after 0 s"]


def test_every_run_that_ends_is_told_once():
    told = Told()
    with told.bar() as bar:
        tasks = [bar.add_task(f"run {i}", total=10, note="waits") for i in range(2)]
        for task in tasks:
            bar.update(task, completed=0)
        told.seconds = 40.0
        for task in (tasks[0], tasks[0], tasks[1]):
            bar.update(task, completed=10, note="loss 1")
    assert told.lines == [
        "1 of 2 runs done, 10 of 20 steps, after 40 s, about 40 s left",
        "2 of 2 runs done, 20 of 20 steps, after 40 s",
    ]


def test_short_work_says_one_line_and_what_vanishes_none(monkeypatch, capsys):
    assert not sys.stderr.isatty()
    assert list(tracked(iter("ab"), 2, "sampling")) == ["a", "b"]
    with progress_bar(transient=True) as bar:
        bar.add_task("theory", total=6, note="")
    assert capsys.readouterr().err == "sampling: 2 of 2, after 0 s\n"


def test_work_of_unknown_length_is_told_without_a_count():
    told = Told()
    with told.bar() as bar:
        bar.add_task("calibrating", total=None, note="")
    assert told.lines == ["calibrating, after 0 s"]


def test_the_other_processes_say_nothing(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    list(tracked(iter("ab"), 2, "sampling"))
    assert capsys.readouterr().err == ""


def test_half_a_minute_and_words_for_times():
    assert lines.EVERY_S == 30
    times = (0.4, 59, 130, 4000, 71.5 * 3600, 300_000)
    assert [in_words(s) for s in times] == ["0 s", "59 s", "2 min", "1 h 7 min", "71 h 30 min", "3 days"]


def test_a_warning_from_two_lines_is_shown_once(capsys):
    show = main._shown_once()
    for line, sentence in enumerate(("much", "much", "else")):
        show(UserWarning(sentence), UserWarning, "file.py", line)
    assert capsys.readouterr().err == "warning: much\nwarning: else\n"


def test_what_a_cpu_needs_days_for_is_told(capsys, monkeypatch):
    """By the published count of U-ViT-XS, 11.1 M weights: 19.6 GFLOP an image trained."""
    config = with_overrides(run_preset("cifar10-uvit-xs"), ["train.steps=20000"])
    changes = {**config.model.changes, "sample_size": 32, "in_channels": 3}
    config = replace(config, model=replace(config.model, changes=changes))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    say_cpu(config, "cpu")
    days = 20_000 * 128 * 19.6e9 / 8e10 / 3600 / 24
    found = re.search(r"on a CPU, with 2 threads, 20,000 steps .* about (\d+) days", capsys.readouterr().err)
    assert int(found[1]) == pytest.approx(days, abs=0.5)
    say_cpu(config, "cuda")
    say_cpu(with_overrides(config, ["train.steps=20"]), "cpu")
    assert capsys.readouterr().err == ""


def test_json_is_json_for_everybody(capsys):
    print_result({"loss": float("nan"), "rows": [{"x": float("inf")}]}, True, "")
    found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert found == {"loss": "NaN", "rows": [{"x": "Infinity"}]}
