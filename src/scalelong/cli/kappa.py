"""`scalelong kappa`: a κ for this data, this model, these runs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scalelong.cli.common import check_output_file, print_result, print_table, progress_bar, stopped, with_values
from scalelong.cli.compare import run_with_bars, say_changed, seeds_of, split
from scalelong.cli.plan import opened_data, probe_plan, probe_text

if TYPE_CHECKING:
    from scalelong.comparison import Member
    from scalelong.config import RunConfig
    from scalelong.data.store import Store
    from scalelong.report.page import Section
    from scalelong.stability.models import OpenedModel
    from scalelong.stability.probe import Plan

    Sections = list[Callable[[], Section]]  # drawn where a page is asked for

EXAMPLES = (
    "Examples: [bold]scalelong kappa --sum 5 --skips 6[/], [bold]scalelong kappa cifar10-uvit-s --data "
    "data/cifar10[/], "
    "[bold]scalelong kappa path/to/diffusers/unet --data data/mine[/] or [bold]scalelong kappa --probe[/]"
)

_SOURCES = {
    "data": "from the data",
    "probe": "from short runs",
    "model": "from the model, for a flat gain (worse than none in our runs)",
}


def kappa(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A preset, a run's folder, or a saved diffusers model: measure it."),
    ] = None,
    total: Annotated[
        float | None, typer.Option("--sum", help="Only solve for the κ whose squares sum to this over --skips.")
    ] = None,
    skips: Annotated[int | None, typer.Option(help="How many long skips; by default the model's.")] = None,
    data: Annotated[Path | None, typer.Option(help="A folder that prepare wrote: κ from its images.")] = None,
    process: Annotated[str | None, typer.Option(help="The noise process; by default the model's, or ddpm.")] = None,
    num: Annotated[
        int, typer.Option(min=100, help="How many images to noise; of fewer, each several times.")
    ] = 20_000,
    balance: Annotated[
        float | None,
        typer.Option(help="The most variance of a skip over its main path's; by default the smallest there is."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images per batch of the calibration.")] = 8,
    batches: Annotated[int, typer.Option(min=1, help="How many batches.")] = 3,
    probe: Annotated[bool, typer.Option("--probe", help="Train a grid of κ for some hundred steps.")] = False,
    kappas: Annotated[str, typer.Option(help="--probe: which κ; 1 is no scaling.")] = "1,0.95,0.9,0.8,0.7,0.5",
    seeds: Annotated[str, typer.Option(help="--probe: which seeds.")] = "0,1,2",
    steps: Annotated[int, typer.Option(help="--probe: of the first round; each next one is twice as long.")] = 100,
    rounds: Annotated[int, typer.Option(help="--probe: how many; half of the κ go on after each.")] = 3,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A.B=C", callback=with_values, help="--probe: change a setting of all runs."),
    ] = None,
    init: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="--probe: begin all with the weights of a run, or of a model's folder or name on the hub: yours.",
        ),
    ] = None,
    runs: Annotated[Path, typer.Option(help="--probe: the folder of its runs.")] = Path("runs/kappa"),
    out: Annotated[Path | None, typer.Option(help="Write a page with the figures, such as kappa.html.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="--probe: print what would be run, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """Choose κ: from a sum, from the data, or from short runs; and see what a model's merges make of its skips."""
    if total is not None:
        for option, given in (("--data", data is not None), ("--probe", probe), ("--out", out is not None)):
            if given:
                raise ValueError(f"--sum {total:g} is solved by itself; leave out {option}.")
        _solve(total, skips, model, as_json)
        return
    if model is None and data is None and not probe:
        raise ValueError("κ comes from --sum and --skips, from --data, from a MODEL or from --probe; got none.")
    if out is not None:
        check_output_file(out, "kappa.html")
    if init is not None and not probe:
        raise ValueError(f"--init {init} is where the runs of --probe begin; add --probe, or name it as the MODEL.")
    if probe:
        plan = _plan(kappas, seeds, steps, rounds)
        found, sections = _probe(model or "digits", data, plan, settings or [], init, runs, dry_run, as_json)
    else:
        found, sections = _measure(model, data, process, skips, num, balance, batch, batches, as_json)
    if not sections:  # a dry run
        print_result(found, as_json, probe_text(found))
        return
    specs = [f"{_SOURCES[source]}: {_to_paste(source, found)}" for source in found["specs"]]
    lines = [*found["advice"], *specs]
    if out is not None:
        _write(out, f"To paste, {'; '.join(specs)}.", sections)
        found, lines = found | {"report": str(out)}, [*lines, f"The figures: {out}"]
    print_result(found, as_json, "\n".join(lines))


def _to_paste(source: str, found: dict[str, Any]) -> str:
    """The spec; and the placement, where at the default one a norm would undo what the data ask for."""
    spec: str = found["specs"][source]
    undone = source == "data" and spec != "none" and "model" in found and found["model"]["undone_by_norm"] > 0
    return f'{spec}, with placement="norm"' if undone else spec


def _write(out: Path, lead: str, sections: Sections) -> None:
    from scalelong.report.page import write_page

    command = shlex.join(["scalelong", *sys.argv[1:]])
    write_page("A κ for these skips", lead, [section() for section in sections], out, command)


def _solve(total: float, skips: int | None, model: str | None, as_json: bool) -> None:
    from scalelong.stability.kappa import solve_kappa
    from scalelong.stability.models import open_model

    if (skips is None) == (model is None):
        got = "neither" if skips is None else f"both, --skips {skips} and {model}"
        raise ValueError(
            f"--sum {total:g} is a sum over the skips; say how many either with --skips or by a MODEL; got {got}."
        )
    skips = open_model(model).num_skips if model is not None else skips
    assert skips is not None
    found = solve_kappa(total, skips)
    result = {"kappa": found, "sum": total, "skips": skips, "spec": f"cs:{found:.3g}"}
    print_result(result, as_json, f"κ = {found:.6f}: Σκ_i² = {total:g} over {skips} skips. spec: cs:{found:.3g}")


def _measure(
    name: str | None,
    data: Path | None,
    process: str | None,
    skips: int | None,
    num: int,
    balance: float | None,
    batch: int,
    batches: int,
    as_json: bool,
) -> tuple[dict[str, Any], Sections]:
    """From the data and from the model, as far as they are given."""
    from scalelong.data.store import open_store
    from scalelong.stability.models import open_model

    store = None if data is None else open_store(data)
    opened = None if name is None else open_model(name)
    result: dict[str, Any] = {"advice": [], "specs": {}}
    sections: Sections = []
    process = process or (opened.process if opened else "ddpm")
    if store is not None:
        number = skips if skips is not None else opened.num_skips if opened else None
        if number is None:
            raise ValueError("the κ of a sum depends on the number of skips: give a MODEL, or --skips.")
        sections.append(_from_data(store, process, number, num, result, as_json))
    if opened is not None:
        sections.append(_from_model(opened, store, process, balance, batch, batches, result, as_json))
    return result, sections


def _from_data(
    store: Store, process: str, skips: int, num: int, result: dict[str, Any], as_json: bool
) -> Callable[[], Section]:
    from scalelong.diffusion.process import process_named
    from scalelong.report.kappa import data_section, range_rows
    from scalelong.stability import advice
    from scalelong.stability.noise_ratio import advise_from, measured

    with progress_bar(transient=True) as bar:
        task = bar.add_task("noising images", total=num, note=process)
        norms = measured(store, process_named(process), num, watch=lambda done: bar.update(task, completed=done))
    found = advise_from(norms, process, skips)
    sentences = advice.from_data(found)
    result["data"] = found.as_dict()
    result["advice"] += sentences
    result["specs"]["data"] = advice.data_spec(found)
    if not as_json:
        print_table(
            [{"share below": f"{float(s):.0%}", "‖ε‖²/‖x_t‖²": f"{v:.3f}"} for s, v in found.quantiles.items()]
        )
        print_table(range_rows(result["data"]), f"κ for {skips} skips")
    return partial(data_section, result["data"], sentences)


def _from_model(
    opened: OpenedModel,
    store: Store | None,
    process: str,
    balance: float | None,
    batch: int,
    batches: int,
    result: dict[str, Any],
    as_json: bool,
) -> Callable[[], Section]:
    from scalelong.report.kappa import gain_rows, merge_rows, model_section
    from scalelong.stability import advice
    from scalelong.stability.calibration import calibrate
    from scalelong.stability.models import batches_for

    inputs = batches_for(opened.model, process, store, [batch] * batches + [min(2, batch)])
    with progress_bar(transient=True) as bar:
        bar.add_task(f"calibrating {opened.name}", total=None, note="")
        found = calibrate(opened.model, inputs[:-1], gain_inputs=inputs[-1], balance=balance)
    sentences = advice.from_model(found, opened.folder)
    result["model"] = found.as_dict()
    result["advice"] += sentences
    result["specs"]["model"] = found.spec
    if not as_json:
        print_table(merge_rows(result["model"]), "what skip and main path bring to each merge")
        print_table(gain_rows(result["model"]), "the gain that the sum of Thm 3.4 estimates")
    return partial(model_section, result["model"], sentences)


def _plan(kappas: str, seeds: str, steps: int, rounds: int) -> Plan:
    from scalelong.stability.probe import Plan

    try:
        numbers = tuple(float(part) for part in split(kappas, "--kappas"))
    except ValueError as error:
        raise ValueError(f"--kappas are numbers separated by commas, such as 1,0.9,0.7; got {kappas!r}.") from error
    return Plan(kappas=numbers, seeds=tuple(seeds_of(seeds)), steps=steps, rounds=rounds)


def _probe(
    preset: str,
    data: Path | None,
    plan: Plan,
    settings: list[str],
    init: str | None,
    runs: Path,
    dry_run: bool,
    as_json: bool,
) -> tuple[dict[str, Any], Sections]:
    from scalelong import experiment
    from scalelong.comparison import default_workers, shared_config
    from scalelong.presets import RUN_PRESETS
    from scalelong.report.kappa import probe_rows, probe_section
    from scalelong.stability.probe import probe, round_members, train_member

    if preset not in RUN_PRESETS and Path(preset).is_dir():
        raise ValueError(
            f"--probe trains the recipe of a preset, and {preset} is a folder. Name the preset that is nearest "
            f"({', '.join(RUN_PRESETS)}) and begin with the folder's weights, by --init {preset}; or leave out "
            "--probe to measure the folder."
        )
    base = shared_config(preset, settings, init)
    say_changed(init, base)
    device = experiment.default_device()
    workers = default_workers(device)
    with opened_data(data, dry_run) as store:
        first = round_members(base, plan.kappas, plan.seeds, plan.sizes()[-1][0], runs, init)
        # What is wrong is told before the first run.
        told = probe_plan(first, plan, store, runs, workers, device, timed=dry_run)
        _check_several_skips(first[0].config, store, init)
        if dry_run:
            return told, []

        def train(group: list[Member]) -> list[bool]:
            return run_with_bars(group, store.folder, min(workers, len(group)), train_member)

        found = probe(base, plan, runs, train, init)
    if found is None:
        stopped()
    result = found.as_dict()
    if not as_json:
        print_table(probe_rows(result), "loss and oscillation, mean ± half the range over seeds")
    advice = [f"From {len(plan.seeds)} seeds and up to {plan.sizes()[-1][0]} steps: {found.verdict}."]
    return {"probe": result, "advice": advice, "specs": {"probe": found.spec}}, [partial(probe_section, result)]


def _check_several_skips(config: RunConfig, store: Store, init: str | None) -> None:
    from scalelong import experiment
    from scalelong.skips.apply import find_skips

    found = len(find_skips(experiment.build_model(experiment.fitted_to(config, store), "meta")))
    if found < 2:
        instead = "Give it more blocks, such as --set model.changes.num_layers=12."
        if init is not None:
            instead = "Begin with a deeper one, or leave out --init."
        raise ValueError(
            f"κ acts from the second skip on, and this net has {found}: every κ would train the same run. {instead}"
        )
