"""`scalelong sample`: draw images from a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scalelong.cli.common import print_result, progress_bar, sampling_of

if TYPE_CHECKING:
    from scalelong.data.contexts import Context
    from scalelong.experiment import LoadedRun
    from scalelong.runs.pictures import Place

EXAMPLES = (
    "Examples: [bold]scalelong sample runs/mine --num 64 --out grid.png --steps 50[/] or "
    '[bold]scalelong sample runs/coco --prompt "a red bus" --guidance 3[/]'
)


def sample(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    num: Annotated[int, typer.Option("--num", "-n", min=1, help="How many images.")] = 64,
    out: Annotated[
        Path,
        typer.Option(
            help="A picture of all (grid.png), an array of bytes (samples.npz), or a folder: a picture of each, "
            "where the same command goes on if it was stopped."
        ),
    ] = Path("grid.png"),
    label: Annotated[
        str | None,
        typer.Option("--class", metavar="NAME|NUMBER", help="Draw this class alone; a name goes before a number."),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            help="Draw this text; may be given often: the images follow the prompts in turn. Without it a run on "
            "text draws the captions that it keeps, the first ones of its data."
        ),
    ] = None,
    text_encoder: Annotated[
        str | None, typer.Option(help="Where the run's text encoder is now, if not where prepare found it.")
    ] = None,
    guidance: Annotated[
        float | None, typer.Option(help="Classifier-free guidance w; the paper's s is w - 1. By default the run's.")
    ] = None,
    sampler: Annotated[
        str | None, typer.Option(help="dpm++, ddim, ddpm, em, heun or flow-euler; by default the run's.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Network evaluations per image; by default the run's.")] = None,
    seed: Annotated[int, typer.Option(help="Which images: the same seed draws the same.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Images drawn at once.")] = 250,
    ema: Annotated[
        float | None, typer.Option(help="Which average; by default the slowest that has settled.")
    ] = None,
    posthoc_ema: Annotated[
        float | None, typer.Option(help="An average of this width, from the run's snapshots (train.posthoc_every).")
    ] = None,
    autoencoder: Annotated[
        str | None, typer.Option(help="Where the autoencoder of a run on latents is now, if it was moved.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """Draw images with averaged weights: into one picture, a folder with a picture of each, or one array."""
    from scalelong import experiment
    from scalelong.data.latents import fingerprint
    from scalelong.runs.drawing import image_shape
    from scalelong.runs.pictures import is_folder, place_for
    from scalelong.training.ema import of_first_weights
    from scalelong.world import joined, local_device

    device = local_device(experiment.usable_device(device))
    loaded = experiment.load_run(
        run, ema_rate=ema, posthoc_width=posthoc_ema, device=device, autoencoder=autoencoder
    )
    how = sampling_of(loaded.config, sampler=sampler, steps=steps, guidance=guidance)
    number = _class_asked(label, loaded, run)
    experiment.check_drawing(loaded.config, **how)
    told, context = _told(loaded, prompt, text_encoder, device)
    about = {"run": str(run), "step": loaded.step, "ema": loaded.ema_rate, "seed": seed, **how}
    if is_folder(out):  # which may hold samples of others: the weights are hashed, enough to tell trainings apart
        about |= {"weights": fingerprint(loaded.model)[:16]}
    about |= {"class": number} if number is not None else {}
    about |= {"captions": told} if told else {}
    place = place_for(out, about, image_shape(loaded.config)[0])
    with joined(device) as world, place.begun(world):
        _draw_into(place, loaded, world.share(num), batch, number, seed=seed, context=context, **how)
        place.finish(world)
    captions = {"captions": [told[i % len(told)] for i in range(num)]} if told else {}
    guided = "" if how["guidance"] == 1 else f", guidance w = {how['guidance']:g}"
    begun = of_first_weights(loaded.config.train, loaded.ema_rate, loaded.step)
    print_result(
        {"out": str(out), "num": num, **about, **captions},
        as_json,
        f"{out}: {num} images{_of_class(number, loaded.class_names)}, weights of step {loaded.step:,} averaged at "
        f"{loaded.ema_rate}{f' ({begun})' if begun else ''}, {how['sampler']} with {how['steps']} steps{guided}.",
    )


def _draw_into(place: Place, loaded: LoadedRun, mine: range, batch: int, number: int | None, **how: Any) -> None:
    """This process' share, but for what is there already; the bar counts steps of the sampler."""
    import torch

    from scalelong import experiment

    chunks = [mine[start : start + batch] for start in range(0, len(mine), batch)]
    lacking = [chunk for chunk in chunks if place.lacks(chunk)]
    with progress_bar() as bar:
        task = bar.add_task(f"sampling {len(mine)} images", total=len(lacking) * how["steps"], note="")

        def watched(steps: Iterable[Any]) -> Iterator[Any]:
            for step in steps:
                yield step
                bar.advance(task)

        for chunk in lacking or [range(0)]:
            labels = None if number is None else torch.full((len(chunk),), number)
            images = experiment.draw(
                loaded.config, loaded.model, len(chunk), first=chunk.start, labels=labels, progress=watched, **how
            )
            place.put(chunk, images)


def _class_asked(label: str | None, loaded: LoadedRun, run: Path) -> int | None:
    if label is None:
        return None
    if loaded.num_classes is None:
        raise ValueError(f"--class needs a class-conditional run, and {run} is not; leave it out.")
    return class_number(label, loaded.num_classes, loaded.class_names)


def class_number(asked: str, count: int, names: Sequence[str] | None) -> int:
    """The class of a name, or of a number where no class has that name.

    >>> class_number("dog", 2, ["cat", "dog"])
    1
    """
    if names and asked in names:
        return names.index(asked)
    if asked.isdecimal() and int(asked) < count:
        return int(asked)
    listed = ""
    if names:
        listed = f" or one of {', '.join(names[:20])}{' …' if len(names) > 20 else ''}"
    elif not asked.isdecimal():
        listed = ", as it keeps no names of its classes"
    raise ValueError(f"--class is in 0 … {count - 1}{listed} for this run, got {asked}.")


def _of_class(number: int | None, names: Sequence[str] | None) -> str:
    if number is None:
        return ""
    return f" of class {number}" + (f" ({names[number]})" if names else "")


def _told(
    loaded: LoadedRun, prompts: list[str] | None, encoder: str | None, device: str
) -> tuple[list[str], Context | None]:
    """The texts to draw, and what the network reads of them."""
    from scalelong import experiment

    if loaded.text is None:
        if prompts or encoder:
            raise ValueError("--prompt and --text-encoder need a run on text, and this is none; leave them out.")
        return [], None
    if not prompts:
        return loaded.text.captions, loaded.text.context
    return prompts, experiment.encode_prompts(loaded.text, prompts, encoder=encoder, device=device)
