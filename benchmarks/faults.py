"""Small real training runs on the digits, healthy ones and ones with a fault planted at step 200.

Diffusers' DDPM noise, a U-ViT or a UNet, a plain PyTorch loop. A fault is a function of the run and of the steps
since its onset. Which runs: `benchmarks.fault_sets`.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import scalelong

ONSET = 200


def uvit(width: int = 32, depth: int = 6, **changes: Any) -> nn.Module:
    """A small U-ViT for 8×8 digits."""
    sizes = {"sample_size": 8, "patch_size": 2, "in_channels": 1, "num_attention_heads": 4}
    return scalelong.UViT(hidden_size=width, num_layers=depth, **sizes, **changes)


def unet(width: int = 16) -> nn.Module:
    """A small DDPM UNet for 8×8 digits."""
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        block_out_channels=(width, 2 * width),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
        attention_head_dim=8,
    )


@dataclass
class Run:
    """A training run; faults change its parts."""

    name: str
    make: Callable[[], nn.Module] = uvit
    scaling: str = "none"
    placement: str = "concat"
    lr: float = 1e-3
    batch: int = 16
    seed: int = 0
    steps: int = 320
    warmup: int = 0
    cosine: bool = False
    clip: float | None = None
    optimiser: str = "adamw"
    target: str = "epsilon"
    flat: bool = False  # images of even grey, in place of digits
    half: bool = False
    fault: Callable[[Training, int], None] | None = None
    onset: int = ONSET


class Training:
    """A run in progress."""

    def __init__(self, run: Run) -> None:
        from diffusers import DDPMScheduler
        from sklearn.datasets import load_digits

        torch.manual_seed(run.seed)
        self.run = run
        self.model = run.make()
        if run.scaling != "none":
            scalelong.apply(self.model, run.scaling, placement=run.placement)
        self.model.train()
        kinds: dict[str, Any] = {
            "adamw": lambda p: torch.optim.AdamW(p, lr=run.lr, betas=(0.9, 0.99), weight_decay=0.03),
            "recipe": lambda p: torch.optim.AdamW(p, lr=run.lr, betas=(0.99, 0.999), weight_decay=0.03),
            "adam": lambda p: torch.optim.Adam(p, lr=run.lr),
            "sgd": lambda p: torch.optim.SGD(p, lr=run.lr, momentum=0.9),
        }
        self.optimiser = kinds[run.optimiser](self.model.parameters())
        self.noise = DDPMScheduler(prediction_type=run.target)
        images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1
        self.images = images.mean(dim=(1, 2, 3), keepdim=True).expand_as(images) if run.flat else images
        self.lr_factor = 1.0
        self.data_factor = 1.0
        self.target_noise = 0.0

    def loss(self) -> tuple[Tensor, Tensor, Tensor]:
        """(loss, loss per image, timesteps) of a fresh batch."""
        clean = self.images[torch.randint(len(self.images), (self.run.batch,))] * self.data_factor
        noise, t = torch.randn_like(clean), torch.randint(1000, (self.run.batch,))
        noised = self.noise.add_noise(clean, noise, t)
        target = noise if self.run.target == "epsilon" else self.noise.get_velocity(clean, noise, t)
        target = target + self.target_noise * torch.randn_like(target)
        half = torch.autocast("cpu", torch.float16) if self.run.half else contextlib.nullcontext()
        with half:
            predicted = self.model(noised, t, return_dict=False)[0].float()
        each = F.mse_loss(predicted, target, reduction="none").mean(dim=(1, 2, 3))
        return each.mean(), each, t

    def set_lr(self, step: int) -> None:
        """Warm-up, schedule and fault."""
        factor = min(1.0, (step + 1) / self.run.warmup) if self.run.warmup else 1.0
        if self.run.cosine:
            factor *= 0.5 * (1 + math.cos(math.pi * step / self.run.steps))
        for group in self.optimiser.param_groups:
            group["lr"] = self.run.lr * factor * self.lr_factor

    def steps(self) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """Each step after its backward pass, before clipping and the update."""
        for step in range(self.run.steps):
            if self.run.fault and step >= self.run.onset:
                self.run.fault(self, step - self.run.onset)
            self.set_lr(step)
            loss, each, t = self.loss()
            loss.backward()
            yield step + 1, loss.detach(), each.detach(), t
            if self.run.clip:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.run.clip)
            self.optimiser.step()
            self.optimiser.zero_grad()


def grow(training: Training, name: str, rate: float) -> None:
    """Multiply one parameter in place."""
    with torch.no_grad():
        training.model.get_parameter(name).mul_(rate)


def lr_times_30(training: Training, k: int) -> None:
    """The learning rate × 30, for good."""
    training.lr_factor = 30.0


def ramped_scalars(training: Training, k: int) -> None:
    """Each skip's learned coefficient grows by 4 % a step."""
    with torch.no_grad():
        for p in scalelong.scaling_of(training.model).parameters():  # type: ignore[union-attr]
            p.mul_(1.04)


def ramped_gate_bias(training: Training, k: int) -> None:
    """The biases of a gate without a squashing function grow by 0.1 a step."""
    with torch.no_grad():
        for gate in gates_of(training.model):
            gate.bias.add_(0.1)


def gates_of(model: nn.Module) -> list[nn.Linear]:
    """The last linear layer of each gate of LS."""
    found = {}
    for name, module in model.named_modules():
        if "skip_scal" in name and isinstance(module, nn.Linear):
            found[name.rpartition(".")[0]] = module
    return list(found.values())


def half_overflow(name: str) -> Callable[[Training, int], None]:
    """In fp16, one layer's weights grow by 15 % a step until its output leaves the range."""
    return lambda training, k: grow(training, name, 1.15)


def small_beta2(training: Training, k: int) -> None:
    """Adam forgets its second moments at once."""
    for group in training.optimiser.param_groups:
        group["betas"] = (0.9, 0.1)


def growing_layer(name: str, rate: float) -> Callable[[Training, int], None]:
    """One layer's weights grow."""
    return lambda training, k: grow(training, name, rate)


def injected_scale(name: str, factor: float) -> Callable[[Training, int], None]:
    """One layer's weights are multiplied once."""
    return lambda training, k: grow(training, name, factor) if k == 0 else None


def drifting_data(training: Training, k: int) -> None:
    """Images are normalised worse and worse: 3 % larger each step."""
    training.data_factor *= 1.03


def corrupted_batches(training: Training, k: int) -> None:
    """Every tenth batch has pixels of 0 … 255 instead of -1 … 1."""
    training.data_factor = 127.5 if k % 10 == 0 else 1.0


def noisy_targets(growth: float) -> Callable[[Training, int], None]:
    """Noise on the targets grows by a factor a step."""

    def grow(training: Training, k: int) -> None:
        training.target_noise = 0.1 * growth**k

    return grow


def residual_gain(training: Training, k: int) -> None:
    """The layers that end each residual branch grow by 2 % a step, all of them."""
    with torch.no_grad():
        for name, p in training.model.named_parameters():
            if name.endswith(("attn.proj.weight", "mlp.fc2.weight", "conv2.weight", "to_out.0.weight")):
                p.mul_(1.02)


def negative_decay(training: Training, k: int) -> None:
    """A sign error in the weight decay: weights grow by 2 % a step."""
    for group in training.optimiser.param_groups:
        group["weight_decay"] = -0.02 / group["lr"]


def rising_lr(training: Training, k: int) -> None:
    """The learning rate grows by 2 % a step."""
    training.lr_factor = 1.02**k


def wrong_sign(training: Training, k: int) -> None:
    """Gradient ascent on the outermost merging block alone."""
    block = scalelong.find_skips(training.model)[0].block
    for p in block.parameters():
        if p.grad is None and not p.__dict__.get("flipped"):
            p.__dict__["flipped"] = True
            p.register_hook(lambda g: -g)


def first_passing(losses: list[float], onset: int = ONSET, factor: float = 10.0) -> int | None:
    """The first step from the onset on with a loss over `factor` times the median of the 100 before the onset; or
    the first before it that is no number."""
    if bad := next((step for step, loss in enumerate(losses[:onset], 1) if not math.isfinite(loss)), None):
        return bad
    limit = factor * statistics.median(losses[onset - 100 : onset])
    return next((step for step in range(onset + 1, len(losses) + 1) if not losses[step - 1] <= limit), None)
