"""A run from data to samples: read this first.

store ─▶ loader ─▶ noise process ─▶ backbone ⟵ skips (the method)
                        fit: step → guard → optimiser → EMA → signals → checkpoint
                                                 ▼
                                              sampler
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from scalelong.backbones.build import build
from scalelong.config import LatentConfig, RunConfig, from_dict, resolved_for, to_dict
from scalelong.data.contexts import Context, KeptText, check_same_encoder, info_of, kept_text
from scalelong.data.files import write_whole
from scalelong.data.latents import Autoencoder, AutoencoderError, fingerprint, load_autoencoder
from scalelong.data.loader import Loader, latent_space
from scalelong.data.prepare import prepare
from scalelong.data.sources import SourceError, digits
from scalelong.data.store import Store, open_store
from scalelong.diffusion.process import Process, process_named
from scalelong.diffusion.sampling import check_request, sample
from scalelong.presets import model_preset
from scalelong.training import checkpoint
from scalelong.training.ema import EMA, default_rate
from scalelong.training.fit import CHECKPOINTS, Event, Fit, Progress
from scalelong.training.log import NoLog, RunLog, environment, read_metrics
from scalelong.training.posthoc import SNAPSHOTS, reconstruct
from scalelong.training.sharding import gather_into, is_sharded
from scalelong.training.step import Stepper
from scalelong.training.trackers import check_logger
from scalelong.world import World, joined, local_device

if TYPE_CHECKING:
    from scalelong.data.text import TextEncoder

CONFIG, ENVIRONMENT, SAMPLES, TEXT = "config.json", "environment.json", "samples", "text.safetensors"
# May differ between a run and its resumption: they change how long, how often and where, not what is computed.
_HOW_OFTEN = ("steps", "log_every", "sample_every", "checkpoint_every", "keep_checkpoints")
_MAY_CHANGE = (*_HOW_OFTEN, "execution", "parallel")


@dataclass(frozen=True)
class Judge:
    """What is found out about a run's averaged weights as it trains.

    `figures_of` gets the model with each of the averages; its figures are logged in a group called `name`, those of
    the settled average under their plain names as well. `every` is a number of steps; by default, whenever pictures
    are drawn.
    """

    name: str
    figures_of: Callable[[nn.Module], dict[str, float]]
    every: int | None = None


def train(
    config: RunConfig,
    store: Store,
    out: Path,
    *,
    device: str | None = None,
    show: Callable[[Progress], None] = lambda progress: None,
    judges: Sequence[Judge] = (),
    logger: str = "tensorboard",
) -> bool:
    """Train a model into the folder `out`, or go on with the run that is there. True when it is done.

    What `judges` find about the averaged weights on the way is logged. `logger` is tensorboard, wandb (both) or
    none; metrics.jsonl is always written.
    """
    check_logger(logger)
    device = local_device(usable_device(device))
    with joined(device) as world:
        return _train(config, store, out, world, device, show, judges, logger)


def _train(
    config: RunConfig,
    store: Store,
    out: Path,
    world: World,
    device: str,
    show: Callable[[Progress], None],
    judges: Sequence[Judge],
    logger: str,
) -> bool:
    config = fitted_to(config, store)
    config = replace(config, train=resolved_for(config.train, device, world.size))
    check_drawing(config)
    text = kept_text(store) if config.data.condition == "text" else None
    if world.is_first:
        check_folder(config, out, text)
        autoencoder_of(config, device)  # found before the first step, not at the first preview
    if config.train.parallel == "fsdp" and world.size == 1:
        warnings.warn(
            "train.parallel=fsdp shares weights out over several processes; this one has them all.", stacklevel=3
        )
    # Shards go to the device block by block: the whole model need not fit there.
    model = build_model(config, "cpu" if is_sharded(config.train, world) else device)
    loader = loader_for(config, store, device)
    fit = Fit(config, Stepper(model, process_of(config), loader, config.train, world), out)
    if world.is_first:
        _open_run(config, out, text)  # last: settings that cannot be leave no folder behind
    world.wait()
    resumed_at = fit.resume()
    if len({int(step) for step in world.gather(torch.tensor([resumed_at], device=device))}) > 1:
        raise ValueError(f"the processes found different checkpoints in {out}; all must see the same folder.")
    log = RunLog(out, resumed_at, logger, to_dict(config)) if world.is_first else NoLog()

    events = _events(config, fit, log, judges, text.context if text else None)
    with log:
        return fit.run(log, show=show, events=events)


def _events(
    config: RunConfig,
    fit: Fit,
    log: RunLog | NoLog,
    judges: Sequence[Judge],
    context: Context | None,
) -> list[Event]:
    """What is made as a run trains: pictures, what post-hoc averages are made of, figures of quality."""
    out = fit.folder
    first = fit.world.is_first

    @functools.cache
    def plain_model() -> nn.Module:
        return build_model(config, str(fit.stepper.loader.device))

    @contextlib.contextmanager
    def averaged(ema: EMA) -> Iterator[nn.Module | None]:
        """The model with an average, in the first process. One in parts lends them to a plain one there."""
        if not fit.stepper.sharded:
            with ema.applied_to(fit.model) if first else contextlib.nullcontext() as model:
                yield model
            return
        model = plain_model() if first else None
        gather_into(model, ema.weights)
        yield model

    def settled() -> EMA:
        rate = default_rate(list(config.train.ema_rates), fit.step)
        return next(ema for ema in fit.emas if ema.rate == rate)

    def grid_of(step: int) -> Path:
        return out / SAMPLES / f"step-{step:09d}.png"

    def save_grid(step: int) -> None:
        with averaged(settled()) as model:
            if model is not None:
                write_grid(draw(config, model, 16, seed=0, context=context), grid_of(step))

    def keep_snapshot(step: int) -> None:
        tensors = {power.name: power.weights for power in fit.stepper.powers}
        fit.write(SNAPSHOTS, tensors, {"step": step}, keep=1_000_000)

    def no_snapshot(step: int) -> bool:
        return not checkpoint.folder_of(out / SNAPSHOTS, step).is_dir()

    def write_judgement(judge: Judge, step: int) -> None:
        found: dict[str, float] = {"ema": settled().rate}
        for ema in fit.emas:
            with averaged(ema) as model:
                figures = judge.figures_of(model) if model is not None else {}
            found |= {f"{name} at {ema.rate}": value for name, value in figures.items()}
            found |= figures if ema is settled() else {}
        log.write(step, **{judge.name: found})

    def no_judgement(judge: Judge, step: int) -> bool:
        return not any(judge.name in row for row in read_metrics(out) if row["step"] == step)

    events = [Event(config.train.sample_every, save_grid, lambda step: not grid_of(step).is_file())]
    if config.train.posthoc_every:
        events.append(Event(config.train.posthoc_every, keep_snapshot, no_snapshot))
    for judge in judges:
        lacking = functools.partial(no_judgement, judge)
        events.append(
            Event(judge.every or config.train.sample_every, functools.partial(write_judgement, judge), lacking)
        )
    return events


def loader_for(config: RunConfig, store: Store, device: str) -> Loader:
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
    )


def fitted_to(config: RunConfig, store: Store) -> RunConfig:
    """The config with what the data decides: size, channels, number of classes, shape of contexts, latents."""
    process_of(config)  # its parts fit each other, or a sentence
    config = replace(config, latents=_latents_of(config, store))
    seen = store.manifest if config.latents is None else store.manifest.latents
    assert seen is not None
    size: Any = seen.height if seen.height == seen.width else [seen.height, seen.width]
    changes = {**config.model.changes, "sample_size": size, "in_channels": seen.channels}
    if config.model.preset.endswith("unet"):
        changes["out_channels"] = seen.channels
    if config.data.condition == "class":
        if not store.num_classes:
            raise ValueError(f"data.condition=class needs labels, and {store.folder} has none.")
        changes["num_class_embeds"] = store.num_classes + (config.data.label_dropout > 0)  # the last one is null
    changes |= _text_changes(config, store)
    return replace(config, model=replace(config.model, changes=changes))


def _text_changes(config: RunConfig, store: Store) -> dict[str, Any]:
    """The width and number of the text tokens that the network is built for; none where it reads no text."""
    preset, asked = model_preset(config.model.preset), config.model.changes
    if config.data.condition != "text":
        if preset.backbone == "text-unet":
            raise ValueError(f"{config.model.preset} reads text; data.condition is text for it.")
        return {"cross_attention_dim": None} if "cross_attention_dim" in preset.config else {}
    if preset.backbone == "unet":
        raise ValueError(f"{config.model.preset} has no place for text; take coco-unet or a U-ViT.")
    info = info_of(store)
    found = {"cross_attention_dim": info.width} | ({"text_len": info.length} if preset.backbone == "uvit" else {})
    for name, value in found.items():
        if asked.get(name, value) != value:
            raise ValueError(
                f"model.changes.{name} is {asked[name]}, and the contexts in {store.folder} are {info.length} "
                f"tokens of width {info.width} from {info.encoder}; leave the setting out."
            )
    return found


def _latents_of(config: RunConfig, store: Store) -> LatentConfig | None:
    """What the run has to remember of its store's latents. An autoencoder that was moved is not moved back."""
    if config.data.space == "pixels":
        return None
    manifest = store.manifest
    space = latent_space(store)
    return LatentConfig(
        autoencoder=config.latents.autoencoder if config.latents is not None else space.autoencoder,
        weights=space.weights,
        scaling_factor=space.scaling_factor,
        shift_factor=space.shift_factor,
        image_shape=(manifest.height, manifest.width, manifest.channels),
    )


def process_of(config: RunConfig) -> Process:
    """The run's noise process, with what is learned of it."""
    return process_named(config.process, config.target, config.weighting)


def build_model(config: RunConfig, device: str = "cpu") -> nn.Module:
    """The network with its scaling. The seed decides the weights, on any device; gates are drawn after them."""
    torch.manual_seed(config.train.seed)
    with torch.device("meta") if device == "meta" else contextlib.nullcontext():
        try:
            model = build(
                config.model.preset,
                scaling=config.model.scaling,
                placement=config.model.placement,
                **config.model.changes,
            )
        except TypeError as error:
            raise ValueError(f"model.changes does not suit {config.model.preset} ({error}).") from error
    if config.train.checkpoint_activations:
        model.enable_gradient_checkpointing()  # type: ignore[operator]
    if device.startswith("cuda") and model_preset(config.model.preset).backbone != "uvit":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # convolutions' own order
    return model.to(device)


@dataclass(frozen=True)
class LoadedRun:
    """A trained model with averaged weights, and where they come from."""

    config: RunConfig
    model: nn.Module
    step: int
    ema_rate: float | str  # or "post-hoc WIDTH"
    text: KeptText | None = None  # the captions that a text run keeps, and where its encoder is

    @property
    def num_classes(self) -> int | None:
        """How many classes can be asked for; None where the run is unconditional."""
        return num_classes(self.config)

    @property
    def null_class(self) -> int | None:
        """The label that stands for no class; None where the run has none."""
        return self.num_classes if self.config.data.label_dropout > 0 else None


def load_run(
    folder: Path,
    *,
    ema_rate: float | None = None,
    posthoc_width: float | None = None,
    device: str | None = None,
    autoencoder: str | None = None,
) -> LoadedRun:
    """The newest whole checkpoint of a run, with the average of `ema_rate`, or the slowest that has settled.

    `posthoc_width` reconstructs an average of that width from the run's snapshots instead. `autoencoder` says where
    that of a run on latents is now.
    """
    config = with_autoencoder(read_config(folder), autoencoder)
    if missing := [key for key in ("sample_size", "in_channels") if key not in config.model.changes]:
        raise ValueError(f"{folder / CONFIG} is not as train wrote it: model.changes lacks {', '.join(missing)}.")
    found = checkpoint.load_latest(folder / CHECKPOINTS)
    if found is None:
        raise ValueError(
            f"{folder} has no whole checkpoint; give the command that began it again ({ENVIRONMENT} has it)."
        )
    rates = list(config.train.ema_rates)
    if ema_rate is not None and ema_rate not in rates:
        raise ValueError(f"the run keeps the averages {', '.join(map(str, rates))}, got {ema_rate}.")
    rate: float | str = default_rate(rates, found.step) if ema_rate is None else ema_rate
    step, weights = found.step, None
    if posthoc_width is not None:
        if ema_rate is not None:
            raise ValueError(f"an average is chosen by --ema or --posthoc-ema, got {ema_rate} and {posthoc_width}.")
        weights, step = reconstruct(folder, posthoc_width)
        rate = f"post-hoc {posthoc_width}"
    model = build_model(config, usable_device(device))
    try:
        model.load_state_dict(weights or found.tensors(f"ema-{rate}"))
    except RuntimeError as error:  # torch lists every tensor: the first says enough
        reason = "; ".join(line.strip() for line in str(error).splitlines()[1:2])
        raise ValueError(
            f"{folder / CONFIG} and the checkpoint {found.folder} do not belong together ({reason}); put back the "
            "config that the run was trained with."
        ) from error
    text = KeptText.read(folder / TEXT) if config.data.condition == "text" else None
    return LoadedRun(config, model.eval(), step, rate, text)


def encode_prompts(text: KeptText, prompts: Sequence[str], *, encoder: str | None = None) -> Context:
    """Prompts as a run's network reads them, by the run's own text encoder; `encoder` tells where it is now."""
    return Context(encoder_of(text, encoder)(prompts).cpu(), text.context.null)


def encoder_of(text: KeptText, place: str | None = None) -> TextEncoder:
    """A run's text encoder, from where `prepare` found it or from another place; another encoder is refused."""
    from scalelong.data.text import TextEncoder

    revision = text.info.revision if place is None else None
    found = TextEncoder(
        place or text.info.encoder, length=text.info.length, revision=revision, device=default_device()
    )
    known = torch.stack([text.context.null, text.context.tokens[0]])
    check_same_encoder(found(["", text.captions[0]]), text.info, known, found.name)
    return found


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

    A class-conditional model without labels draws each class in turn. A text model needs a context, whose texts it
    draws in turn: of prompts (`encode_prompts`), of the captions that a run keeps (`LoadedRun.text.context`) or
    of a store's (`Store.text.context()`). Sampler, steps and guidance are the run's own, unless others are given.
    """
    how = {**asdict(config.sampling), **how}
    check_drawing(config, **{key: how[key] for key in asdict(config.sampling)})
    model.eval()
    device = next(model.parameters()).device
    indices = torch.arange(first, first + count, device=device)
    if config.data.condition == "class":
        labels = indices % num_classes(config) if labels is None else labels.to(device)  # type: ignore[operator]
    if config.data.condition == "text":
        how |= {"context": _context_for(config, context, indices), "null_context": context.null.to(device)}  # type: ignore[union-attr]
    shape, decoder = _drawn_shape(config), autoencoder_of(config, str(device))
    how["clip"] = decoder is None
    drawn = sample(model, process_of(config), indices, shape, seed=seed, labels=labels, **how)
    return drawn if decoder is None else decoder.decoded(drawn)


def _context_for(config: RunConfig, context: Context | None, indices: Tensor) -> Tensor:
    if context is None:
        raise ValueError("a text model draws what it is told; give context=, such as LoadedRun.text.context.")
    wanted, found = config.model.changes["cross_attention_dim"], context.tokens.shape[2]
    if wanted != found:
        raise ValueError(f"this model reads text tokens of width {wanted}, got {found}; use its own encoder.")
    return context.of(indices)


def autoencoder_of(config: RunConfig, device: str) -> Autoencoder | None:
    """What decodes a run's latents; None for a run on pixels."""
    return None if config.latents is None else _opened_autoencoder(config.latents, _drawn_shape(config), device)


def _drawn_shape(config: RunConfig) -> tuple[int, int, int]:
    """Channels, height and width of what the network draws."""
    channels, size = config.model.changes["in_channels"], config.model.changes["sample_size"]
    height, width = (size, size) if isinstance(size, int) else size
    return channels, height, width


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


def check_drawing(
    config: RunConfig, *, sampler: str | None = None, steps: int | None = None, guidance: float | None = None
) -> None:
    """Refuse what a run cannot be asked for, before any long work. What is not given is the run's own."""
    own = config.sampling
    sampler, steps = sampler or own.sampler, own.steps if steps is None else steps
    guidance = own.guidance if guidance is None else guidance
    check_request(process_of(config), sampler, steps, guidance, config.data.condition != "none")
    if guidance != 1 and config.data.label_dropout == 0:
        raise ValueError(
            f"guidance needs a run that also learned to draw without a class or text, and this one was trained "
            f"with data.label_dropout=0; guidance is 1 for it, got {guidance}."
        )


def sampling_precision(device: str, evaluations: int) -> str:
    """bf16 where so much is drawn on a GPU that the network is compiled for it; else fp32."""
    return "bf16" if device.startswith("cuda") and evaluations >= 200_000 else "fp32"


def for_sampling(model: nn.Module, evaluations: int) -> nn.Module:
    """The network as it is called fastest: on a GPU, for long work, compiled and captured in bf16."""
    if sampling_precision(str(next(model.parameters()).device), evaluations) == "fp32":
        return model
    from scalelong.diffusion.fast import FastNetwork

    return FastNetwork(model)


def num_classes(config: RunConfig) -> int | None:
    """How many classes a run that was fitted to its data knows, the null class left out."""
    if config.data.condition != "class":
        return None
    return int(config.model.changes["num_class_embeds"]) - (config.data.label_dropout > 0)


def write_grid(images: Tensor, file: Path) -> None:
    """A near-square picture of all images."""
    import numpy as np
    from PIL import Image

    count, channels, height, width = images.shape
    columns = int(np.ceil(np.sqrt(count)))
    rows = -(-count // columns)
    pixels = ((images.float().cpu() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).numpy()
    grid = np.full((rows * (height + 1) + 1, columns * (width + 1) + 1, channels), 128, np.uint8)
    for i, picture in enumerate(pixels.transpose(0, 2, 3, 1)):
        top, left = (i // columns) * (height + 1) + 1, (i % columns) * (width + 1) + 1
        grid[top : top + height, left : left + width] = picture
    file.parent.mkdir(parents=True, exist_ok=True)
    scale = max(1, 256 // max(grid.shape[:2]))  # tiny images are shown larger, pixel by pixel
    grid = grid.repeat(scale, 0).repeat(scale, 1)
    Image.fromarray(grid[..., 0] if channels == 1 else grid).save(file)


def read_config(folder: Path) -> RunConfig:
    """A run folder's config.json."""
    file = folder / CONFIG
    if not file.is_file():
        raise ValueError(
            f"{folder} is no run folder: it has no {CONFIG}. scalelong train --out {folder} makes one."
        )
    try:
        return from_dict(RunConfig, json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: {error}") from error


def usable_device(device: str | None) -> str:
    """The device asked for, if it is there; by default the GPU where there is one."""
    if device is None:
        return default_device()
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ValueError(f"the device is cpu, cuda or cuda:N, got {device!r}.")
    count = torch.cuda.device_count()
    if device != "cpu" and int(device.removeprefix("cuda").lstrip(":") or 0) >= count:
        raise ValueError(f"this machine has {count} GPUs that torch can use, got {device!r}; try cpu.")
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)
    return device


def default_device() -> str:
    """The GPU, where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def open_data(path: Path | None) -> Store:
    """A prepared dataset; without a path the digits, prepared once in the user's cache folder."""
    if path is not None:
        return open_store(path)
    cached = digits_folder()
    try:
        return open_store(cached) if cached.is_dir() else prepare(digits(), cached)
    except (SourceError, OSError):
        if cached.is_dir():  # another process was faster
            return open_store(cached)
        raise


def digits_folder() -> Path:
    """Where the digits are kept, once they were prepared."""
    return Path("~/.cache/scalelong/digits").expanduser()


def last_step(folder: Path) -> int:
    """The step of a run's newest whole checkpoint; 0 where there is none."""
    found = checkpoint.load_latest(folder / CHECKPOINTS)
    return found.step if found else 0


def _open_run(config: RunConfig, out: Path, text: KeptText | None) -> None:
    """Make the run's folder, or go on with the one that is there."""
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / ENVIRONMENT, json.dumps(environment(), indent=2))
    if text is not None and not (out / TEXT).is_file():
        text.write(out / TEXT)
    write_whole(out / CONFIG, json.dumps(to_dict(config), indent=2, ensure_ascii=False))


def check_folder(config: RunConfig, out: Path, text: KeptText | None = None) -> None:
    """Refuse a folder that holds another run, or something else; writes nothing."""
    if (out / CONFIG).is_file():
        before, now = to_dict(read_config(out)), to_dict(config)
        for key in _MAY_CHANGE:
            before["train"].pop(key), now["train"].pop(key)
        for settings in (before, now):
            settings.pop("sampling")
            (settings["latents"] or {}).pop("autoencoder", None)
        if before != now:
            raise ValueError(
                f"{out} holds another run: {', '.join(_differences(before, now))}. Choose another --out, or give "
                "the same settings to go on with it."
            )
        if text is not None and (out / TEXT).is_file():
            kept = KeptText.read(out / TEXT)
            check_same_encoder(text.context.null, kept.info, kept.context.null, "the data")
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not empty and holds no run; choose another --out.")


def _differences(before: Any, now: Any, where: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        keys = sorted(before.keys() | now.keys())
        return [
            d for key in keys for d in _differences(before.get(key), now.get(key), f"{where}.{key}".lstrip("."))
        ]
    return [f"{where} was {before!r} and is {now!r}"] if before != now else []
