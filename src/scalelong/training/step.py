"""One update: draw a batch, noise it, predict, backward, guard, clip, optimise. A function of the step number."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalelong.config import TrainConfig
from scalelong.data.loader import Loader
from scalelong.data.random import Stream
from scalelong.diffusion.process import Process
from scalelong.skips.apply import scaling_of
from scalelong.training.guard import NonFiniteError, find_culprit

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Stepper:
    """Holds what an update needs. Everything random in it is drawn by (seed, index in the stream)."""

    def __init__(self, model: nn.Module, process: Process, loader: Loader, config: TrainConfig) -> None:
        self.model = model
        self.process = process
        self.loader = loader
        self.config = config
        self.forward: nn.Module = torch.compile(model) if config.compile else model  # type: ignore[assignment]
        self.optimiser = torch.optim.AdamW(
            parameter_groups(model), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )
        self.scaler = torch.amp.GradScaler(loader.device.type, enabled=config.precision == "fp16")
        self.noise = Stream(config.seed, "noise")
        self.times = Stream(config.seed, "times")
        self.dropout = Stream(config.seed, "dropout")

    def update(self, step: int, forward: nn.Module | None = None) -> tuple[Tensor, Tensor]:
        """Update number `step`: (loss, gradient norm). Raises `NonFiniteError` before anything is changed.

        With fp16 an overflow lowers the loss scale and the same batch is tried again: the stream, the
        schedule and the averages see none of it.
        """
        while True:
            loss = self._backward(step, forward or self.forward)
            self.scaler.unscale_(self.optimiser)
            norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
            if bool((loss.isfinite() & norm.isfinite()).item()):
                break
            if not self._can_lower_scale(loss):
                what = "loss" if not loss.isfinite() else "gradient"
                raise NonFiniteError(step, what, find_culprit(self.model, lambda: self._loss(step, 0, self.model)))
            self.scaler.update(self.scaler.get_scale() / 2)
        if self.config.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), self.config.clip_norm, norm)
        for group in self.optimiser.param_groups:
            group["lr"] = self.config.lr * warmup(step, self.config.warmup_steps)
        self.scaler.step(self.optimiser)
        self.scaler.update()
        return loss.detach(), norm

    def _backward(self, step: int, forward: nn.Module) -> Tensor:
        self.optimiser.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.loader.device)
        for piece in range(self.config.accumulate):
            loss = self._loss(step, piece, forward) / self.config.accumulate
            self.scaler.scale(loss).backward()
            total += loss.detach()
        return total

    def _loss(self, step: int, piece: int, forward: nn.Module) -> Tensor:
        """The mean squared error of one piece of the batch."""
        size = self.config.batch_size // self.config.accumulate
        batch = self.loader.batch(step * self.config.batch_size + piece * size, size)
        noise = self.noise.normal(batch.indices, tuple(batch.images.shape[1:]))
        timesteps = self.process.timesteps(self.times.uniform(batch.indices))
        key = self.dropout.bits(torch.tensor([step * self.config.accumulate + piece]), 1)
        torch.manual_seed(int(key) & (2**63 - 1))
        labels: dict[str, Any] = {} if batch.labels is None else {"class_labels": batch.labels}
        with self._autocast():
            noised = self.process.noised(batch.images, noise, timesteps)
            prediction = forward(noised, timesteps, **labels).sample
        target = self.process.target(batch.images, noise, timesteps)
        return F.mse_loss(prediction.float(), target)

    def _autocast(self) -> Any:
        if self.config.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.loader.device.type, _DTYPES[self.config.precision])

    def _can_lower_scale(self, loss: Tensor) -> bool:
        return self.scaler.is_enabled() and bool(loss.isfinite()) and self.scaler.get_scale() > 1


def warmup(step: int, warmup_steps: int) -> float:
    """The learning rate's factor: linear over the first updates, then 1."""
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weights, and what the scaling learns, as two groups; none is lost and none is in both."""
    handle = scaling_of(model)
    gates = handle.parameters() if handle is not None else []
    in_gates = {id(p) for p in gates}
    weights = [p for p in model.parameters() if id(p) not in in_gates]
    assert len(weights) + len(gates) == len(list(model.parameters()))
    groups = [{"params": weights, "name": "weights"}, {"params": gates, "name": "gates"}]
    return [group for group in groups if group["params"]]
