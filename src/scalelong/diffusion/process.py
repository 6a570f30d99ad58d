"""Noise processes: x_t = α_t x_0 + σ_t ε (paper §2). A network is called with diffusers' index k = 0 … 999.

Continuous processes use fractional k: it carries the noise of t = (k + 1)/1000.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Self

import torch
from torch import Tensor

NUM_TIMESTEPS = 1000


class Process(ABC):
    """A variance-preserving process with noise prediction. Others add a target by overriding `target`."""

    name: str
    prediction_type = "epsilon"

    @abstractmethod
    def timesteps(self, uniforms: Tensor) -> Tensor:
        """[B] in [0, 1) -> [B], the index k at which each image is noised in training."""

    @abstractmethod
    def log_alpha(self, timesteps: Tensor) -> Tensor:
        """ln α at index k, float64."""

    def alpha_sigma(self, timesteps: Tensor) -> tuple[Tensor, Tensor]:
        """α and σ at index k, α² + σ² = 1, float64. σ is exact where it is small, too."""
        log_alpha = self.log_alpha(timesteps.to(torch.float64))
        return log_alpha.exp(), (-torch.expm1(2 * log_alpha)).sqrt()

    def noised(self, images: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """x_t for images x_0, [B, C, H, W]."""
        alpha, sigma = (c.to(images.dtype)[:, None, None, None] for c in self.alpha_sigma(timesteps))
        return alpha * images + sigma * noise

    def target(self, images: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """What the network is to predict."""
        return noise

    def to(self, device: torch.device) -> Self:
        """Keep what tables there are on this device: a captured graph cannot fetch them."""
        return self

    def betas(self) -> Tensor:
        """The 1000 steps that a diffusers scheduler takes as `trained_betas`: 1 - ᾱ_k / ᾱ_(k-1)."""
        log_alpha = self.log_alpha(torch.arange(NUM_TIMESTEPS, dtype=torch.float64)).cpu()
        before = torch.cat([torch.zeros(1, dtype=torch.float64), log_alpha[:-1]])
        return -torch.expm1(2 * (log_alpha - before))


class VPSDE(Process):
    """Continuous: dx = -½ β(t) x dt + √β(t) dw with β from 0.1 to 20, t ~ U[0, 1] (Song et al. 2021)."""

    name = "vp-sde"

    def __init__(self, beta_min: float = 0.1, beta_max: float = 20.0) -> None:
        self.beta_min = beta_min
        self.beta_max = beta_max

    def timesteps(self, uniforms: Tensor) -> Tensor:
        """k = 1000 t - 1."""
        return NUM_TIMESTEPS * uniforms - 1

    def log_alpha(self, timesteps: Tensor) -> Tensor:
        """-½ ∫β = -¼ t² (β_max - β_min) - ½ t β_min."""
        t = (timesteps + 1) / NUM_TIMESTEPS
        return -0.25 * t**2 * (self.beta_max - self.beta_min) - 0.5 * t * self.beta_min

    def beta(self, t: float) -> float:
        """β(t), for the reverse SDE."""
        return self.beta_min + t * (self.beta_max - self.beta_min)


class DDPM(Process):
    """Discrete: 1000 steps, β linear from 1e-4 to 0.02 (Ho et al. 2020)."""

    name = "ddpm"

    def __init__(self, beta_start: float = 1e-4, beta_end: float = 0.02) -> None:
        betas = torch.linspace(beta_start, beta_end, NUM_TIMESTEPS, dtype=torch.float64)
        self._log_alpha = 0.5 * torch.log1p(-betas).cumsum(0)

    def to(self, device: torch.device) -> Self:
        """The table of ᾱ."""
        self._log_alpha = self._log_alpha.to(device)
        return self

    def timesteps(self, uniforms: Tensor) -> Tensor:
        """Each k with the same probability."""
        return (uniforms * NUM_TIMESTEPS).long().clamp(max=NUM_TIMESTEPS - 1)

    def log_alpha(self, timesteps: Tensor) -> Tensor:
        """½ ln ᾱ_k from the table."""
        return self._log_alpha.to(timesteps.device)[timesteps.long()]


PROCESSES: dict[str, type[Process]] = {"vp-sde": VPSDE, "ddpm": DDPM}


def process_named(name: str) -> Process:
    """Build a process; an unknown name gets the list."""
    if name not in PROCESSES:
        raise ValueError(f"unknown noise process {name!r}; the known ones are {', '.join(PROCESSES)}.")
    return PROCESSES[name]()


def mean_square_norm(process: Process, second_moment: float) -> float:
    """E‖x_t‖²/m for data with E‖x_0‖²/m = `second_moment` (Lemma 3.2): 1 - (1 - moment) E ᾱ."""
    k = process.timesteps((torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000)
    alpha, _ = process.alpha_sigma(k)
    return 1 - (1 - second_moment) * math.fsum((alpha**2).tolist()) / len(k)
