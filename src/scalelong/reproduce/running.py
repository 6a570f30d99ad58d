"""Runs of a plan: trained where they are not yet, and read. A run that diverges is a result like the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scalelong import experiment
from scalelong.comparison import Member, diverged, run_all
from scalelong.config import resolved_for
from scalelong.data.store import Store
from scalelong.report.runs import read_run
from scalelong.reproduce.plan import Data, Folders
from scalelong.training.log import METRICS, divergence, read_metrics


def train_all(
    group: Sequence[Member], store: Store, workers: int, watch: Callable[[list[bool]], None] = lambda done: None
) -> bool:
    """Train what is not done yet. False when it was stopped; what was done stays."""
    for member in group:
        check_member(member, store)
    left = [member for member in group if not is_done(member)]
    return all(run_all(left, store.folder, workers=workers, watch=watch)) if left else True


def check_member(member: Member, store: Store) -> None:
    """Refuse a folder that holds another run, before any is trained."""
    config = experiment.fitted_to(member.config, store)
    recipe = resolved_for(config.train, experiment.default_device())
    experiment.check_folder(replace(config, train=recipe), member.folder, data=experiment.data_of(config, store))


def is_done(member: Member) -> bool:
    """Whether a run of this very config has come to its end, good or bad."""
    if not (member.folder / METRICS).is_file():
        return False
    if diverged(member.folder):
        return True
    rows = read_metrics(member.folder)
    judged = member.judging is None or any("quality" in row and row["step"] == _end(member) for row in rows)
    return judged and experiment.last_step(member.folder) == _end(member)


def folders_of(group: Sequence[Member]) -> Folders:
    """Each variant's run folders, in the order of the seeds."""
    found: dict[str, list[Path]] = {}
    for member in group:
        found.setdefault(member.scaling, []).append(member.folder)
    return found


def curves(folders: Folders, *path: str) -> Data:
    """A logged number of every run: {variant: [{"steps", "values"} of each seed]}; ∞ at the end of who diverged.

    What a run was worth before it diverged is not what it came to.
    """
    found: dict[str, list[Data]] = {name: [] for name in folders}
    for name, runs in folders.items():
        for folder in runs:
            steps, values = read_run(folder).series(*path)
            if (bad := divergence(folder)) is not None:
                steps.append(bad["step"] + 1)  # the update that failed
                values.append(float("inf"))
            found[name].append({"steps": steps, "values": values})
    return found


def quality(folders: Folders) -> Data:
    """The curves of FID, or of its stand-in on pixels, and which it is."""
    every = [folder for runs in folders.values() for folder in runs]
    for key, name in (("fid", "FID-10k"), ("pixel_fid", "pixel FID")):
        if any(read_run(folder).series("quality", key)[0] for folder in every):
            return {"measure": name, "curves": curves(folders, "quality", key)}
    if all(map(diverged, every)):
        return {"measure": "quality", "curves": curves(folders, "quality")}
    raise ValueError("no run has logged a quality; were they trained with --evaluate-every?")


def final_quality(folders: Folders, store: Store) -> Data:
    """The last quality of every run."""
    found = quality(folders)
    return {"measure": found["measure"], "values": last(found["curves"])}


def last(found: Data, over: int = 1) -> dict[str, list[float]]:
    """The mean of the last `over` values of each run; infinite for one that diverged before any."""
    return {name: [_mean(run["values"][-over:]) for run in runs] for name, runs in found.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("inf")


def _end(member: Member) -> Any:
    return member.config.train.steps
