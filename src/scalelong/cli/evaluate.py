"""`scalelong evaluate`: the quality of a run's samples."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from scalelong.cli.common import print_result, tracked

EXAMPLES = "Example: [bold]scalelong evaluate runs/mine --data data/mine --num 50000[/]"


def evaluate(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    data: Annotated[
        Path | None, typer.Option(help="The prepared data to compare with; the digits without it.")
    ] = None,
    num: Annotated[int, typer.Option(min=2, help="How many samples; the literature takes 50,000.")] = 50_000,
    features: Annotated[str, typer.Option(help="inception, or pixels for tiny images.")] = "inception",
    inception: Annotated[Path | None, typer.Option(help="The FID network's TorchScript file.")] = None,
    guidance: Annotated[float, typer.Option(help="Classifier-free guidance w.")] = 1.0,
    sampler: Annotated[str, typer.Option(help="dpm++, ddim, ddpm or em.")] = "dpm++",
    steps: Annotated[int, typer.Option(help="Network evaluations per image.")] = 50,
    seed: Annotated[int, typer.Option(help="Which samples.")] = 0,
    batch: Annotated[int, typer.Option(min=2, help="Samples drawn at once.")] = 250,
    ema: Annotated[float | None, typer.Option(help="Which average of the weights.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """FID, KID, precision and recall of samples against data, with the protocol beside the numbers."""
    from scalelong import experiment
    from scalelong.metrics.evaluate import batches, quality_of, reference_of
    from scalelong.metrics.features import InceptionFeatures, PixelFeatures

    if features not in ("inception", "pixels"):
        raise ValueError(f"--features is inception or pixels, got {features!r}.")
    loaded = experiment.load_run(run, ema_rate=ema, device=device)
    store = experiment.open_data(data)
    network = PixelFeatures() if features == "pixels" else InceptionFeatures(inception, experiment.default_device())
    cache = Path("~/.cache/scalelong/statistics").expanduser()
    reference = reference_of(store, network, cache)
    chunks = list(batches(num, batch))
    how: dict[str, Any] = {"seed": seed, "guidance": guidance, "sampler": sampler, "steps": steps}
    samples = (
        experiment.draw(loaded.config, loaded.model, count, first=first, **how)
        for first, count in tracked(chunks, len(chunks), f"sampling {num} images")
    )
    settings = f"{sampler}, {steps} steps, w = {guidance}, seed {seed}, EMA {loaded.ema_rate}, step {loaded.step}"
    quality = quality_of(samples, reference, network, settings)
    print_result(
        {"run": str(run), "step": loaded.step, "ema": loaded.ema_rate, **quality.as_dict()},
        as_json,
        f"{'FID' if features == 'inception' else 'Fréchet distance'} {quality.fid:.4g}, "
        f"KID {quality.kid:.3g} ± {quality.kid_deviation:.2g}, precision {quality.precision:.3f}, "
        f"recall {quality.recall:.3f}\n({quality.protocol})",
    )
