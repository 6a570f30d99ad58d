"""Solvers of our own, where diffusers has none that fits every process here.

With x = x_t/α and ρ = σ/α every process has the same flow of probability, dx/dρ = ε(x, ρ) (Karras et al. 2022, §2),
so that `heun` and `dpm` are written once. `steps` counts evaluations of the network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from scalelong.data.random import Stream
from scalelong.diffusion.process import NUM_TIMESTEPS, VPSDE, Process
from scalelong.diffusion.targets import converted, images_from, noise_from

Predict = Callable[[Tensor, Tensor], Tensor]  # (x_t, k) -> the trained target
Progress = Callable[[Iterable[Any]], Iterable[Any]]

EDM_SIGMAS = (0.002, 80.0)  # EDM's σ_min and σ_max
_KARRAS = 7  # EDM's exponent: steps shorten towards the image
_EM_END = 1e-3  # the reverse SDE stops here: at 0 the score is not defined


def heun(predict: Predict, process: Process, noise: Tensor, steps: int, progress: Progress) -> Tensor:
    """EDM's deterministic sampler (Algorithm 1): each step's slope is averaged with the slope at its end.

    A step evaluates the network twice, the last one once: EDM's 18 steps are `steps=35`.
    """
    ratios = karras_ratios(process, (steps + 1) // 2)
    x, slope, ahead = noise * ratios[0], noise, noise
    for i in progress(range(2 * len(ratios) - 3)):
        here, there = ratios[i // 2], ratios[i // 2 + 1]
        if i % 2 == 0:
            slope = _part(noise_from, predict, process, x, here)
            ahead = x + (there - here) * slope
        else:
            x = x + (there - here) * (slope + _part(noise_from, predict, process, ahead, there)) / 2
    return ahead  # the last step is Euler's: at ρ = 0 there is no slope


def dpm(predict: Predict, process: Process, noise: Tensor, steps: int, progress: Progress) -> Tensor:
    """DPM-Solver++(2M), steps even in log-SNR (Lu et al. 2022): exact for an x_0 that is linear in λ = -ln ρ."""
    ratios = even_ratios(process, steps)
    x, last, last_step = noise * ratios[0], None, 0.0
    for i in progress(range(steps)):
        here, there = ratios[i], ratios[i + 1]
        images = _part(images_from, predict, process, x, here)
        estimate = images
        if last is not None and there > 0:  # the step to ρ = 0 is infinite in λ, and of first order
            step = math.log(here / there)
            estimate = images + step / (2 * last_step) * (images - last)
        x = there / here * x + (1 - there / here) * estimate
        last, last_step = images, math.log(here / there) if there > 0 else math.inf
    return x


def flow_euler(predict: Predict, process: Process, noise: Tensor, steps: int, progress: Progress) -> Tensor:
    """dx/dt = ε - x_0 from t = 1 to 0 in even steps of Euler's: exact where the flow is straight."""
    x = noise
    for i in progress(range(steps)):
        k = _at(NUM_TIMESTEPS * (1 - i / steps) - 1, x)
        velocity = converted(predict(x, k), process.target, "velocity", x, *process.alpha_sigma(k))
        x = x - velocity / steps
    return x


def euler_maruyama(
    predict: Predict, process: VPSDE, noise: Tensor, steps: int, progress: Progress, indices: Tensor, seed: int
) -> Tensor:
    """dx = [-½ β x - β ∇log p] dt + √β dw from t = 1 to 1e-3, with ∇log p = -ε/σ."""
    x, dt = noise, (1 - _EM_END) / steps
    for i in progress(range(steps)):
        t = 1 - i * dt
        k = _at(NUM_TIMESTEPS * t - 1, x)
        alpha, sigma = process.alpha_sigma(k)
        beta = process.beta(t)
        epsilon = noise_from(process.target, predict(x, k), x, alpha, sigma)
        drift = -0.5 * beta * x + beta * epsilon / sigma.item()
        x = x - drift * dt
        if i < steps - 1:
            x = x + math.sqrt(beta * dt) * Stream(seed, f"sde step {i}").normal(indices, tuple(x.shape[1:]))
    return x


def karras_ratios(process: Process, count: int) -> list[float]:
    """`count` values of ρ, even in ρ^(1/7), and 0 (Karras et al. 2022, Eq. 5)."""
    low, high = (ratio ** (1 / _KARRAS) for ratio in ratio_range(process))
    return [*((high + (low - high) * i / max(count - 1, 1)) ** _KARRAS for i in range(count)), 0.0]


def even_ratios(process: Process, count: int) -> list[float]:
    """`count` values of ρ, even in ln ρ, and 0."""
    low, high = ratio_range(process)
    return [*(high * (low / high) ** (i / max(count - 1, 1)) for i in range(count)), 0.0]


def ratio_range(process: Process) -> tuple[float, float]:
    """Least and greatest ρ to solve between: EDM's, or those at k = 0 and 999 where these are less far apart."""
    if process.name == "edm":
        return EDM_SIGMAS
    alpha, sigma = process.alpha_sigma(torch.tensor([0.0, NUM_TIMESTEPS - 1.0], dtype=torch.float64))
    ends = [s / a if a > 0 else math.inf for a, s in zip(alpha.tolist(), sigma.tolist(), strict=True)]
    return max(EDM_SIGMAS[0], ends[0]), min(EDM_SIGMAS[1], ends[1])


def _part(part_from: Callable[..., Tensor], predict: Predict, process: Process, x: Tensor, ratio: float) -> Tensor:
    """x_0 or ε as the network sees it in x = x_t/α where σ/α is `ratio`."""
    k = _at(process.timestep_at(ratio), x)
    alpha, sigma = process.alpha_sigma(k)
    noised = x * alpha.to(x.dtype)
    return part_from(process.target, predict(noised, k), noised, alpha, sigma)


def _at(timestep: float, x: Tensor) -> Tensor:
    return torch.full((), timestep, device=x.device)  # filled there: a copy from the host would wait
