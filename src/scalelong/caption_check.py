"""Whether a model on text listens: its loss on images with their own captions, and with those of other images."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.config import RunConfig
from scalelong.data.random import Stream
from scalelong.data.store import Store
from scalelong.diffusion.process import Process
from scalelong.experiment import loader_for, process_of


@dataclass(frozen=True)
class CaptionCheck:
    """Mean losses over the images, and by how much another image's caption makes it worse.

    Both losses of an image have the same noise and times: the standard error is that of the difference alone.
    """

    true_loss: float
    shuffled_loss: float
    difference: float
    standard_error: float
    images: int
    draws: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@torch.no_grad()
def check_captions(
    config: RunConfig,
    model: nn.Module,
    store: Store,
    *,
    seed: int = 0,
    draws: int = 8,
    batch: int = 100,
    progress: Callable[[Iterable[int], int], Iterable[int]] = lambda starts, count: starts,
) -> CaptionCheck:
    """Compare every image of a store that the run was not trained on, at `draws` times each, spread evenly."""
    if len(store) < 2 or draws < 1:
        raise ValueError(f"captions are exchanged between images, got {len(store)} of them and {draws=}.")
    model.eval()
    device = next(model.parameters()).device
    plain = replace(config.data, flip=False, label_dropout=0.0)
    config = replace(config, data=plain, train=replace(config.train, seed=seed))
    loader, process = loader_for(config, store, str(device)), process_of(config).to(device)
    losses = []
    starts = range(0, len(store), batch)
    for start in progress(starts, len(starts)):  # the stream's first epoch: each image once, in a random order
        found = loader.batch(start, min(batch, len(store) - start))
        assert found.condition is not None
        after = loader.batch((start + len(found.images)) % len(store), 1).condition
        others = torch.cat([found.condition[1:], after])  # type: ignore[list-item]
        told = (found.condition, others)
        parts = [_losses(model, process, found.images, told, found.indices, seed, i, draws) for i in range(draws)]
        losses.append(torch.stack(parts).mean(0))
    true, shuffled = torch.cat(losses, dim=1).double().cpu()
    difference = shuffled - true
    return CaptionCheck(
        true_loss=true.mean().item(),
        shuffled_loss=shuffled.mean().item(),
        difference=difference.mean().item(),
        standard_error=difference.std().item() / len(store) ** 0.5,
        images=len(store),
        draws=draws,
    )


def _losses(
    model: nn.Module,
    process: Process,
    images: Tensor,
    told: tuple[Tensor, Tensor],
    indices: Tensor,
    seed: int,
    draw: int,
    draws: int,
) -> Tensor:
    """[2, B]: the loss of each image under each context, at one noise and one time of this draw's stretch."""
    counters = indices * draws + draw
    noise = Stream(seed, "caption check noise").normal(counters, tuple(images.shape[1:]))
    uniforms = (Stream(seed, "caption check times").uniform(counters) + draw) / draws
    timesteps = process.timesteps(uniforms)
    example = process.example(images, noise, timesteps)
    squares = [
        (model(example.inputs, timesteps, encoder_hidden_states=context, return_dict=False)[0] - example.target)
        .float()
        .square()
        .mean(dim=(1, 2, 3))
        for context in told
    ]
    losses = torch.stack(squares)
    return losses if example.weights is None else losses * example.weights
