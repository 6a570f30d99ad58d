"""`scalelong sample`: draw images from a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scalelong.cli.common import check_output_file, print_result, tracked

EXAMPLES = "Example: [bold]scalelong sample runs/mine --num 64 --out grid.png --steps 50[/]"


def sample(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    num: Annotated[int, typer.Option(min=1, help="How many images.")] = 64,
    out: Annotated[Path, typer.Option(help="The picture to write.")] = Path("grid.png"),
    label: Annotated[int | None, typer.Option("--class", min=0, help="Draw this class alone.")] = None,
    guidance: Annotated[float, typer.Option(help="Classifier-free guidance w; the paper's s is w - 1.")] = 1.0,
    sampler: Annotated[str, typer.Option(help="dpm++, ddim, ddpm, em, heun or flow-euler.")] = "dpm++",
    steps: Annotated[int, typer.Option(help="Network evaluations per image.")] = 50,
    seed: Annotated[int, typer.Option(help="Which images: the same seed draws the same.")] = 0,
    ema: Annotated[
        float | None, typer.Option(help="Which average; by default the slowest that has settled.")
    ] = None,
    posthoc_ema: Annotated[
        float | None, typer.Option(help="An average of this width, from the run's snapshots (train.posthoc_every).")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """Draw images with averaged weights into one picture."""
    import torch

    from scalelong import experiment

    _check_picture(out)
    loaded = experiment.load_run(run, ema_rate=ema, posthoc_width=posthoc_ema, device=device)
    labels = None
    if label is not None:
        if loaded.num_classes is None:
            raise ValueError(f"--class needs a class-conditional run, and {run} is not; leave it out.")
        if label >= loaded.num_classes:
            raise ValueError(f"--class is in 0 … {loaded.num_classes - 1} for this run, got {label}.")
        labels = torch.full((num,), label)
    images = experiment.draw(
        loaded.config,
        loaded.model,
        num,
        seed=seed,
        labels=labels,
        guidance=guidance,
        sampler=sampler,
        steps=steps,
        progress=lambda items: tracked(items, steps, f"sampling {num} images"),
    )
    experiment.write_grid(images, out)
    print_result(
        {
            "out": str(out),
            "num": num,
            "step": loaded.step,
            "ema": loaded.ema_rate,
            "sampler": sampler,
            "steps": steps,
        },
        as_json,
        f"{out}: {num} images, weights of step {loaded.step:,} averaged at {loaded.ema_rate}, "
        f"{sampler} with {steps} steps.",
    )


def _check_picture(out: Path) -> None:
    from PIL import Image

    check_output_file(out, "grid.png")
    if out.suffix.lower() not in Image.registered_extensions():
        raise ValueError(f"--out is a picture such as grid.png or grid.jpg, got {str(out)!r}.")
