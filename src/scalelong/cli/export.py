"""`scalelong export`: a run as a diffusers pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scalelong.cli.common import print_result

if TYPE_CHECKING:
    from scalelong.experiment import LoadedRun

EXAMPLES = "Example: [bold]scalelong export runs/mine --out my_pipeline --fold[/]"


def export(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    fold: Annotated[bool, typer.Option("--fold", help="Move a constant scaling into the weights.")] = False,
    ema: Annotated[float | None, typer.Option(help="Which average of the weights.")] = None,
    posthoc_ema: Annotated[
        float | None, typer.Option(help="An average of this width, from the run's snapshots (train.posthoc_every).")
    ] = None,
    autoencoder: Annotated[
        str | None, typer.Option(help="Where the autoencoder of a run on latents is now, if it was moved.")
    ] = None,
    text_encoder: Annotated[
        str | None, typer.Option(help="Where the run's text encoder is now, if not where prepare found it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """Write a diffusers pipeline folder around the averaged model."""
    from scalelong import experiment
    from scalelong.export import export as write

    loaded = experiment.load_run(
        run, ema_rate=ema, posthoc_width=posthoc_ema, device="cpu", autoencoder=autoencoder
    )
    pipeline = write(loaded, out, fold=fold, text_encoder=text_encoder)
    print_result(
        {"out": str(out), "pipeline": pipeline, "step": loaded.step, "ema": loaded.ema_rate, "folded": fold},
        as_json,
        f"{out}: a {pipeline} of step {loaded.step:,}, averaged at {loaded.ema_rate}. "
        f"Use it with: import scalelong; pipe = scalelong.load_pipeline({str(out)!r}); "
        f"pipe({_asked_for(loaded)}).images",
    )


def _asked_for(run: LoadedRun) -> str:
    """What the pipeline of such a run is called with."""
    if run.text is not None:
        return f"prompt={run.text.captions[0]!r}"
    return "batch_size=4" if run.num_classes is None else "class_labels=[0, 1]"
