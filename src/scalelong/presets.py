"""Published sizes and recipes by name. A preset is data: a network's arguments, and how it was trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from scalelong.config import DataConfig, ModelConfig, RunConfig, SamplingConfig, TrainConfig, unknown

Backbone = Literal["uvit", "unet", "text-unet"]


@dataclass(frozen=True, kw_only=True)
class ModelPreset:
    """A network of a published size. `our_reading`: what is published of one whose config and recipe are not."""

    backbone: Backbone
    about: str
    config: Mapping[str, Any]
    our_reading: str | None = None


def _uvit(about: str, size: int, patch: int, dim: int, depth: int, heads: int, **more: Any) -> ModelPreset:
    config = {
        "sample_size": size,
        "patch_size": patch,
        "hidden_size": dim,
        "num_layers": depth,
        "num_attention_heads": heads,
        **more,
    }
    return ModelPreset(backbone="uvit", about=about, config=config)


_IMAGENET64 = {"num_class_embeds": 1000}
_IMAGENET_LATENT = {
    "in_channels": 4,
    "num_class_embeds": 1001,
    "timestep_map": "one-based",
}  # the last class is null
_COCO_LATENT = {"in_channels": 4, "cross_attention_dim": 768, "text_len": 77, "timestep_map": "one-based"}

_DDPM_UNET = {  # the layout of the DDPM baselines (Ho et al. 2020)
    "in_channels": 3,
    "out_channels": 3,
    "act_fn": "silu",
    "norm_eps": 1e-6,
    "norm_num_groups": 32,
}

MODEL_PRESETS: dict[str, ModelPreset] = {
    "digits": _uvit(
        "a small U-ViT of depth 12 for 8×8 digits", 8, 2, 64, 12, 4, in_channels=1, timestep_map="continuous"
    ),
    "cifar10-uvit-xs": _uvit("U-ViT-XS/2 for 32×32 images; our size, for quick work", 32, 2, 256, 12, 4),
    "cifar10-uvit-s": _uvit("U-ViT-S/2 for CIFAR-10", 32, 2, 512, 12, 8),
    "cifar10-uvit-s-deep": _uvit("U-ViT-S/2 of depth 16 for CIFAR-10", 32, 2, 512, 16, 8),
    "celeba64-uvit-s": _uvit("U-ViT-S/4 for CelebA 64×64", 64, 4, 512, 12, 8),
    "imagenet64-uvit-m": _uvit("U-ViT-M/4 for ImageNet 64×64, by class", 64, 4, 768, 16, 12, **_IMAGENET64),
    "imagenet64-uvit-l": _uvit("U-ViT-L/4 for ImageNet 64×64, by class", 64, 4, 1024, 20, 16, **_IMAGENET64),
    "imagenet256-uvit-l": _uvit("U-ViT-L/2 for ImageNet 256 latents", 32, 2, 1024, 20, 16, **_IMAGENET_LATENT),
    "imagenet256-uvit-h": _uvit(
        "U-ViT-H/2 for ImageNet 256 latents", 32, 2, 1152, 28, 16, final_conv=False, **_IMAGENET_LATENT
    ),
    "imagenet512-uvit-l": _uvit("U-ViT-L/4 for ImageNet 512 latents", 64, 4, 1024, 20, 16, **_IMAGENET_LATENT),
    "imagenet512-uvit-h": _uvit(
        "U-ViT-H/4 for ImageNet 512 latents", 64, 4, 1152, 28, 16, final_conv=False, **_IMAGENET_LATENT
    ),
    "coco-uvit-s": _uvit("U-ViT-S/2 for COCO 256 latents, by text", 32, 2, 512, 12, 8, **_COCO_LATENT),
    "coco-uvit-s-deep": _uvit("U-ViT-S/2 of depth 16 for COCO latents, by text", 32, 2, 512, 16, 8, **_COCO_LATENT),
    "coco64-uvit-s": _uvit(
        "U-ViT-S/4 for COCO 64×64, by text; our size", 64, 4, 512, 12, 8, cross_attention_dim=384, text_len=32
    ),
    "coco-unet": ModelPreset(
        backbone="text-unet",
        about="our reading of the UNet for COCO 256 latents, by text: of a size between the two U-ViTs",
        our_reading="the paper gives 260 M, text encoder and autoencoder counted in, and neither config nor recipe",
        config={
            "sample_size": 32,
            "in_channels": 4,
            "out_channels": 4,
            "layers_per_block": 2,
            "block_out_channels": (128, 256, 384),
            "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
            "attention_head_dim": 8,  # heads: diffusers keeps the misnomer for the sake of old checkpoints
            "cross_attention_dim": 768,
        },
    ),
    "cifar10-unet": ModelPreset(
        backbone="unet",
        about="the DDPM UNet for CIFAR-10, attention at 16×16",
        config={
            **_DDPM_UNET,
            "sample_size": 32,
            "layers_per_block": 2,
            "block_out_channels": (128, 256, 256, 256),
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": 256,
            "dropout": 0.1,
            "flip_sin_to_cos": False,
            "freq_shift": 1,
            "downsample_padding": 0,
        },
    ),
    "imagenet64-unet": ModelPreset(
        backbone="unet",
        about="our reading of the 144 M UNet for ImageNet 64×64, by class (after IDDPM), attention at 16 and 8",
        our_reading="the paper gives 144 M, and neither config nor recipe",
        config={
            **_DDPM_UNET,
            "sample_size": 64,
            "layers_per_block": 2,
            "block_out_channels": (160, 320, 480, 640),
            "down_block_types": ("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
            "attention_head_dim": 160,
            "resnet_time_scale_shift": "scale_shift",
            "num_class_embeds": 1000,
        },
    ),
}


@dataclass(frozen=True, kw_only=True)
class PublishedData:
    """What a recipe was made for, as far as a plan needs it; latents are an eighth as wide as images."""

    name: str
    count: int
    size: int
    classes: int | None = None
    autoencoder: str | None = None
    latent_scale: float = 0.18215
    text_encoder: str | None = None
    text_tokens: tuple[int, int] = (77, 768)


_SD_VAE = "stabilityai/sd-vae-ft-ema"
DATASETS: dict[str, PublishedData] = {  # by the first word of a recipe's name
    "cifar10": PublishedData(name="CIFAR-10", count=50_000, size=32, classes=10),
    "celeba64": PublishedData(name="CelebA", count=162_770, size=64),
    "imagenet64": PublishedData(name="ImageNet", count=1_281_167, size=64, classes=1000),
    "imagenet256": PublishedData(name="ImageNet", count=1_281_167, size=256, classes=1000, autoencoder=_SD_VAE),
    "imagenet512": PublishedData(name="ImageNet", count=1_281_167, size=512, classes=1000, autoencoder=_SD_VAE),
    "coco": PublishedData(
        name="COCO 2014",
        count=82_783,
        size=256,
        autoencoder=_SD_VAE,
        latent_scale=0.2301,
        text_encoder="openai/clip-vit-large-patch14",
    ),
    "coco64": PublishedData(  # ours: 64×64 thumbnails of the first images
        name="COCO thumbnails",
        count=10_000,
        size=64,
        text_encoder="sentence-transformers/all-MiniLM-L6-v2",
        text_tokens=(32, 384),
    ),
}


def model_preset(name: str) -> ModelPreset:
    """Look a preset up; an unknown name gets the list."""
    if name not in MODEL_PRESETS:
        raise ValueError(unknown("preset", name, MODEL_PRESETS))
    return MODEL_PRESETS[name]


# The recipes of U-ViT's CIFAR-10 runs, and of DDPM's (paper §5, appendix). The time token is 999·t.
_UVIT_CIFAR10 = TrainConfig(steps=500_000, batch_size=128, lr=2e-4, betas=(0.99, 0.999), warmup_steps=2500)
_UNET_CIFAR10 = TrainConfig(
    steps=800_000,
    batch_size=128,
    lr=2e-4,
    betas=(0.9, 0.999),
    weight_decay=0.0,
    warmup_steps=5000,
    clip_norm=1.0,
)
_UVIT_CELEBA = replace(_UVIT_CIFAR10, betas=(0.99, 0.99), warmup_steps=5000)
_UVIT_IMAGENET64 = replace(_UVIT_CELEBA, steps=300_000, batch_size=1024, lr=3e-4)
_BY_CLASS = DataConfig(condition="class", label_dropout=0.0)  # as published: no null class
_BY_TEXT = DataConfig(condition="text", label_dropout=0.1)
_UVIT_COCO = TrainConfig(steps=1_000_000, batch_size=256, lr=2e-4, betas=(0.9, 0.9), warmup_steps=5000)
# Ours, for 10,000 pairs: the widths of CelebA 64 at the batch of COCO. Held-out losses fall beyond 6,000 steps.
_UVIT_COCO64 = replace(
    _UVIT_CELEBA, steps=25_000, batch_size=256, warmup_steps=1000, sample_every=2500, checkpoint_every=2500
)
_UVIT_LATENT = replace(_UVIT_CELEBA, batch_size=1024)
_DIGITS = TrainConfig(
    steps=2000,
    batch_size=64,
    lr=1e-3,
    warmup_steps=100,
    ema_rates=(0.99, 0.999),
    sample_every=500,
    checkpoint_every=500,
    log_every=10,
    monitor_every=10,
)
_CONTINUOUS = {"timestep_map": "continuous"}


def _on_imagenet_latents(name: str, steps: int, label_dropout: float, guidance: float) -> RunConfig:
    """The paper's guidance s is w - 1. DPM-Solver++ draws, for the L sizes as well (published: DPM-Solver)."""
    return RunConfig(
        model=ModelConfig(preset=name),
        data=DataConfig(condition="class", label_dropout=label_dropout, space="latents"),
        process="sd",
        train=replace(_UVIT_LATENT, steps=steps),
        sampling=SamplingConfig(sampler="dpm++", steps=50, guidance=guidance),
    )


RUN_PRESETS: dict[str, RunConfig] = {
    "digits": RunConfig(model=ModelConfig(preset="digits"), data=DataConfig(flip=False), train=_DIGITS),
    **{
        name: RunConfig(model=ModelConfig(preset=name, changes=_CONTINUOUS), train=_UVIT_CIFAR10)
        for name in ("cifar10-uvit-xs", "cifar10-uvit-s", "cifar10-uvit-s-deep")
    },
    "celeba64-uvit-s": RunConfig(
        model=ModelConfig(preset="celeba64-uvit-s", changes=_CONTINUOUS), train=_UVIT_CELEBA
    ),
    **{
        name: RunConfig(model=ModelConfig(preset=name, changes=_CONTINUOUS), data=_BY_CLASS, train=_UVIT_IMAGENET64)
        for name in ("imagenet64-uvit-m", "imagenet64-uvit-l")
    },
    "coco64-uvit-s": RunConfig(
        model=ModelConfig(preset="coco64-uvit-s", changes=_CONTINUOUS),
        data=_BY_TEXT,
        sampling=SamplingConfig(guidance=2.0),
        train=_UVIT_COCO64,
    ),
    **{
        name: RunConfig(
            model=ModelConfig(preset=name),
            data=replace(_BY_TEXT, space="latents"),
            process="sd",
            sampling=SamplingConfig(guidance=2.0),
            train=_UVIT_COCO,
        )
        for name in ("coco-uvit-s", "coco-uvit-s-deep")
    },
    "coco-unet": RunConfig(  # our reading: U-ViT's recipe, with the clipping and decay of the other UNets
        model=ModelConfig(preset="coco-unet"),
        data=replace(_BY_TEXT, space="latents"),
        process="sd",
        sampling=SamplingConfig(guidance=2.0),
        train=replace(_UVIT_COCO, weight_decay=0.0, clip_norm=1.0),
    ),
    "imagenet256-uvit-l": _on_imagenet_latents("imagenet256-uvit-l", 300_000, 0.15, 1.4),
    "imagenet256-uvit-h": _on_imagenet_latents("imagenet256-uvit-h", 500_000, 0.1, 1.4),
    "imagenet512-uvit-l": _on_imagenet_latents("imagenet512-uvit-l", 500_000, 0.15, 1.7),
    "imagenet512-uvit-h": _on_imagenet_latents("imagenet512-uvit-h", 500_000, 0.1, 1.7),
    "cifar10-unet": RunConfig(model=ModelConfig(preset="cifar10-unet"), process="ddpm", train=_UNET_CIFAR10),
    "imagenet64-unet": RunConfig(  # our reading: its recipe was not published, so U-ViT's length, batch and rate
        model=ModelConfig(preset="imagenet64-unet"),
        data=_BY_CLASS,
        process="ddpm",
        train=replace(_UNET_CIFAR10, steps=300_000, batch_size=1024, lr=3e-4),
    ),
}


def run_preset(name: str) -> RunConfig:
    """Look a recipe up; an unknown name gets the list."""
    if name not in RUN_PRESETS:
        raise ValueError(unknown("recipe", name, RUN_PRESETS))
    return RUN_PRESETS[name]
