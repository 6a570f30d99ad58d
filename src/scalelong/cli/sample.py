"""`scalelong sample`: draw images from a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scalelong.cli.common import check_output_file, print_result, sampling_of, tracked

if TYPE_CHECKING:
    from scalelong.data.contexts import Context
    from scalelong.experiment import LoadedRun

EXAMPLES = (
    "Examples: [bold]scalelong sample runs/mine --num 64 --out grid.png --steps 50[/] or "
    '[bold]scalelong sample runs/coco --prompt "a red bus" --guidance 3[/]'
)


def sample(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    num: Annotated[int, typer.Option("--num", "-n", min=1, help="How many images.")] = 64,
    out: Annotated[Path, typer.Option(help="The picture to write.")] = Path("grid.png"),
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
    """Draw images with averaged weights into one picture."""
    import torch

    from scalelong import experiment
    from scalelong.world import joined, local_device

    _check_picture(out)
    device = local_device(experiment.usable_device(device))
    loaded = experiment.load_run(
        run, ema_rate=ema, posthoc_width=posthoc_ema, device=device, autoencoder=autoencoder
    )
    how = sampling_of(loaded.config, sampler=sampler, steps=steps, guidance=guidance)
    if label is not None and loaded.num_classes is None:
        raise ValueError(f"--class needs a class-conditional run, and {run} is not; leave it out.")
    number = None if label is None else class_number(label, loaded.num_classes or 0, loaded.class_names)
    experiment.check_drawing(loaded.config, **how)
    told, context = _told(loaded, prompt, text_encoder)
    guided = "" if how["guidance"] == 1 else f", guidance w = {how['guidance']:g}"
    with joined(device) as world:
        mine = world.share(num)
        images = experiment.draw(
            loaded.config,
            loaded.model,
            len(mine),
            first=mine.start,
            seed=seed,
            labels=None if number is None else torch.full((len(mine),), number),
            context=context,
            progress=lambda items: tracked(items, how["steps"], f"sampling {num} images"),
            **how,
        )
        images = torch.cat(world.gather(images))
    if world.is_first:
        experiment.write_grid(images, out)
    print_result(
        {
            "out": str(out),
            "num": num,
            "step": loaded.step,
            "ema": loaded.ema_rate,
            **how,
            **({"class": number} if number is not None else {}),
            **({"captions": [told[i % len(told)] for i in range(num)]} if told else {}),
        },
        as_json,
        f"{out}: {num} images{_of_class(number, loaded.class_names)}, weights of step {loaded.step:,} averaged at "
        f"{loaded.ema_rate}, {how['sampler']} with {how['steps']} steps{guided}.",
    )


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


def _told(loaded: LoadedRun, prompts: list[str] | None, encoder: str | None) -> tuple[list[str], Context | None]:
    """The texts to draw, and what the network reads of them."""
    from scalelong import experiment

    if loaded.text is None:
        if prompts or encoder:
            raise ValueError("--prompt and --text-encoder need a run on text, and this is none; leave them out.")
        return [], None
    if not prompts:
        return loaded.text.captions, loaded.text.context
    return prompts, experiment.encode_prompts(loaded.text, prompts, encoder=encoder)


def _check_picture(out: Path) -> None:
    from PIL import Image

    check_output_file(out, "grid.png")
    if Image.registered_extensions().get(out.suffix.lower()) not in Image.SAVE:
        raise ValueError(f"--out is a picture such as grid.png or grid.jpg, got {str(out)!r}.")
