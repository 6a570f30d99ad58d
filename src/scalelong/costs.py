"""What a run costs, counted before it begins: parameters, arithmetic and memory. Computed, not measured."""

from __future__ import annotations

import functools
import math
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from scalelong import experiment
from scalelong.backbones.flops import forward_flops
from scalelong.backbones.memory import step_bytes
from scalelong.config import RunConfig, TrainConfig
from scalelong.presets import model_preset

_CLIP_TOKENS = 77
_FLOAT32 = 4
# What training reaches. On a GPU, of what a large matrix product does, as measured on an H200 (README); on a CPU,
# in a second and thread, roughly: U-ViT-XS on two threads of a server.
EFFICIENCY = {"uvit": 0.40, "unet": 0.20, "text-unet": 0.20}
_CPU_FLOPS = 4e10


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Of one step. Memory is in bytes, of a process that has `images_at_once` in flight.

    `activations` is what a step needs besides weights, gradients, optimiser and averages, at its fullest moment.
    """

    parameters: int
    flops_per_image: int  # forward and backward
    flops_per_step: int  # of the whole batch
    images_at_once: int
    weights: int
    gradients: int
    optimiser: int
    averages: int
    activations: int
    activations_checkpointed: int  # with train.checkpoint_activations

    @property
    def state(self) -> int:
        """What stays from step to step."""
        return self.weights + self.gradients + self.optimiser + self.averages

    def as_dict(self) -> dict[str, int]:
        """For JSON."""
        return asdict(self)


def costs_of(config: RunConfig, processes: int = 1) -> Costs:
    """The costs of a run that was fitted to its data and device, its batch shared among some processes."""
    train = config.train
    images = -(-train.batch_size // (train.accumulate * processes))
    parameters = sum(p.numel() for p in _network(config).parameters())
    weights = _FLOAT32 * parameters
    plain, checkpointed = (
        step_bytes(partial(_network, config, again), partial(_inputs, config, images), train.precision).peak
        for again in (False, True)
    )
    flops = training_flops(config)
    return Costs(
        parameters=parameters,
        flops_per_image=flops,
        flops_per_step=flops * train.batch_size,
        images_at_once=images,
        weights=weights,
        gradients=weights,
        optimiser=2 * weights,  # Adam's moments
        averages=weights * _num_averages(train),
        activations=max(plain - weights, 0),
        activations_checkpointed=max(checkpointed - weights, 0),
    )


def training_flops(config: RunConfig) -> int:
    """Forward and backward of one image of a run that was fitted to its data."""
    return 3 * forward_flops(partial(_network, config), partial(_inputs, config, 1))


def hours_of(config: RunConfig, device: str, *, done: int = 0, threads: int | None = None) -> float:
    """What the steps that are left take this machine in one process, by their arithmetic: small nets need more."""
    left = max(config.train.steps - done, 0) * config.train.batch_size * training_flops(config)
    if device == "cpu":
        rate = _CPU_FLOPS * (threads or torch.get_num_threads())
    else:
        rate = matrix_rate(device) * EFFICIENCY[model_preset(config.model.preset).backbone]
    return left / rate / 3600


@functools.cache
def matrix_rate(device: str, size: int = 4096, turns: int = 20) -> float:
    """FLOP/s of a product of two large half-precision matrices of random numbers."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    best = math.inf
    for _ in range(3):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(turns):
            a @ b
        torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 * turns / best


def state_bytes(parameters: int, train: TrainConfig) -> int:
    """What stays from step to step: weights, gradients, Adam's moments and the averages."""
    return _FLOAT32 * parameters * (4 + _num_averages(train))


def _num_averages(train: TrainConfig) -> int:
    """Copies of the weights: one per rate, and the two that post-hoc averages are made of."""
    return len(train.ema_rates) + (2 if train.posthoc_every else 0)


def _network(config: RunConfig, checkpointed: bool = False) -> nn.Module:
    chosen = replace(config, train=replace(config.train, checkpoint_activations=checkpointed))
    return experiment.build_model(chosen, "meta")


def _inputs(config: RunConfig, images: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the network is called with in a step."""
    changes = {**model_preset(config.model.preset).config, **config.model.changes}
    size = changes["sample_size"]
    height, width = (size, size) if isinstance(size, int) else size
    given: dict[str, Any] = {}
    if config.data.condition == "class":
        given["class_labels"] = torch.zeros(images, dtype=torch.int64)
    elif config.data.condition == "text":
        tokens = changes.get("text_len") or _CLIP_TOKENS
        given["encoder_hidden_states"] = torch.empty(images, tokens, changes["cross_attention_dim"])
    return (torch.empty(images, changes["in_channels"], height, width), torch.zeros(images)), given
