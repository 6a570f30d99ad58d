"""Progress where no terminal is, in a log or in CI: a plain line now and then instead of a bar."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import typer

EVERY_S = 30.0


@dataclass
class LineTask:
    """What there is to do, and how much of it is done; `total` is None where nobody can tell."""

    description: str
    total: float | None
    note: str
    completed: float = 0.0
    first: float | None = None  # what was done before: a run that goes on is no faster for it
    since_s: float = 0.0
    speed: float | None = None  # as a bar has it: per second


class ProgressLines:
    """Takes what a rich bar takes. It speaks every half minute, when one of several runs is done, and at the end.

    The clock is asked in a thread of its own: a step may take longer than half a minute.
    """

    def __init__(
        self,
        *,
        last_line: bool = True,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = lambda line: typer.echo(line, err=True),
    ) -> None:
        self.tasks: list[LineTask] = []
        self.last_line, self.every_s, self.clock, self.say = last_line, every_s, clock, say
        self.began_s, self.said = clock(), ""
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._speak_now_and_then, daemon=True)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.ended.set()
        self.thread.join()
        if self.last_line:
            self._speak()

    def add_task(self, description: str, total: float | None, note: str = "", completed: float = 0.0) -> int:
        """The number of the new task, so much of which is done already."""
        self.tasks.append(LineTask(description, total, note, completed, since_s=self.clock()))
        return len(self.tasks) - 1

    def update(self, task: int, *, completed: float | None = None, note: str | None = None) -> None:
        """Note how far a task is."""
        it = self.tasks[task]
        was_done = _is_done(it)
        it.note = it.note if note is None else note
        if completed is not None:
            if it.first is None:
                it.first, it.since_s = completed, self.clock()
            it.completed = completed
            it.speed = (completed - it.first) / max(self.clock() - it.since_s, 1e-9)
        if len(self.tasks) > 1 and _is_done(it) and not was_done:
            self._speak()

    def advance(self, task: int, by: float = 1.0) -> None:
        """Note that so much more of a task is done."""
        it = self.tasks[task]
        it.first = it.first or 0.0
        self.update(task, completed=it.completed + by)

    def _speak_now_and_then(self) -> None:
        while not self.ended.wait(self.every_s):
            self._speak()

    def _speak(self) -> None:
        if not self.tasks:
            return
        what = _how_far(self.tasks)
        if what != self.said or not self.ended.is_set():  # the end does not repeat what the last run to end said
            now_s = self.clock()
            parts = [what, f"after {in_words(now_s - self.began_s)}", _left(self.tasks, now_s)]
            self.say(", ".join(part for part in parts if part))
        self.said = what


def _how_far(tasks: list[LineTask]) -> str:
    """Of one task its own words; several are runs, of which the sums are told."""
    if len(tasks) > 1:
        return f"{sum(map(_is_done, tasks))} of {len(tasks)} runs done, {_counted(tasks)} steps"
    counted = "" if tasks[0].total is None else f": {_counted(tasks)}"
    return f"{tasks[0].description}{counted}" + (f", {tasks[0].note}" if tasks[0].note else "")


def _counted(tasks: list[LineTask]) -> str:
    return f"{sum(t.completed for t in tasks):,.0f} of {sum(t.total or 0 for t in tasks):,.0f}"


def _left(tasks: list[LineTask], now_s: float) -> str:
    """At the mean pace since the first step was done; nothing before there is one, or when all is done."""
    begun = [t for t in tasks if t.first is not None]
    done = sum(t.completed - (t.first or 0.0) for t in begun)
    left = sum((t.total or 0.0) - t.completed for t in tasks)
    if done <= 0 or left <= 0:
        return ""
    return f"about {in_words((now_s - min(t.since_s for t in begun)) * left / done)} left"


def _is_done(task: LineTask) -> bool:
    return task.total is not None and task.completed >= task.total


def in_words(seconds: float) -> str:
    """A time as people say it.

    >>> [in_words(s) for s in (0.4, 59, 130, 4000, 300_000)]
    ['0 s', '59 s', '2 min', '1 h 7 min', '3 days']
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds > 72 * 3600:
        return f"{seconds / 86_400:,.0f} days"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
