"""One self-contained report.html: no script, no link to anything outside."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalelong.config import RunConfig
from scalelong.data.files import write_whole
from scalelong.report import figures
from scalelong.report.compared import Groups, changes_by_noise, finding, finding_by_noise, summary_rows
from scalelong.report.runs import Run, by_scaling, has_quality, quality_key, ran_together, set_apart
from scalelong.version import __version__

_TEMPLATE = Path(__file__).with_name("page.html.j2")


def write_report(runs: list[Run], out: Path, command: str, more: Sequence[Section] = ()) -> None:
    """Write the page for these runs, with more sections behind their own.

    Those that diverged are named and drawn to their end, and stand in no table.
    """
    ended = [run for run in runs if not run.divergence]
    groups = by_scaling(ended)
    sections = _sections(groups, by_scaling([run for run in runs if run.divergence]))
    _write(
        out,
        title=_title(runs),
        finding=" ".join([*diverged(runs), finding(by_scaling(runs))]).strip(),
        lead=_lead(runs),
        note=_note(ended) if ended else "",
        rows=summary_rows(groups),
        sections=[*(section for section in sections if section.svg), *more],
        grids=[(f"{r.scaling}, seed {r.config.train.seed}", _encode(r.grid)) for r in ended if r.grid],
        caveats=_caveats(runs),
        command=command,
        hardware=_hardware(runs[0]),
    )


def diverged(runs: Sequence[Run]) -> list[str]:
    """A sentence for each run that did."""
    return [f"{run.name} diverged: {run.divergence}" for run in runs if run.divergence]


def write_page(
    title: str,
    lead: str,
    sections: Sequence[Section],
    out: Path,
    command: str,
    *,
    rows: Sequence[Mapping[str, str]] = (),
    note: str = "",
) -> None:
    """Write a page that is not about runs."""
    _write(
        out,
        title=title,
        finding="",
        lead=lead,
        note=note,
        rows=rows,
        sections=sections,
        grids=[],
        caveats=[],
        command=command,
        hardware=f"scalelong {__version__}",
    )


def _write(out: Path, **parts: Any) -> None:
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    page = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(**parts)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, page)


@dataclass(frozen=True)
class Section:
    """A heading, what to see there, the figure and a table; `panels` are wide and scroll in a narrow window."""

    heading: str
    text: str
    svg: str = ""
    panels: bool = False
    verdict: str = ""
    rows: Sequence[Mapping[str, str]] = ()
    note: str = ""


def _sections(groups: Groups, lost: Groups) -> list[Section]:
    every = [run for runs in groups.values() for run in runs]
    key, name = quality_key(every)
    band = " The band is the range over seeds." if any(len(runs) > 1 for runs in groups.values()) else ""
    cross = " A line that ends in a cross is of a run that diverged there." if lost else ""
    return [
        Section(
            "Loss",
            f"Mean squared error of the noise prediction.{band}{cross}",
            figures.curves(groups, ("loss",), "loss", log=True, lost=lost),
        ),
        Section(
            "Loss on held-out images",
            "Of the averaged weights, on images that no run saw: the same images, times and noise for all.",
            figures.curves(groups, ("held out", "loss"), "held-out loss", log=True),
        ),
        Section(
            "Where in the process",
            "The held-out loss at the end against that of none with the same seed, by noise level: below 0 is "
            f"better than none.{band}",
            figures.changes(changes_by_noise(groups), "held-out loss against none's, %"),
            verdict=finding_by_noise(groups, lost),
        ),
        Section(
            "Quality against steps",
            "Fréchet distance between the data and samples drawn on the way, on "
            f"{'the features of Inception' if key == 'fid' else 'pixels'}: lower is better.",
            figures.curves(groups, ("quality", key), name, log=True),
        ),
        Section(
            "Gradient norm",
            f"Of all parameters, before clipping.{cross}",
            figures.curves(groups, ("gradient norm",), "gradient norm", log=True, lost=lost),
        ),
        Section(
            "Feature norms at the skips",
            "Norm of each skip as it meets the main path: the paper's Fig. 1 in small. Dark is outermost.",
            figures.per_skip(groups, "skip norm", "norm of the scaled skip"),
            panels=True,
        ),
        Section(
            "Gradient norms at the skips",
            "Of the block that merges each skip.",
            figures.per_skip(groups, "merge gradient", "gradient norm"),
            panels=True,
        ),
        Section(
            "Skip against main path",
            "The skip's norm over that of the main path which it meets.",
            figures.per_skip(groups, "skip to main", "skip / main"),
            panels=True,
        ),
        Section(
            "Coefficients",
            f"What each skip is multiplied by at the end; for gates, their mean over tokens and images.{band}",
            figures.coefficients(groups),
        ),
    ]


def _title(runs: list[Run]) -> str:
    """The recipe by its name, which need not be that of the images."""
    preset = runs[0].config.model.preset
    return (
        f"{runs[0].scaling} with the recipe {preset}"
        if len(runs) == 1
        else f"Skip scaling with the recipe {preset}"
    )


def _note(runs: list[Run]) -> str:
    """How to read the table."""
    sentences = [
        "Mean over seeds ± half their range." if len(runs) > 1 else "",
        "Loss and gradient norm: mean of the last ten log lines.",
        _quality(runs) if has_quality(runs) else "",
        "Oscillation: the index Σ|x_i - x_(i-1)| / Σ|x_i| over the last 20 log lines.",
        "The time of a step is left out, as runs that train at the same time slow each other."
        if ran_together(runs)
        else "",
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def _quality(runs: list[Run]) -> str:
    if quality_key(runs)[0] == "fid":
        return "FID: of samples drawn on the way, fewer than the literature's 50,000, which makes it larger."
    return (
        "Pixel FID: the Fréchet distance on plain pixels; it compares these runs with each other and with nothing "
        "in the literature."
    )


def _lead(runs: list[Run]) -> str:
    config = runs[0].config
    seeds = sorted({r.config.train.seed for r in runs})
    recipe = (
        f"{config.train.steps:,} steps, batch {config.train.batch_size}, learning rate {config.train.lr:g}, "
        f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}."
    )
    if len(runs) == 1:
        return f"One run of {recipe}"
    if set_apart(runs):
        return f"{len(runs)} runs, the first of {recipe}"
    began = runs[0].noted("began.json")
    shared = "Runs of one seed share their first weights, images, times and noise"
    if began:
        shared = (
            f"All begin with {began['source']} (the spread over seeds is not of first weights); runs of one seed "
            "share images, times and noise"
        )
    return f"{len(runs)} runs of {recipe} {shared}, and differ in the scaling of their long skips alone."


def _caveats(runs: list[Run]) -> list[str]:
    config = runs[0].config
    seeds = len({r.config.train.seed for r in runs})
    noise = (
        "the ± is half the range over them, and no error bar"
        if seeds > 1
        else "another seed may differ by more than a scaling does"
    )
    points = [
        f"{seeds} {'seeds' if seeds > 1 else 'seed'} and {config.train.steps:,} steps: {noise}.",
        "The paper's claims are about longer training, deeper nets and FID on natural images; a short run on small "
        "images can show how norms, gradients and gates behave, not whether samples of a full run are better.",
    ]
    if has_quality(runs) and quality_key(runs)[0] == "pixel_fid":
        points.append("The pixel distance has no eye: it sees statistics of pixels, not shapes.")
    if _has_17_tokens(config) and any(r.scaling.startswith("ls") for r in runs):
        points.append(
            "With 17 tokens the gate of ls has one hidden unit, which ReLU may switch off: only biases learn then."
        )
    return points


def _has_17_tokens(config: RunConfig) -> bool:
    """Whether the recipe of the digits was not fitted to larger images."""
    changes = config.model.changes
    return config.model.preset == "digits" and changes.get("sample_size", 8) == 8 and "patch_size" not in changes


def _hardware(run: Run) -> str:
    e = run.environment
    where = e.get("gpu") or f"{e.get('machine')} CPU, {e.get('processor_threads')} thread(s) a run"
    versions = ", ".join(f"{name} {e.get(name)}" for name in ("torch", "diffusers", "scalelong"))
    return f"{where}; {versions} at {e.get('commit') or 'an unknown commit'}."


def _encode(picture: Path | None) -> str:
    return base64.b64encode(picture.read_bytes()).decode() if picture else ""
