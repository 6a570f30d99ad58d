"""One update: draw a batch, noise it, predict, backward, guard, clip, optimise, average.

Nothing in it waits for the device or branches on a value, so that a GPU can replay it whole as one captured graph
(`train.execution=captured`). The guard is a flag on the device: from the first non-finite step on, updates change
nothing until the host looks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalelong.config import TrainConfig, resolved_for
from scalelong.data.loader import Loader
from scalelong.data.random import Stream
from scalelong.diffusion.process import Example, Process
from scalelong.kernels.compiling import compiled
from scalelong.kernels.graphs import captured, warm_up
from scalelong.skips.apply import scaling_of
from scalelong.training.ema import EMA, move_averages
from scalelong.training.guard import NOT_AGAIN, NonFiniteError, find_culprit
from scalelong.training.parts import check_available
from scalelong.training.posthoc import PROFILES, PowerEMA
from scalelong.training.sharding import allow_a_graph_per_block, is_sharded, part, shard
from scalelong.training.signals import Observer, Signals, total_norm
from scalelong.world import World

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NEVER = -1


class Stepper:
    """Holds what an update needs. Everything random in it is drawn by (seed, index in the stream)."""

    def __init__(
        self, model: nn.Module, process: Process, loader: Loader, config: TrainConfig, world: World | None = None
    ) -> None:
        self.model = model
        self.world = world or World()
        self.size = self.world.part(config.batch_size, config.accumulate)  # images of this process per step
        self.process = process.to(loader.device)
        self.loader = loader
        self.config = config = resolved_for(config, loader.device.type, self.world.size)
        self.observer = Observer(model)
        self.sharded = is_sharded(config, self.world)
        if self.sharded:  # first: what is made from the weights is then in parts too
            check_available()
            shard(model, loader.device, _DTYPES.get(config.precision))
            if config.execution == "compiled":
                allow_a_graph_per_block(model)
        self.parameters = list(model.parameters())  # kept: to walk over the modules costs the host milliseconds
        self.emas = [EMA(model, rate, warmup=config.ema_warmup) for rate in config.ema_rates]
        self.powers = [PowerEMA(model, width) for width in PROFILES] if config.posthoc_every else []
        self.averages = [*self.emas, *self.powers]
        device = loader.device
        self.lr = torch.tensor(config.lr, device=device)
        self.optimiser = torch.optim.AdamW(
            parameter_groups(model),
            lr=self.lr,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
            capturable=device.type == "cuda",
        )
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
        self.drops = has_dropout(model)
        if self.drops and config.checkpoint_activations and config.execution == "captured":
            # What is dropped is to be dropped again: the generator's state is asked for, which no capture allows.
            self.config = config = replace(config, execution="compiled")
        fast: Callable[..., Any] = _as_it_is if config.execution == "eager" else compiled
        self.wrapped = model if self.sharded else self.world.wrap(model)
        self.forward = fast(self.wrapped)
        self._draw = fast(Drawing(self.process, loader, config).batch)
        self._average = fast(move_averages)
        self.dropout = Stream(config.seed, "dropout")
        self.graphs: dict[bool, torch.cuda.CUDAGraph] = {}
        # What the step reads and writes on the device.
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        self.pixels, self.condition = loader.buffers(self.size)
        self.places = self.world.rank * self.size + torch.arange(self.size, device=device)  # in a step's images
        self.loss = torch.zeros((), device=device)
        self.norm = torch.zeros((), device=device)
        self.bad_step = torch.full((), _NEVER, dtype=torch.int64, device=device)
        self.bad_loss = torch.zeros((), dtype=torch.bool, device=device)
        self.glanced = Glance(self.bad_step)

    def update(self, step: int, *, observed: bool = False) -> None:
        """Update number `step`; `loss` and `norm` then hold its loss and gradient norm.

        With fp16 an overflow lowers the loss scale and the same batch is tried again: the stream, the schedule
        and the averages see none of it.
        """
        self._load(step)
        self._run(observed)
        if not self.scaler.is_enabled():
            return
        while self.bad_step.item() != _NEVER:
            if self.bad_loss.item() or self.scaler.get_scale() <= 1:
                self.check()
            self.scaler.update(self.scaler.get_scale() / 2)
            self.scaler.load_state_dict({**self.scaler.state_dict(), "_growth_tracker": 0})
            self.bad_step.fill_(_NEVER)
            self._seed_dropout(step)
            self._run(observed)
        self.scaler.update()

    def check(self) -> None:
        """Raise `NonFiniteError` if a step since the last look was not finite. Since then nothing was changed."""
        step = int(self.bad_step.item())
        if step == _NEVER:
            return
        self._load(step)

        def again() -> Tensor:
            self._seed_dropout(step)
            return torch.stack([self._loss(piece, self.model) for piece in range(self.config.accumulate)]).mean()

        what = "loss" if self.bad_loss.item() else "gradient"
        self._let_go()
        with self._unsynchronised():
            try:
                culprit = find_culprit(self.model, again, lambda bad: self.world.any(bad, self.loader.device))
            except torch.OutOfMemoryError as error:  # what was found must be told, and the good weights saved
                if self.world.size > 1:
                    raise
                culprit = f"the step could not be run again to name its module ({str(error).splitlines()[0]})"
        found = torch.tensor([culprit != NOT_AGAIN], dtype=torch.int64, device=self.loader.device)
        ranks = [rank for rank, there in enumerate(self.world.gather(found)) if there]
        if culprit == NOT_AGAIN and ranks:  # another process had the images that did it
            culprit = f"it came from process {ranks[0]}, which names the module"
        raise NonFiniteError(step, what, culprit)

    def glance(self) -> None:
        """`check`, for what was so at the last glance: to ask how it is now would let a GPU run out of work."""
        if self.glanced.last() != _NEVER:
            self.check()
        self.glanced.begin()

    def signals(self) -> Signals:
        """What the last observed update showed."""
        return self.observer.signals()

    def _load(self, step: int) -> None:
        """Put the step's number and images where the step reads them."""
        self.step.fill_(step)
        start = step * self.config.batch_size + self.world.rank * self.size
        pixels, condition = self.loader.fetch(start, self.size)
        self.pixels.copy_(pixels, non_blocking=True)
        if self.condition is not None and condition is not None:
            self.condition.copy_(condition, non_blocking=True)
        self._seed_dropout(step)

    def _seed_dropout(self, step: int) -> None:
        if not self.drops:
            return
        place = step * self.world.size + self.world.rank
        torch.manual_seed(int(self.dropout.bits(torch.tensor([place]), 1)) & (2**63 - 1))

    def _run(self, observed: bool) -> None:
        if self.config.execution != "captured":
            self._body(observed)
            return
        if not self.graphs:
            self._capture()
            self._seed_dropout(int(self.step.item()))  # the trial runs have drawn from it
        self.graphs[observed].replay()

    def _capture(self) -> None:
        """Record the step, plain and observed, at once: a trial run beside a graph would need its memory again.

        Trial runs, which compile and allocate, are bad steps that change nothing.
        """
        before = self.bad_step.clone()
        self.bad_step.fill_(0)
        bodies = {observed: partial(self._body, observed) for observed in (False, True)}
        warm_up(bodies.values())
        self.optimiser.zero_grad(set_to_none=True)
        pool = torch.cuda.graph_pool_handle()
        for observed, body in bodies.items():
            self.graphs[observed], _ = captured(body, pool)
        self.bad_step.copy_(before)

    def _let_go(self) -> None:
        """Free what graphs and gradients hold: to look for a bad module takes a step's memory once more."""
        self.graphs.clear()
        self.optimiser.zero_grad(set_to_none=True)
        if self.loader.device.type == "cuda":
            torch.cuda.empty_cache()

    def _body(self, observed: bool) -> None:
        """The update, in operations on the device alone."""
        self.optimiser.zero_grad(set_to_none=True)
        loss = self.world.mean(self._backward(observed))
        self.scaler.unscale_(self.optimiser)
        norm = total_norm([p.grad for p in self.parameters if p.grad is not None])
        if observed:
            self.observer.measure(self.world)
        keep = self._guard(loss, norm)
        if self.config.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.config.clip_norm, norm)
        self.lr.copy_(self.config.lr * warmup(self.step, self.config.warmup_steps))
        self.optimiser.found_inf = 1 - keep  # type: ignore[attr-defined]
        self.optimiser.step()
        weights = [ema.weight(self.step, keep) for ema in self.averages]
        with torch.no_grad():
            averages = [[part(average) for average in ema.weights.values()] for ema in self.averages]
            self._average(averages, [part(p) for p in self.parameters], weights)
        self.loss.copy_(loss)
        self.norm.copy_(norm)

    def _guard(self, loss: Tensor, norm: Tensor) -> Tensor:
        """1. for a step that counts, 0. for a non-finite one and all that follow it."""
        finite = loss.isfinite() & norm.isfinite()
        first = ~finite & (self.bad_step == _NEVER)
        self.bad_loss.copy_(torch.where(first, ~loss.isfinite(), self.bad_loss))
        self.bad_step.copy_(torch.where(first, self.step, self.bad_step))
        return (self.bad_step == _NEVER).float()

    def _backward(self, observed: bool) -> Tensor:
        # The compiler would have to trace the observer's hooks too: an observed step is not compiled.
        forward = self.wrapped if observed else self.forward
        total = torch.zeros((), device=self.loader.device)
        for piece in range(self.config.accumulate):
            last = piece == self.config.accumulate - 1
            with contextlib.nullcontext() if last else self._unsynchronised():
                # Only the forward pass is watched: checkpointed activations pass it again on the way back.
                with self.observer.watching() if observed else contextlib.nullcontext():
                    loss = self._loss(piece, forward) / self.config.accumulate
                self.scaler.scale(loss).backward()
            total += loss.detach()
        return total

    def _unsynchronised(self) -> Any:
        """Gradients stay this process' own: they are averaged with the last piece of a batch.

        Not so where they are sharded: whole gradients would take the memory that sharding saves.
        """
        return getattr(self.wrapped, "no_sync", contextlib.nullcontext)()

    def _loss(self, piece: int, forward: Any) -> Tensor:
        """The mean squared error of one piece of the batch, weighted where the run says so."""
        size = self.size // self.config.accumulate
        part = slice(piece * size, (piece + 1) * size)
        condition = None if self.condition is None else self.condition[part]
        example, timesteps, condition = self._draw(self.pixels[part], condition, self.step, self.places[part])
        given: dict[str, Any] = {} if condition is None else {self.loader.argument: condition}
        with self._autocast():
            prediction = forward(example.inputs, timesteps, return_dict=False, **given)[0].float()
        if example.weights is None:
            return F.mse_loss(prediction, example.target)
        return (example.weights * (prediction - example.target).square().mean(dim=(1, 2, 3))).mean()

    def _autocast(self) -> Any:
        if self.config.precision == "fp32":
            return contextlib.nullcontext()
        # A cache of cast weights would outlive the graph that it was captured in.
        return torch.autocast(self.loader.device.type, _DTYPES[self.config.precision], cache_enabled=False)


class Drawing:
    """What is random about a batch: flips, dropped conditions, times and noise, all by the position in the stream.

    Apart from the stepper, which keeps it compiled: it would keep itself, and the data, until the collector comes.
    """

    def __init__(self, process: Process, loader: Loader, config: TrainConfig) -> None:
        self.process = process
        self.loader = loader
        self.batch_size = config.batch_size
        self.noise, self.times = (Stream(config.seed, name) for name in ("noise", "times"))

    def batch(
        self, pixels: Tensor, condition: Tensor | None, step: Tensor, places: Tensor
    ) -> tuple[Example, Tensor, Tensor | None]:
        """Pixels to (input, target and weights; timesteps; classes or contexts).

        Each image's place among the step's is a tensor: for a number, every piece would be compiled by itself.
        """
        indices = step * self.batch_size + places
        batch = self.loader.finish(pixels, condition, indices)
        noise = self.noise.normal(indices, tuple(batch.images.shape[1:]))
        timesteps = self.process.timesteps(self.times.uniform(indices))
        return self.process.example(batch.images, noise, timesteps), timesteps, batch.condition


class Glance:
    """A number on the device, sent to the host without waiting for it."""

    def __init__(self, number: Tensor) -> None:
        self.number = number
        self.arrived = number.to("cpu", copy=True)
        self.event: torch.cuda.Event | None = None
        if number.is_cuda:
            self.arrived, self.event = self.arrived.pin_memory(), torch.cuda.Event()

    def begin(self) -> None:
        """Send it as it will be when the device has come so far."""
        self.arrived.copy_(self.number, non_blocking=True)
        if self.event is not None:
            self.event.record()

    def last(self) -> float:
        """What was sent last; at first what it was in the beginning."""
        if self.event is not None:
            self.event.synchronize()
        return self.arrived.item()


def warmup(step: Tensor, warmup_steps: int) -> Tensor:
    """The learning rate's factor: linear over the first updates, then 1."""
    return torch.clamp((step + 1) / warmup_steps, max=1.0) if warmup_steps else torch.ones_like(step)


def has_dropout(model: nn.Module) -> bool:
    """Whether a step of this model draws random numbers of its own."""
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weights, and what the scaling learns, as two groups; none is lost and none is in both."""
    handle = scaling_of(model)
    gates = handle.parameters() if handle is not None else []
    in_gates = {id(p) for p in gates}
    weights = [p for p in model.parameters() if id(p) not in in_gates]
    assert len(weights) + len(gates) == len(list(model.parameters()))
    groups = [{"params": weights, "name": "weights"}, {"params": gates, "name": "gates"}]
    return [group for group in groups if group["params"]]


def _as_it_is(function: Any) -> Any:
    return function
