"""`scalelong prepare`: decode a dataset once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scalelong.cli.common import print_result, tracked

EXAMPLES = (
    "Examples: [bold]scalelong prepare my_images --size 64 --out data/mine[/] or "
    "[bold]scalelong prepare cifar-10-python.tar.gz --out data/cifar10[/]"
)


def prepare(
    source: Annotated[
        str,
        typer.Argument(
            help="'digits', an image folder (class subfolders become labels), CIFAR-10 in any form, "
            "a parquet file, a saved Hugging Face dataset, or hf:NAME."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    size: Annotated[int | None, typer.Option(min=1, help="Crop to the centre square and resize to this.")] = None,
    split: Annotated[str, typer.Option(help="Which split, where a source has several.")] = "train",
    image_column: Annotated[str, typer.Option(help="The column of images in a table.")] = "image",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """Decode once into memory-mapped arrays, with labels and a manifest of counts and checksums."""
    from scalelong.data.prepare import prepare as run
    from scalelong.data.sources import open_source

    found = open_source(source, split=split, size=size, image_column=image_column)
    store = run(found, out, progress=lambda items, count: tracked(items, count, f"preparing {found.description}"))
    manifest = store.manifest
    for line in manifest.skipped:
        typer.echo(f"skipped {line}", err=True)
    labels = f", {store.num_classes} classes" if store.num_classes else ""
    print_result(
        {
            "out": str(out),
            "count": len(store),
            "height": manifest.height,
            "width": manifest.width,
            "channels": manifest.channels,
            "classes": manifest.classes,
            "skipped": manifest.skipped,
        },
        as_json,
        f"{out}: {len(store):,} images of {manifest.width}×{manifest.height}×{manifest.channels}{labels}. "
        f"Next: scalelong train PRESET --data {out}",
    )
