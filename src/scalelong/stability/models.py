"""Any model that skip scaling knows, by preset, run folder or diffusers folder, and inputs to run it on."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.data.store import Store
from scalelong.diffusion.process import Process, process_named
from scalelong.skips.apply import find_skips, scaling_of
from scalelong.stability.noise_ratio import store_images, uniform_images

Inputs = dict[str, Any]
# What an UNet2DConditionModel may be told besides its image, as far as we can make it up.
_CONDITIONS = {
    "class_embed_type": (None,),
    "encoder_hid_dim_type": (None, "text_proj"),
    "addition_embed_type": (None, "text", "text_time"),
}
_OF_VIDEOS = ("UNetMotionModel", "UNet3DConditionModel")
_OF_LATENTS = ("UNet2DConditionModel", "HunyuanDiT2DModel", *_OF_VIDEOS)
_FRAMES = 4


@dataclass(frozen=True)
class OpenedModel:
    """A model in eval mode, the name of the noise process it is for, and the folder of its weights or None."""

    name: str
    model: nn.Module
    process: str
    folder: str | None

    @property
    def num_skips(self) -> int:
        """How many long skips it has."""
        return len(find_skips(self.model))


def open_model(name: str, seed: int = 0) -> OpenedModel:
    """A preset with fresh weights, a run's averaged weights, or a saved diffusers model or pipeline."""
    from scalelong.experiment import load_run, run_config
    from scalelong.presets import MODEL_PRESETS, RUN_PRESETS

    if name in MODEL_PRESETS:
        from scalelong.backbones.build import build

        process = RUN_PRESETS[name].process if name in RUN_PRESETS else "sd"
        return _opened(name, _seeded(seed, lambda: build(name)), process, folder=None)
    folder = Path(name)
    if not folder.is_dir():
        raise ValueError(f"{name!r} is neither a folder nor a preset; the presets are {', '.join(MODEL_PRESETS)}.")
    if (run := run_config(folder)) is not None:
        return _opened(name, load_run(folder, device="cpu").model, run.process, folder=name)
    if (folder / "model_index.json").is_file():
        folder = next((folder / part for part in ("unet", "transformer") if (folder / part).is_dir()), folder)
    return _from_diffusers(name, folder, seed)


def _from_diffusers(name: str, folder: Path, seed: int) -> OpenedModel:
    """A folder without weights gets fresh ones."""
    from scalelong.saving import load, model_class, read_config

    config = read_config(folder)
    process = "sd" if config["_class_name"] in _OF_LATENTS else "ddpm"
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.bin")):
        return _opened(name, load(folder), process, folder=name)
    cls = model_class(config["_class_name"])
    return _opened(name, _seeded(seed, lambda: cls.from_config(config)), process, folder=None)


def _opened(name: str, model: nn.Module, process: str, folder: str | None) -> OpenedModel:
    find_skips(model)  # or a sentence
    if type(model).__name__ == "I2VGenXLUNet":
        raise ValueError(
            f"{name} is an I2VGenXLUNet, which is told an image besides its video, and no such inputs are made up; "
            "call scalelong.stability.calibration.calibrate(model, [inputs]) with inputs of yours."
        )
    handle = scaling_of(model)
    if handle is not None and handle.placement != "concat":
        warnings.warn(
            f"{name} is scaled by {handle.scaling} at {handle.placement}, which is taken off here: the skips are "
            "measured where they meet the main path, as they are without it.",
            stacklevel=2,
        )
        handle.remove()
    return OpenedModel(name, model.float().eval(), process, folder)


def _seeded(seed: int, build: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def model_inputs(model: Any, process: Process, images: Iterator[Tensor], batch: int, seed: int = 0) -> Inputs:
    """Named arguments for one call: noised images at spread times; conditions, where it has any, at random."""
    clean = next(images)[:batch]
    if type(model).__name__ in _OF_VIDEOS:  # stills, each frame with noise of its own: [B, C, F, H, W]
        clean = clean[:, :, None].expand(-1, -1, _FRAMES, -1, -1)
    uniforms = (torch.arange(len(clean)) + 0.5) / len(clean)
    k = process.timesteps(uniforms)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(clean.shape, generator=generator)
    noised = process.scaled(process.noised(clean, noise, k), k).float()
    if type(model).__name__.startswith("HunyuanDiT"):
        return {"hidden_states": noised, "timestep": k.float(), **_hunyuan_conditions(model, noised, generator)}
    # AnimateDiff's net has a text for every frame.
    texts = len(clean) * (_FRAMES if type(model).__name__ == "UNetMotionModel" else 1)
    return {"sample": noised, "timestep": k, **_conditions(model, texts, generator)}


def batches_for(model: Any, process: str, store: Store | None, sizes: Sequence[int], seed: int = 0) -> list[Inputs]:
    """Inputs of these batch sizes, on a store's images or on uniform ones."""
    shape = image_shape(model)
    if store is not None and store.manifest.channels != shape[0]:
        raise ValueError(
            f"the model takes images of {shape[0]} channels, and {store.folder} has {store.manifest.channels}; "
            "leave "
            "--data out to calibrate it on uniform noise."
        )
    images = uniform_images(shape, seed) if store is None else store_images(store, seed)
    named = process_named(process)
    return [model_inputs(model, named, images, size, seed + i) for i, size in enumerate(sizes)]


def image_shape(model: Any) -> tuple[int, int, int]:
    """[C, H, W] of what the model takes, from its config; 64×64 where that leaves it open."""
    size = model.config.get("sample_size") or 64
    height, width = (size, size) if isinstance(size, int) else size
    return model.config["in_channels"], height, width


def _conditions(model: Any, batch: int, generator: torch.Generator) -> Inputs:
    """Classes and text of U-ViT and diffusers' UNets."""
    config = model.config
    for name, known in _CONDITIONS.items():
        if config.get(name) not in known:
            raise ValueError(
                f"no made-up inputs are known for {name}={config[name]!r}; call "
                "scalelong.stability.calibration.calibrate(model, [inputs]) with inputs of your own."
            )
    found: Inputs = {}
    if config.get("num_class_embeds") is not None:
        found["class_labels"] = torch.randint(config["num_class_embeds"], (batch,), generator=generator)
    text = config.get("encoder_hid_dim") or config.get("cross_attention_dim")
    if text is not None:
        found["encoder_hidden_states"] = torch.randn(
            batch, config.get("text_len", 77), text if isinstance(text, int) else text[0], generator=generator
        )
    if config.get("addition_embed_type") == "text_time":
        pooled = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
        found["added_cond_kwargs"] = {
            "text_embeds": torch.randn(batch, pooled, generator=generator),
            "time_ids": torch.tensor([[float(config["sample_size"] * 8)] * 2 + [0.0] * 2 + [512.0] * 2] * batch),
        }
    return found


def _hunyuan_conditions(model: Any, noised: Tensor, generator: torch.Generator) -> Inputs:
    config, batch = model.config, len(noised)
    tokens = (noised.shape[2] // config["patch_size"]) * (noised.shape[3] // config["patch_size"])
    angles = torch.randn(tokens, config["attention_head_dim"] // 2, generator=generator)

    def text(length: str, width: str) -> Tensor:
        return torch.randn(batch, config[length], config[width], generator=generator)

    return {
        "encoder_hidden_states": text("text_len", "cross_attention_dim"),
        "text_embedding_mask": torch.ones(batch, config["text_len"], dtype=torch.long),
        "encoder_hidden_states_t5": text("text_len_t5", "cross_attention_dim_t5"),
        "text_embedding_mask_t5": torch.ones(batch, config["text_len_t5"], dtype=torch.long),
        "image_meta_size": torch.tensor([[1024.0, 1024, 1024, 1024, 0, 0]] * batch),
        "style": torch.zeros(batch, dtype=torch.long),
        "image_rotary_emb": tuple(f(angles).repeat_interleave(2, 1) for f in (torch.cos, torch.sin)),
    }
