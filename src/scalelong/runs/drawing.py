"""Samples of a run: what it is asked for, drawn and decoded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from scalelong.config import LatentConfig, RunConfig
from scalelong.data.contexts import Context, KeptText, check_same_encoder
from scalelong.data.latents import Autoencoder, AutoencoderError, fingerprint, load_autoencoder
from scalelong.data.random import permutation
from scalelong.data.store import Store
from scalelong.diffusion.process import Cosine, Process
from scalelong.diffusion.sampling import check_finite, check_request, sample
from scalelong.runs.assembly import num_classes, process_of
from scalelong.world import default_device

if TYPE_CHECKING:
    from scalelong.data.text import TextEncoder


def draw(
    config: RunConfig,
    model: nn.Module,
    count: int,
    *,
    seed: int = 0,
    first: int = 0,
    labels: Tensor | None = None,
    context: Context | None = None,
    **how: Any,
) -> Tensor:
    """Samples `first` … `first + count - 1` of a seed: [count, C, H, W] in [-1, 1], latents decoded.

    A class-conditional model without labels draws each class in turn (`labels_like`: as often as data have them). A
    text model needs a context, whose texts it draws in turn: of prompts (`encode_prompts`), of the captions that a
    run keeps (`LoadedRun.text.context`) or of a store's (`Store.text.context()`). Sampler, steps and guidance are
    the run's own, unless others are given.
    """
    how = {**asdict(config.sampling), **how}
    check_drawing(config, **{key: how[key] for key in asdict(config.sampling)})
    device = next(model.parameters()).device
    if count == 0:  # of a process that has no share in few images
        return torch.empty(0, *image_shape(config), device=device)
    model.eval()
    indices = torch.arange(first, first + count, device=device)
    if config.data.condition == "class":
        labels = indices % num_classes(config) if labels is None else labels.to(device)  # type: ignore[operator]
    if config.data.condition == "text":
        how |= {"context": _context_for(config, context, indices), "null_context": context.null.to(device)}  # type: ignore[union-attr]
    shape, decoder = _drawn_shape(config), autoencoder_of(config, str(device))
    how["clip"] = decoder is None
    drawn = sample(model, process_of(config), indices, shape, seed=seed, labels=labels, **how)
    if decoder is None:
        return drawn
    images = decoder.decoded(drawn)
    check_finite(images, "decoded samples")
    return images


def drawn(
    config: RunConfig,
    network: nn.Module,
    numbers: range,
    *,
    batch: int = 250,
    labels: Tensor | None = None,
    walk: Callable[[Iterable[Any]], Iterable[Any]] = iter,
    **how: Any,
) -> Iterator[Tensor]:
    """These samples of a seed, `batch` at a time, each as `draw` has it; `labels` has one for each number."""
    for start in walk(range(0, len(numbers), batch)):
        some = numbers[start : start + batch]
        told = None if labels is None else labels[start : start + batch]
        yield draw(config, network, len(some), first=some.start, labels=told, **how)


def labels_like(store: Store, indices: range) -> Tensor:
    """The classes of samples that are compared with data: as often as they are there, in an order of no meaning."""
    assert store.labels is not None
    order = permutation(0, "classes", 0, len(store))
    return torch.from_numpy(store.labels[order[torch.tensor(indices) % len(store)].numpy()])


def _context_for(config: RunConfig, context: Context | None, indices: Tensor) -> Tensor:
    if context is None:
        raise ValueError("a text model draws what it is told; give context=, such as LoadedRun.text.context.")
    wanted, found = config.model.changes["cross_attention_dim"], context.tokens.shape[2]
    if wanted != found:
        raise ValueError(f"this model reads text tokens of width {wanted}, got {found}; use its own encoder.")
    return context.of(indices)


def check_drawing(
    config: RunConfig, *, sampler: str | None = None, steps: int | None = None, guidance: float | None = None
) -> None:
    """Refuse what a run cannot be asked for, before any long work. What is not given is the run's own."""
    own = config.sampling
    sampler, steps = sampler or own.sampler, own.steps if steps is None else steps
    guidance = own.guidance if guidance is None else guidance
    check_request(process_of(config), sampler, steps, guidance, config.data.condition != "none")
    process = process_of(config)
    if config.latents is not None and sampler in ("ddim", "ddpm") and noise_is_all(process):
        raise ValueError(
            f"{sampler} begins where the {process.name} schedule leaves nothing of the image, from which its noise "
            "says nothing of it, and latents cannot be clipped; take dpm++ or heun, or train with --set target=v."
        )
    if guidance != 1 and config.data.label_dropout == 0:
        raise ValueError(
            f"guidance needs a run that also learned to draw without a class or text, and this one was trained "
            f"with data.label_dropout=0; guidance is 1 for it, got {guidance}."
        )


def noise_is_all(process: Process) -> bool:
    """Whether at the largest noise its prediction tells nothing of the image: σ/α is 2·10⁴ under the cosine."""
    return isinstance(process, Cosine) and process.target == "epsilon"


def _drawn_shape(config: RunConfig) -> tuple[int, int, int]:
    """Channels, height and width of what the network draws."""
    channels, size = config.model.changes["in_channels"], config.model.changes["sample_size"]
    height, width = (size, size) if isinstance(size, int) else size
    return channels, height, width


def image_shape(config: RunConfig) -> tuple[int, int, int]:
    """Channels, height and width of an image, latents decoded."""
    if config.latents is None:
        return _drawn_shape(config)
    height, width, channels = config.latents.image_shape
    return channels, height, width


def sampling_precision(device: str, evaluations: int) -> str:
    """bf16 where so much is drawn on a GPU that the network is compiled for it; else fp32."""
    return "bf16" if device.startswith("cuda") and evaluations >= 200_000 else "fp32"


def for_sampling(model: nn.Module, evaluations: int) -> nn.Module:
    """The network as it is called fastest: on a GPU, for long work, compiled and captured in bf16."""
    if sampling_precision(str(next(model.parameters()).device), evaluations) == "fp32":
        return model
    from scalelong.diffusion.fast import FastNetwork

    return FastNetwork(model)


def encode_prompts(
    text: KeptText, prompts: Sequence[str], *, encoder: str | None = None, device: str | None = None
) -> Context:
    """Prompts as a run's network reads them, by the run's own text encoder; `encoder` tells where it is now."""
    return Context(encoder_of(text, encoder, device)(prompts).cpu(), text.context.null)


def encoder_of(text: KeptText, place: str | None = None, device: str | None = None) -> TextEncoder:
    """A run's text encoder, from where `prepare` found it or from another place; another encoder is refused."""
    from scalelong.data.text import TextEncoder

    revision = text.info.revision if place is None else None
    device = device or default_device()
    found = TextEncoder(place or text.info.encoder, length=text.info.length, revision=revision, device=device)
    known = torch.stack([text.context.null, text.context.tokens[0]])
    check_same_encoder(found(["", text.captions[0]]), text.info, known, found.name)
    return found


def autoencoder_of(config: RunConfig, device: str) -> Autoencoder | None:
    """What decodes a run's latents; None for a run on pixels."""
    if config.latents is None:
        return None
    here = torch.empty(0, device=device).device  # cuda is cuda:0: one autoencoder, not two
    return _opened_autoencoder(config.latents, _drawn_shape(config), str(here))


@lru_cache(maxsize=1)
def _opened_autoencoder(latents: LatentConfig, shape: tuple[int, int, int], device: str) -> Autoencoder:
    try:
        found = load_autoencoder(latents.autoencoder, scale=latents.scaling_factor, device=device)
    except AutoencoderError as error:
        raise AutoencoderError(
            f"{error} This run's latents are decoded by that autoencoder; if it is elsewhere now, say where with "
            "--autoencoder NAME_OR_FOLDER."
        ) from error
    found.check_latents(shape, latents.image_shape)
    if fingerprint(found.network) != latents.weights:
        warnings.warn(
            f"the autoencoder {found.place} has other weights than the one that made this run's latents.",
            stacklevel=2,
        )
    return replace(found, shift_factor=latents.shift_factor)


def with_autoencoder(config: RunConfig, place: str | None) -> RunConfig:
    """The config with the autoencoder taken from another place."""
    if place is None:
        return config
    if config.latents is None:
        raise ValueError(f"an autoencoder decodes latents, and this run is on pixels, got {place!r}; leave it out.")
    folder = Path(place).expanduser()
    place = str(folder.resolve()) if folder.is_dir() else place  # a run is not always asked from the same folder
    return replace(config, latents=replace(config.latents, autoencoder=place))
