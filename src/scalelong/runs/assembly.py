"""What a config and its data make: the loader, the noise process, the network."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from scalelong.backbones.build import CLASS_NAMES, build
from scalelong.config import LatentConfig, ModelConfig, RunConfig, unknown
from scalelong.data.contexts import info_of
from scalelong.data.latents import spread_of
from scalelong.data.loader import Loader, latent_space
from scalelong.data.store import Store
from scalelong.diffusion.process import Process, process_named
from scalelong.diffusion.targets import SIGMA_DATA
from scalelong.presets import model_preset
from scalelong.saving import model_class
from scalelong.training.step import has_dropout

_SPREAD_OFF = 1.5  # how many times as large or small the spread of latents may be without a word


def loader_for(config: RunConfig, store: Store, device: str, *, resident_bytes: int | None = None) -> Loader:
    """The run's stream of images, with labels or contexts where it is conditional."""
    condition, dropout = config.data.condition, config.data.label_dropout
    return Loader(
        store,
        seed=config.train.seed,
        device=device,
        flip=config.data.flip,
        label_dropout=dropout if condition == "class" else None,
        text_dropout=dropout if condition == "text" else None,
        latents=config.data.space == "latents",
        resident_bytes=resident_bytes,
    )


def fitted_to(config: RunConfig, store: Store) -> RunConfig:
    """The config with what the data decides: size, channels, number of classes, shape of contexts, latents."""
    process_of(config)  # its parts fit each other, or a sentence
    config = replace(config, latents=_latents_of(config, store))
    seen = store.manifest if config.latents is None else store.manifest.latents
    assert seen is not None
    size: Any = seen.height if seen.height == seen.width else [seen.height, seen.width]
    decided: dict[str, Any] = {"sample_size": size, "in_channels": seen.channels}
    if config.model.preset.endswith("unet"):
        decided["out_channels"] = seen.channels
    if config.data.condition == "class":
        if not store.num_classes:
            raise ValueError(f"data.condition=class needs labels, and {store.folder} has none.")
        decided["num_class_embeds"] = store.num_classes + (config.data.label_dropout > 0)  # the last one is null
    _check_not_asked_otherwise(config, decided, f"the data in {store.folder} decide it")
    changes = {**config.model.changes, **decided}
    if config.data.condition != "class" and "num_class_embeds" in model_preset(config.model.preset).config:
        changes["num_class_embeds"] = None
    changes |= _text_changes(config, store)
    _check_halves(config, seen.height, seen.width)
    return replace(config, model=replace(config.model, changes=changes))


def _check_halves(config: RunConfig, *sides: int) -> None:
    """A UNet halves its image from block to block, and joins what it doubles on the way back."""
    preset = model_preset(config.model.preset)
    if preset.backbone != "unet":
        return
    blocks = {**preset.config, **config.model.changes}["block_out_channels"]
    least = 2 ** (len(blocks) - 1)
    if any(side % least for side in sides):
        raise ValueError(
            f"a UNet of {len(blocks)} blocks takes images whose sides are multiples of {least}, got "
            f"{'×'.join(map(str, sides))}; prepare them with another --size."
        )


def _text_changes(config: RunConfig, store: Store) -> dict[str, Any]:
    """The width and number of the text tokens that the network is built for; none where it reads no text."""
    preset = model_preset(config.model.preset)
    if config.data.condition != "text":
        if preset.backbone == "text-unet":
            raise ValueError(f"{config.model.preset} reads text; data.condition is text for it.")
        return {"cross_attention_dim": None} if "cross_attention_dim" in preset.config else {}
    if preset.backbone == "unet":
        raise ValueError(f"{config.model.preset} has no place for text; take coco-unet or a U-ViT.")
    info = info_of(store)
    found = {"cross_attention_dim": info.width} | ({"text_len": info.length} if preset.backbone == "uvit" else {})
    _check_not_asked_otherwise(
        config,
        found,
        f"the contexts in {store.folder} are {info.length} tokens of width {info.width} from {info.encoder}",
    )
    return found


def _check_not_asked_otherwise(config: RunConfig, decided: Mapping[str, Any], why: str) -> None:
    """What the data decide is not overridden in silence."""
    asked = config.model.changes
    for name, value in decided.items():
        if asked.get(name, value) != value:
            raise ValueError(
                f"model.changes.{name} is {asked[name]}, and {why}, which makes it {value}; leave it out."
            )


def _latents_of(config: RunConfig, store: Store) -> LatentConfig | None:
    """What the run has to remember of its store's latents. An autoencoder that was moved is not moved back."""
    if config.data.space == "pixels":
        return None
    manifest = store.manifest
    space = latent_space(store)
    if config.process == "edm" and store.latents is not None:
        _check_spread(spread_of(store.latents, space), space.scaling_factor, store)
    return LatentConfig(
        autoencoder=config.latents.autoencoder if config.latents is not None else space.autoencoder,
        weights=space.weights,
        scaling_factor=space.scaling_factor,
        shift_factor=space.shift_factor,
        image_shape=(manifest.height, manifest.width, manifest.channels),
    )


def _check_spread(spread: float, scale: float, store: Store) -> None:
    """EDM's noise levels, scales and weights assume the spread of its data; latents have any."""
    if not spread or 1 / _SPREAD_OFF < spread / SIGMA_DATA < _SPREAD_OFF:
        return
    warnings.warn(
        f"process=edm is made for a spread of {SIGMA_DATA}, and the latents in {store.folder} have {spread:.2g}; "
        f"prepare them with --scale {scale * SIGMA_DATA / spread:.4g}, or take another process, such as sd.",
        stacklevel=1,  # this line: a config is fitted more than once, and told of it only the first time
    )


def process_of(config: RunConfig) -> Process:
    """The run's noise process, with what is learned of it."""
    return process_named(config.process, config.target, config.weighting)


def _check_changes(model: ModelConfig) -> None:
    cls = model_class(CLASS_NAMES[model_preset(model.preset).backbone])
    known = list(signature(cls).parameters)
    for name in model.changes:
        if name not in known:
            raise ValueError(unknown("setting of model.changes", name, known))


def build_model(config: RunConfig, device: str = "cpu") -> nn.Module:
    """The network with its scaling. The seed decides the weights, on any device; gates are drawn after them."""
    _check_changes(config.model)
    with drawn_by(config.train.seed), torch.device("meta") if device == "meta" else contextlib.nullcontext():
        try:
            model = build(
                config.model.preset,
                scaling=config.model.scaling,
                placement=config.model.placement,
                keep_function=config.model.keep_function,
                **config.model.changes,
            )
        except TypeError as error:
            raise ValueError(f"model.changes does not suit {config.model.preset} ({error}).") from error
    if config.train.checkpoint_activations:
        model.enable_gradient_checkpointing(_checkpointing(model))  # type: ignore[operator]
    return placed(model, config, device)


def placed(model: nn.Module, config: RunConfig, device: str) -> nn.Module:
    """On its device, where convolutions have an order of their own."""
    if device.startswith("cuda") and model_preset(config.model.preset).backbone != "uvit":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model.to(device)


@contextlib.contextmanager
def drawn_by(seed: int) -> Iterator[None]:
    """What is drawn on the CPU inside is by a seed; the caller's own randomness goes on as if nothing had been."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _checkpointing(model: nn.Module) -> Any:
    """torch's own. To keep the generator's state is for dropout alone, and not for a captured graph without it."""
    return partial(checkpoint, use_reentrant=False, preserve_rng_state=has_dropout(model))


def num_classes(config: RunConfig) -> int | None:
    """How many classes a run that was fitted to its data knows, the null class left out."""
    if config.data.condition != "class":
        return None
    return int(config.model.changes["num_class_embeds"]) - (config.data.label_dropout > 0)
