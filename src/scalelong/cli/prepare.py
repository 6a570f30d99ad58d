"""`scalelong prepare`: decode a dataset once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scalelong.cli.common import print_result, tracked
from scalelong.cli.plan import first_image, preparation_plan, preparation_text

if TYPE_CHECKING:
    from scalelong.data.sources import Source

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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """Decode once into memory-mapped arrays, with labels and a manifest of counts and checksums."""
    from scalelong.data.prepare import prepare as run
    from scalelong.data.sources import open_source

    found = open_source(source, split=split, size=size, image_column=image_column)
    if size is not None:
        _check_resized(found, size)
    if dry_run:
        plan = preparation_plan(found, out)
        print_result(plan, as_json, preparation_text(plan))
        return
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


def _check_resized(source: Source, size: int) -> None:
    """Arrays of a fixed size are taken as they are: a --size without effect would go unseen."""
    first = first_image(source)
    if first is not None and first.shape[:2] != (size, size):
        height, width = first.shape[:2]
        raise ValueError(
            f"--size resizes single images, and {source.description} comes as {width}×{height}, got {size}; leave "
            "it out."
        )
