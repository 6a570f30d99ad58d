"""`scalelong evaluate`: the quality of a run's samples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scalelong.cli.common import print_result, tracked
from scalelong.cli.plan import evaluation_plan, evaluation_text, opened_data

if TYPE_CHECKING:
    from torch import Tensor, nn

    from scalelong.config import RunConfig
    from scalelong.data.store import Store

EXAMPLES = "Example: [bold]scalelong evaluate runs/mine --data data/mine --num 50000[/]"


def evaluate(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    data: Annotated[
        Path | None, typer.Option(help="The prepared data to compare with; the digits without it.")
    ] = None,
    num: Annotated[
        int, typer.Option("--num", "-n", min=4, help="How many samples; the literature takes 50,000.")
    ] = 50_000,
    features: Annotated[str, typer.Option(help="inception, or pixels for tiny images.")] = "inception",
    inception: Annotated[Path | None, typer.Option(help="The FID network's TorchScript file.")] = None,
    guidance: Annotated[float, typer.Option(help="Classifier-free guidance w.")] = 1.0,
    sampler: Annotated[str, typer.Option(help="dpm++, ddim, ddpm, em, heun or flow-euler.")] = "dpm++",
    steps: Annotated[int, typer.Option(help="Network evaluations per image.")] = 50,
    seed: Annotated[int, typer.Option(help="Which samples.")] = 0,
    batch: Annotated[int, typer.Option(min=2, help="Samples drawn at once.")] = 250,
    ema: Annotated[float | None, typer.Option(help="Which average of the weights.")] = None,
    posthoc_ema: Annotated[
        float | None, typer.Option(help="An average of this width, from the run's snapshots (train.posthoc_every).")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """FID, KID, precision and recall of samples against data, with the protocol beside the numbers."""
    from scalelong import experiment
    from scalelong.metrics.evaluate import quality_of, reference_of, statistics_folder
    from scalelong.metrics.features import check_kind, features_named
    from scalelong.world import joined, local_device, rank_and_size

    check_kind(features, inception)
    processes = rank_and_size()[1]
    if num < 4 * processes:
        raise ValueError(f"--num is at least 4 for each of the {processes} processes, got {num}.")
    device = local_device(experiment.usable_device(device))
    loaded = experiment.load_run(run, ema_rate=ema, posthoc_width=posthoc_ema, device=device)
    how: dict[str, Any] = {"guidance": guidance, "sampler": sampler, "steps": steps}
    experiment.check_drawing(loaded.config, **how)
    precision = experiment.sampling_precision(device, num * steps)
    weights = f"EMA {loaded.ema_rate}, step {loaded.step}"
    settings = f"{sampler}, {steps} steps, w = {guidance}, {precision}, seed {seed}, {weights}"
    with opened_data(data, dry_run) as store:
        _check_size(loaded.config, store)
        if dry_run:
            planned = evaluation_plan(loaded, store, features, inception, settings, num=num, batch=batch, **how)
            plan = {"run": str(run), **planned}
            print_result(plan, as_json, evaluation_text(plan))
            return
        network = features_named(features, inception, device)
        with joined(device) as world:
            if world.is_first:  # the others read what it leaves in the cache
                reference_of(store, network, statistics_folder())
            world.wait()
            reference = reference_of(store, network, statistics_folder())
            drawer = experiment.for_sampling(loaded.model, num * steps)
            samples = _drawn(loaded.config, drawer, world.share(num), batch, seed=seed, **how)
            quality = quality_of(samples, reference, network, settings, world)
    print_result(
        {"run": str(run), "step": loaded.step, "ema": loaded.ema_rate, **quality.as_dict()},
        as_json,
        f"{'FID' if features == 'inception' else 'Fréchet distance'} {quality.fid:.4g}, "
        f"KID {quality.kid:.3g} ± {quality.kid_deviation:.2g}, precision {quality.precision:.3f}, "
        f"recall {quality.recall:.3f}\n({quality.protocol})",
    )


def _drawn(config: RunConfig, network: nn.Module, share: range, batch: int, **how: Any) -> Iterator[Tensor]:
    from scalelong import experiment
    from scalelong.metrics.evaluate import batches

    chunks = list(batches(len(share), batch))
    for first, count in tracked(chunks, len(chunks), f"sampling {len(share)} images"):
        yield experiment.draw(config, network, count, first=share.start + first, **how)


def _check_size(config: RunConfig, store: Store) -> None:
    """Distances between images of different sizes say nothing about the run."""
    size, channels = config.model.changes["sample_size"], config.model.changes["in_channels"]
    drawn = (*([size, size] if isinstance(size, int) else size), channels)
    held = (store.manifest.height, store.manifest.width, store.manifest.channels)
    if drawn != held:
        ours, theirs = ("{1}×{0}×{2}".format(*shape) for shape in (drawn, held))
        raise ValueError(
            f"the run draws images of {ours}, and {store.folder} holds {theirs}; give the data that the run was "
            "trained on with --data."
        )
