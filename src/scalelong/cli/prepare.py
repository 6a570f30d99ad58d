"""`scalelong prepare`: decode a dataset once."""

from __future__ import annotations

from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scalelong.cli.common import print_result, tracked
from scalelong.cli.plan import first_image, preparation_plan, preparation_text

if TYPE_CHECKING:
    from scalelong.data.latents import Autoencoder
    from scalelong.data.sources import Source
    from scalelong.data.store import Store
    from scalelong.data.text import TextEncoder

EXAMPLES = (
    "Examples: [bold]scalelong prepare my_images --size 64 --out data/mine[/], "
    "[bold]scalelong prepare cifar-10-python.tar.gz --out data/cifar10[/], "
    "[bold]scalelong prepare celeba:CelebA --out data/celeba64[/], "
    "[bold]scalelong prepare imagenet64:ILSVRC2012 --out data/imagenet64[/], "
    "[bold]scalelong prepare coco:coco2014 --split train --size 256 --out data/coco[/], "
    "[bold]scalelong prepare coco64 --text-encoder openai/clip-vit-large-patch14 --out data/coco64[/], "
    "[bold]scalelong prepare imagenet256:ILSVRC2012 --autoencoder stabilityai/sd-vae-ft-ema --out data/in256[/] or "
    "[bold]scalelong prepare shards:tars --size 256 --crop adm --out data/index[/]"
)


def prepare(
    source: Annotated[
        str,
        typer.Argument(
            help="'digits', an image folder (class subfolders become labels), CIFAR-10 in any form, a parquet file "
            "or a folder of some, a saved Hugging Face dataset, hf:NAME, or one of celeba:PATH, imagenet64:PATH, "
            "imagenet256:PATH, imagenet512:PATH, coco:PATH, and shards:PATH for webdataset tars, whose images stay "
            "where they are."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    size: Annotated[
        int | None,
        typer.Option(min=1, help="Crop to a square and resize to this; celeba is 64, coco 256 unless told."),
    ] = None,
    crop: Annotated[
        str | None,
        typer.Option(
            help="How: centre (the centre square, by Lanczos), adm (ImageNet's) or celeba (128×128 of the aligned "
            "images). The default is the source's own."
        ),
    ] = None,
    split: Annotated[str, typer.Option(help="Which split, where a source has several.")] = "train",
    image_column: Annotated[str, typer.Option(help="The column of images in a table.")] = "image",
    caption_column: Annotated[
        str | None, typer.Option(help="The column of captions; by default captions, caption or text, if there.")
    ] = None,
    text_encoder: Annotated[
        str | None,
        typer.Option(help="Encode the captions with this transformers model, a folder or a name of the hub."),
    ] = None,
    text_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens per caption, 77 unless told: longer captions are cut.")
    ] = None,
    autoencoder: Annotated[
        str | None,
        typer.Option(
            help="Write latents as well, for data.space=latents: the folder of a diffusers autoencoder or "
            "pipeline, or a name on the hub."
        ),
    ] = None,
    scale: Annotated[
        float | None, typer.Option(help="What latents are multiplied by; by default the autoencoder's own factor.")
    ] = None,
    latents_only: Annotated[
        bool,
        typer.Option(
            "--latents-only", help="Leave the images out. Evaluation then needs another store to compare with."
        ),
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="Where to encode: cpu or cuda; by default the GPU where there is one.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """Decode once into memory-mapped arrays, with labels, captions and a manifest of counts and checksums."""
    from scalelong.data.prepare import prepare as run
    from scalelong.data.sources import open_source
    from scalelong.world import usable_device

    device = usable_device(device)
    images_encoder = _autoencoder(autoencoder, scale, latents_only, device)
    found = open_source(
        source, split=split, size=size, crop=crop, image_column=image_column, caption_column=caption_column
    )
    if size is not None:
        _check_resized(found, size)
    encoder = _encoder(text_encoder, text_len, device)
    if dry_run:
        plan = preparation_plan(found, out, images_encoder, latents_only)
        if encoder is not None:
            plan |= _text_plan(found, encoder)
        print_result(plan, as_json, preparation_text(plan))
        return
    store = run(
        found,
        out,
        progress=lambda items, count: tracked(items, count, f"preparing {found.description}"),
        text_encoder=encoder,
        text_progress=lambda batches, count: tracked(batches, count, "encoding captions"),
        autoencoder=images_encoder,
        latents_only=latents_only,
    )
    _warn_of_losses(store)
    print_result(_facts(store), as_json, _summary(store))


def _warn_of_losses(store: Store) -> None:
    """What did not come over whole: images that could not be read, captions that were too long."""
    for line in store.manifest.skipped:
        typer.echo(f"skipped {line}", err=True)
    if store.text is not None and (info := store.text.info).cut:
        typer.echo(f"{info.cut:,} of {info.captions:,} captions were longer and are cut.", err=True)


def _facts(store: Store) -> dict[str, Any]:
    manifest = store.manifest
    return {
        "out": str(store.folder),
        "count": len(store),
        "height": manifest.height,
        "width": manifest.width,
        "channels": manifest.channels,
        "classes": manifest.classes,
        "captions": store.captions is not None,
        "text": manifest.text,
        "shards": manifest.shards,
        "latents": manifest.latents and asdict(manifest.latents),
        "skipped": manifest.skipped,
    }


def _summary(store: Store) -> str:
    """One sentence of what there is, and what to do with it."""
    manifest, on = store.manifest, ""
    parts = [f"{len(store):,} images of {manifest.width}×{manifest.height}×{manifest.channels}"]
    if store.num_classes:
        parts.append(f"{store.num_classes} classes")
    if store.text is not None:
        info = store.text.info
        parts.append(f"{info.captions:,} captions as {info.length} tokens of width {info.width}")
    elif store.captions is not None:
        parts.append("with captions")
    if (space := manifest.latents) is not None:
        kept = "as" if manifest.latents_only else "with"
        parts.append(f"{kept} latents of {space.width}×{space.height}×{space.channels}")
        on = " (a preset on pixels: --set data.space=latents)"
    if manifest.shards is not None:
        parts.append(f"left in {len(manifest.shards)} shards")
    return f"{store.folder}: {', '.join(parts)}. Next: scalelong train PRESET --data {store.folder}{on}"


def _encoder(name: str | None, length: int | None, device: str) -> TextEncoder | None:
    if name is None:
        if length is not None:
            raise ValueError(f"--text-len is the length of encoded captions, got {length} without --text-encoder.")
        return None
    from scalelong.data.text import TextEncoder

    return TextEncoder(name, length=length, device=device)


def _text_plan(source: Source, encoder: TextEncoder) -> dict[str, Any]:
    """What encoding adds, if all images have as many captions as the first ones."""
    counts = [len(item.captions or ()) for item in islice(source.items(), 64) if item.image is not None]
    if not any(counts):
        raise ValueError(f"--text-encoder encodes captions, and {source.description} has none; leave it out.")
    captions = round(source.count * sum(counts) / len(counts))
    text = {"encoder": encoder.name, "length": encoder.length, "width": encoder.width, "captions": captions}
    return {"text": text, "text_bytes": encoder.bytes_of(captions)}


def _autoencoder(place: str | None, scale: float | None, latents_only: bool, device: str) -> Autoencoder | None:
    """Opened first: what is wrong with it shows before the images are read."""
    if place is None:
        if scale is not None or latents_only:
            option = "--latents-only" if latents_only else f"--scale {scale:g}"
            raise ValueError(f"latents are made by an autoencoder, got {option} alone; give --autoencoder as well.")
        return None
    from scalelong.data.latents import load_autoencoder

    return load_autoencoder(place, scale=scale, device=device)


def _check_resized(source: Source, size: int) -> None:
    """Arrays of a fixed size are taken as they are: a --size without effect would go unseen."""
    first = first_image(source)
    if first is not None and first.shape[:2] != (size, size):
        height, width = first.shape[:2]
        raise ValueError(
            f"--size resizes single images, and {source.description} comes as {width}×{height}, got {size}; leave "
            "it out."
        )
