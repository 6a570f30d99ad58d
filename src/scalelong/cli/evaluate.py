"""`scalelong evaluate`: the quality of a run's samples."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scalelong.cli.common import data_at_hand, is_first_process, print_result, sampling_of, tracked
from scalelong.cli.plan import evaluation_plan, evaluation_text, opened_data

if TYPE_CHECKING:
    from scalelong.config import RunConfig
    from scalelong.data.contexts import Context
    from scalelong.data.store import Store
    from scalelong.experiment import LoadedRun
    from scalelong.metrics.evaluate import Reference
    from scalelong.metrics.features import Features
    from scalelong.world import World

EXAMPLES = (
    "Examples: [bold]scalelong evaluate runs/mine --data data/mine --num 50000[/], "
    "[bold]scalelong evaluate runs/mine --data data/held-out --loss[/] or "
    "[bold]scalelong evaluate runs/coco --data data/coco-val --caption-check[/]"
)


def evaluate(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    data: Annotated[
        Path | None,
        typer.Option(help="The prepared data to compare with; by default the run's. --loss asks for others."),
    ] = None,
    num: Annotated[
        int, typer.Option("--num", "-n", min=4, help="How many samples; the literature takes 50,000.")
    ] = 50_000,
    features: Annotated[str, typer.Option(help="inception, or pixels for tiny images.")] = "inception",
    inception: Annotated[Path | None, typer.Option(help="The FID network's TorchScript file.")] = None,
    guidance: Annotated[
        float | None, typer.Option(help="Classifier-free guidance w; by default the run's.")
    ] = None,
    sampler: Annotated[
        str | None, typer.Option(help="dpm++, ddim, ddpm, em, heun or flow-euler; by default the run's.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Network evaluations per image; by default the run's.")] = None,
    seed: Annotated[int, typer.Option(help="Which samples.")] = 0,
    batch: Annotated[int, typer.Option(min=2, help="Samples drawn at once.")] = 250,
    ema: Annotated[float | None, typer.Option(help="Which average of the weights.")] = None,
    posthoc_ema: Annotated[
        float | None, typer.Option(help="An average of this width, from the run's snapshots (train.posthoc_every).")
    ] = None,
    autoencoder: Annotated[
        str | None, typer.Option(help="Where the autoencoder of a run on latents is now, if it was moved.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    loss: Annotated[
        bool,
        typer.Option("--loss", help="Instead: the loss on this data, in all and by noise level; no samples."),
    ] = False,
    caption_check: Annotated[
        bool,
        typer.Option(
            "--caption-check",
            help="Instead: the loss on this data with its own captions, and with those of other images.",
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """FID, KID, precision and recall of samples against data, with the protocol beside the numbers.

    A run on text draws the captions of that data.
    """
    from scalelong import experiment
    from scalelong.metrics.features import check_images, check_kind, features_named
    from scalelong.training.ema import of_first_weights
    from scalelong.world import local_device, rank_and_size

    check_kind(features, inception)
    if loss and caption_check:
        raise ValueError("--loss and --caption-check are two questions; ask one at a time.")
    processes = rank_and_size()[1]
    if num < 4 * processes:
        raise ValueError(f"--num is at least 4 for each of the {processes} processes, got {num}.")
    device = local_device(experiment.usable_device(device))
    loaded = experiment.load_run(
        run, ema_rate=ema, posthoc_width=posthoc_ema, device=device, autoencoder=autoencoder
    )
    if data is None and not (loss or caption_check):
        data = data_at_hand(run)
    if caption_check and loaded.text is None:
        raise ValueError(f"--caption-check needs a run on text, and {run} is none; leave it out.")
    how = sampling_of(loaded.config, sampler=sampler, steps=steps, guidance=guidance)
    experiment.check_drawing(loaded.config, **how)
    precision = experiment.sampling_precision(device, num * how["steps"])
    begun = of_first_weights(loaded.config.train, loaded.ema_rate, loaded.step)
    weights = f"EMA {loaded.ema_rate}{f' ({begun})' if begun else ''}, step {loaded.step}"
    settings = "{sampler}, {steps} steps, w = {guidance}".format(**how) + f", {precision}, seed {seed}, {weights}"
    with opened_data(data, dry_run) as store:
        _check_size(loaded.config, store)
        settings += _classes_told(loaded, store)
        context = _context(loaded, store)
        if loss or caption_check:
            if dry_run:
                _print_loss_plan(run, loaded, store, as_json)
            elif is_first_process():
                (_measure_loss if loss else _check_captions)(run, loaded, store, seed, batch, as_json)
            return
        check_images(features, store.manifest.height * store.manifest.width * store.manifest.channels)
        if dry_run:
            planned = evaluation_plan(loaded, store, features, inception, settings, num=num, batch=batch, **how)
            plan = {"run": str(run), **planned}
            print_result(plan, as_json, evaluation_text(plan))
            return
        network = features_named(features, inception, device)
        _measure_quality(
            run, loaded, store, network, settings, num, batch, as_json, seed=seed, context=context, **how
        )


def _measure_quality(
    run: Path,
    loaded: LoadedRun,
    store: Store,
    network: Features,
    settings: str,
    num: int,
    batch: int,
    as_json: bool,
    **how: Any,
) -> None:
    """Samples against data; several processes share the samples out."""
    from scalelong import experiment
    from scalelong.metrics.evaluate import quality_of
    from scalelong.world import joined

    with joined(str(next(loaded.model.parameters()).device)) as world:
        reference = _shared_reference(store, network, world)
        drawer = experiment.for_sampling(loaded.model, num * how["steps"])
        share = world.share(num)
        labels = experiment.labels_like(store, share) if _draws_like(loaded, store) else None
        chunks = -(-len(share) // batch)

        def walk(starts: Iterable[Any]) -> Iterable[Any]:
            return tracked(starts, chunks, f"sampling {len(share)} images")

        samples = experiment.drawn(loaded.config, drawer, share, batch=batch, labels=labels, walk=walk, **how)
        quality = quality_of(samples, reference, network, settings, world, _say_next)
    spread = "" if quality.kid_deviation is None else f" ± {quality.kid_deviation:.2g}"
    print_result(
        {"run": str(run), "step": loaded.step, "ema": loaded.ema_rate, **quality.as_dict()},
        as_json,
        f"{'Fréchet distance' if network.name == 'pixels' else 'FID'} {quality.fid:.4g}, "
        f"KID {quality.kid:.3g}{spread}, precision {quality.precision:.3f}, "
        f"recall {quality.recall:.3f}\n({quality.protocol})" + f"\n{quality.caution}".rstrip(),
    )


def _draws_like(loaded: LoadedRun, store: Store) -> bool:
    """Whether samples are of classes, and the data tell how often of each."""
    return loaded.config.data.condition == "class" and store.num_classes > 0


def _classes_told(loaded: LoadedRun, store: Store) -> str:
    """What the protocol says of classes; data with other ones than the run's are refused."""
    if _draws_like(loaded, store):
        _check_classes(loaded, store)
        return ", classes as in the data"
    return ", each class in turn" if loaded.config.data.condition == "class" else ""


def _say_next(distance: str) -> None:
    if is_first_process():
        typer.echo(f"comparing the features: {distance}", err=True)


def _context(loaded: LoadedRun, store: Store) -> Context | None:
    """The captions of the data, if the run reads text: those of the run's own encoder."""
    from scalelong.data.contexts import check_same_encoder, text_of

    if loaded.text is None:
        return None
    text = text_of(store)
    check_same_encoder(text.null, loaded.text.info, loaded.text.context.null, str(store.folder))
    return text.context()


def _shared_reference(store: Store, network: Features, world: World) -> Reference:
    """Worked out by the first process alone; the others read what it leaves in the cache."""
    from scalelong.metrics.evaluate import reference_of, statistics_folder

    if world.is_first:
        reference_of(
            store,
            network,
            statistics_folder(),
            progress=lambda starts, count: tracked(starts, count, f"features of {len(store):,} images of the data"),
        )
    world.wait()
    return reference_of(store, network, statistics_folder())


def _print_loss_plan(run: Path, loaded: LoadedRun, store: Store, as_json: bool) -> None:
    from scalelong.held_out import DRAWS

    plan = _about(run, loaded, store) | {"images": len(store), "draws": DRAWS}
    print_result(plan, as_json, f"the loss of {run} on {len(store):,} images, {DRAWS} times each")


def _measure_loss(run: Path, loaded: LoadedRun, store: Store, seed: int, batch: int, as_json: bool) -> None:
    """The same images, times and noise for every run that is asked, so that runs can be compared."""
    from scalelong.held_out import HeldOut, check_fits

    check_fits(loaded.config, store)
    device = str(next(loaded.model.parameters()).device)
    found = HeldOut(loaded.config, store, device=device, batch=batch, seed=seed).measure(
        loaded.model,
        progress=lambda starts, count: tracked(starts, count, f"the loss on {len(store):,} images"),
    )
    by_noise = ", ".join(f"{value:.4g}" for value in found.by_noise)
    print_result(
        _about(run, loaded, store) | found.as_dict(),
        as_json,
        f"loss {found.loss:.5f} ± {found.standard_error:.2g} (standard error over {found.images:,} images, "
        f"{found.draws} times each; seed {seed}, EMA {loaded.ema_rate}, step {loaded.step})\n"
        f"by noise, least first: {by_noise}",
    )


def _check_captions(run: Path, loaded: LoadedRun, store: Store, seed: int, batch: int, as_json: bool) -> None:
    from scalelong.caption_check import check_captions

    found = check_captions(
        loaded.config,
        loaded.model,
        store,
        seed=seed,
        batch=batch,
        progress=lambda starts, count: tracked(starts, count, f"comparing captions of {len(store):,} images"),
    )
    print_result(
        _about(run, loaded, store) | found.as_dict(),
        as_json,
        f"loss {found.true_loss:.5f} with an image's own caption, {found.shuffled_loss:.5f} with another's: worse "
        f"by {found.difference:.2g} ± {found.standard_error:.2g} (standard error over {found.images:,} images, "
        f"{found.draws} times each, the same noise for both; seed {seed}, EMA {loaded.ema_rate}, "
        f"step {loaded.step})",
    )


def _about(run: Path, loaded: LoadedRun, store: Store) -> dict[str, Any]:
    return {"run": str(run), "data": str(store.folder), "step": loaded.step, "ema": loaded.ema_rate}


def _check_classes(loaded: LoadedRun, store: Store) -> None:
    """Number 3 may be another class there than here: samples and losses would be of the wrong one."""
    there = store.manifest.classes or []
    here = loaded.class_names or there[: loaded.num_classes]  # an old run keeps no names
    for number, (ours, theirs) in enumerate(zip_longest(here, there)):
        if ours != theirs:
            raise ValueError(
                f"class {number} is {ours or 'not there'} in the run and {theirs or 'not there'} in "
                f"{store.folder}; prepare data with the classes of the training."
            )


def _check_size(config: RunConfig, store: Store) -> None:
    """Distances between images of different sizes say nothing about the run."""
    size, channels = config.model.changes["sample_size"], config.model.changes["in_channels"]
    drawn: tuple[int, ...] = (*([size, size] if isinstance(size, int) else size), channels)
    if config.latents is not None:
        drawn = config.latents.image_shape
    held = (store.manifest.height, store.manifest.width, store.manifest.channels)
    if drawn != held:
        ours, theirs = ("{1}×{0}×{2}".format(*shape) for shape in (drawn, held))
        raise ValueError(
            f"the run draws images of {ours}, and {store.folder} holds {theirs}; give the data that the run was "
            "trained on with --data."
        )
