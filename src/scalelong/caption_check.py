"""Whether a model on text listens: its loss on images with their own captions, and with those of other images."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from scalelong.config import RunConfig
from scalelong.data.store import Store
from scalelong.held_out import DRAWS, HeldOut, Progress


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


def check_captions(
    config: RunConfig,
    model: nn.Module,
    store: Store,
    *,
    seed: int = 0,
    draws: int = DRAWS,
    batch: int = 100,
    progress: Progress = lambda starts, count: starts,
) -> CaptionCheck:
    """Compare every image of a store that the run was not trained on, at `draws` times each, spread evenly."""
    if len(store) < 2 or draws < 1:
        raise ValueError(f"captions are exchanged between images, got {len(store)} of them and {draws=}.")
    model.eval()
    device = str(next(model.parameters()).device)
    held_out = HeldOut(config, store, device=device, draws=draws, batch=batch, seed=seed)
    losses = []
    for found in held_out.batches(progress):
        assert found.condition is not None
        after = held_out.loader.batch((int(found.indices[-1]) + 1) % len(store), 1).condition
        others = torch.cat([found.condition[1:], after])  # type: ignore[list-item]
        told = (found.condition, others)
        losses.append(torch.stack([held_out.losses(model, found, c).mean(0) for c in told]))
    true, shuffled = torch.cat(losses, dim=1)
    difference = shuffled - true
    return CaptionCheck(
        true_loss=true.mean().item(),
        shuffled_loss=shuffled.mean().item(),
        difference=difference.mean().item(),
        standard_error=difference.std().item() / len(store) ** 0.5,
        images=len(store),
        draws=draws,
    )
