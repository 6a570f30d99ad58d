"""Is the metric right, and how long does it take: FID between two prepared datasets.

    python -m benchmarks.fid DATA/cifar10-test DATA/cifar10-train --out results/cifar10/fid-check.json

The training images of CIFAR-10 against its test images are known to lie at 3.1 to 3.2.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.measure import hardware
from scalelong import experiment
from scalelong.data.store import Store, open_store
from scalelong.metrics.evaluate import images_of, quality_of, reference_of, statistics_folder
from scalelong.metrics.features import features_named


def main(
    images: Annotated[Path, typer.Argument(help="A prepared dataset, in the place of samples.")],
    data: Annotated[Path, typer.Argument(help="A prepared dataset to compare it with.")],
    features: Annotated[str, typer.Option(help="inception, or pixels for tiny images.")] = "inception",
    inception: Annotated[Path | None, typer.Option(help="The FID network's TorchScript file.")] = None,
    batch: Annotated[int, typer.Option(help="Images at once.")] = 250,
    out: Annotated[Path | None, typer.Option(help="Where the result file goes.")] = None,
) -> None:
    """Compare two datasets, and time each side: features, distances."""
    network = features_named(features, inception, experiment.default_device())
    sides = open_store(images), open_store(data)
    network(images_of(sides[1], 0, min(batch, len(sides[1]))))  # the first call sets the network up
    reference, data_s = timed(lambda: reference_of(sides[1], network, statistics_folder()))
    found, images_s = timed(
        lambda: quality_of(drawn(sides[0], batch), reference, network, how_sampled=sides[0].manifest.source)
    )
    result = found.as_dict() | {
        f"seconds, statistics of {len(sides[1])} images": round(data_s, 2),
        f"seconds, {len(sides[0])} images against them": round(images_s, 2),
        "hardware": hardware(),
        "torch": torch.__version__,
    }
    typer.echo(json.dumps(result, indent=1))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")


def drawn(store: Store, batch: int):  # type: ignore[no-untyped-def]
    """A dataset's images as samples come."""
    starts = range(0, len(store), batch)
    return (images_of(store, first, min(batch, len(store) - first)) for first in starts)


def timed(work):  # type: ignore[no-untyped-def]
    """What it gives, and its seconds."""
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start


if __name__ == "__main__":
    typer.run(main)
