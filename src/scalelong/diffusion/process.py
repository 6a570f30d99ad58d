"""Noise processes: x_t = α x_0 + σ ε (paper §2), and what a network learns about them.

A network is called with c_in x_t and a time k of about 0 … 999, as diffusers' networks expect. α and σ are
functions of k: diffusers' index in discrete time; t = (k + 1)/1000 in continuous time; σ = exp(k/250) for EDM.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from scalelong.diffusion.targets import SIGMA_DATA, per_image, target_from
from scalelong.diffusion.weightings import Weighting, parse_weighting, weight_on_target

NUM_TIMESTEPS = 1000
_EDM_TIME = 1000 / 4  # EDM's c_noise = ¼ ln σ, times 1000 as the networks here tell times about 1 apart


class Example(NamedTuple):
    """What one step of training sees."""

    inputs: Tensor  # c_in x_t, [B, C, H, W]
    target: Tensor  # [B, C, H, W]
    weights: Tensor | None  # [B]; None where all are 1


class Process(ABC):
    """α, σ and c_in as functions of k; the times of training; and the target and weighting that are trained."""

    name: ClassVar[str]
    targets: ClassVar[tuple[str, ...]]  # those that fit, the default first
    target: str
    weighting = Weighting()

    @abstractmethod
    def timesteps(self, uniforms: Tensor) -> Tensor:
        """[B] in [0, 1) -> [B], the time k at which each image is noised in training."""

    @abstractmethod
    def alpha_sigma(self, timesteps: Tensor) -> tuple[Tensor, Tensor]:
        """α and σ at time k, float64."""

    @abstractmethod
    def timestep_at(self, ratio: float) -> float:
        """The time k at which σ/α is this: the inverse that solvers of our own step by."""

    def input_scale(self, timesteps: Tensor) -> Tensor | None:
        """c_in, where the network does not see x_t itself."""
        return None

    def scaled(self, noised: Tensor, timesteps: Tensor) -> Tensor:
        """c_in x_t: what the network sees of x_t at one time, or at [B] of them."""
        scale = self.input_scale(timesteps)
        return noised if scale is None else noised * per_image(scale, noised)

    def noised(self, images: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """x_t for images x_0, [B, C, H, W]."""
        alpha, sigma = (per_image(c, images) for c in self.alpha_sigma(timesteps))
        return alpha * images + sigma * noise

    def example(self, images: Tensor, noise: Tensor, timesteps: Tensor) -> Example:
        """A batch to learn from. Operations on the device alone."""
        alpha, sigma = self.alpha_sigma(timesteps)
        weights = weight_on_target(self.weighting, self.target, alpha, sigma)
        return Example(
            self.scaled(self.noised(images, noise, timesteps), timesteps),
            target_from(self.target, images, noise, alpha, sigma),
            None if weights is None else weights.to(images.dtype),
        )

    def learning(self, target: str = "auto", weighting: str = "plain") -> Self:
        """This process with another target or weighting; "auto" is the process's own target."""
        parsed = parse_weighting(weighting)
        if target == "auto":
            target = self.targets[0]
        if target not in self.targets:
            raise ValueError(
                f"the targets that fit process={self.name} are {', '.join(self.targets)}, got {target!r}; "
                "target=auto takes the first."
            )
        if parsed.name == "edm" and target in ("epsilon", "x0") and self.name != "edm":
            raise ValueError(
                f"weighting=edm has no bound for process={self.name} with target={target}: it grows as 1/SNR on "
                "the noise, as SNR on the image; use another weighting, a target between the two, or process=edm."
            )
        self.target, self.weighting = target, parsed
        return self

    def to(self, device: torch.device) -> Self:
        """Keep what tables there are on this device: a captured graph cannot fetch them."""
        return self


class VariancePreserving(Process):
    """α² + σ² = 1: what diffusers' schedulers know."""

    targets = ("epsilon", "x0", "v")
    target = "epsilon"

    @abstractmethod
    def log_alpha(self, timesteps: Tensor) -> Tensor:
        """ln α at time k, float64."""

    def alpha_sigma(self, timesteps: Tensor) -> tuple[Tensor, Tensor]:
        """σ is exact where it is small, too."""
        log_alpha = self.log_alpha(timesteps.to(torch.float64))
        return log_alpha.exp(), (-torch.expm1(2 * log_alpha)).sqrt()

    @property
    def prediction_type(self) -> str:
        """The target's name in diffusers' schedulers."""
        return {"epsilon": "epsilon", "x0": "sample", "v": "v_prediction"}[self.target]

    def betas(self) -> Tensor:
        """The 1000 steps that a diffusers scheduler takes as `trained_betas`: 1 - ᾱ_k / ᾱ_(k-1)."""
        log_alpha = self.log_alpha(torch.arange(NUM_TIMESTEPS, dtype=torch.float64)).cpu()
        before = torch.cat([torch.zeros(1, dtype=torch.float64), log_alpha[:-1]])
        return -torch.expm1(2 * (log_alpha - before))


class VPSDE(VariancePreserving):
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

    def timestep_at(self, ratio: float) -> float:
        """The root of ¼ t² (β_max - β_min) + ½ t β_min = ½ ln(1 + ratio²)."""
        integral, rise = math.log1p(ratio**2), self.beta_max - self.beta_min
        t = 2 * integral / (self.beta_min + math.sqrt(self.beta_min**2 + 2 * rise * integral))
        return NUM_TIMESTEPS * t - 1

    def beta(self, t: float) -> float:
        """β(t), for the reverse SDE."""
        return self.beta_min + t * (self.beta_max - self.beta_min)


class Discrete(VariancePreserving):
    """1000 steps given by their β. Between two of them, where a solver may ask, ln α is interpolated."""

    def __init__(self, betas: Tensor) -> None:
        self._log_alpha = 0.5 * torch.log1p(-betas).cumsum(0)  # on the host
        self._copies: dict[torch.device, Tensor] = {}  # kept: a captured graph may read one

    def to(self, device: torch.device) -> Self:
        """The table of ᾱ."""
        self._table(device)
        return self

    def _table(self, device: torch.device) -> Tensor:
        if device not in self._copies:
            self._copies[device] = self._log_alpha.to(device)
        return self._copies[device]

    def timesteps(self, uniforms: Tensor) -> Tensor:
        """Each k with the same probability."""
        return (uniforms * NUM_TIMESTEPS).long().clamp(max=NUM_TIMESTEPS - 1)

    def log_alpha(self, timesteps: Tensor) -> Tensor:
        """½ ln ᾱ_k from the table."""
        table, below = self._table(timesteps.device), timesteps.floor().long().clamp(0, NUM_TIMESTEPS - 2)
        return torch.lerp(table[below], table[below + 1], timesteps - below)

    def timestep_at(self, ratio: float) -> float:
        """Where the table has ln α = -½ ln(1 + ratio²)."""
        table, wanted = self._log_alpha, -0.5 * math.log1p(ratio**2)
        below = min(max(int((table > wanted).sum()) - 1, 0), NUM_TIMESTEPS - 2)
        here, there = table[below].item(), table[below + 1].item()
        return min(max(below + (wanted - here) / (there - here), 0.0), NUM_TIMESTEPS - 1.0)


class DDPM(Discrete):
    """β linear from 1e-4 to 0.02 (Ho et al. 2020)."""

    name = "ddpm"

    def __init__(self, beta_start: float = 1e-4, beta_end: float = 0.02) -> None:
        super().__init__(torch.linspace(beta_start, beta_end, NUM_TIMESTEPS, dtype=torch.float64))


class StableDiffusion(Discrete):
    """√β linear, from β = 0.00085 to 0.012 (Rombach et al. 2022)."""

    name = "sd"

    def __init__(self, beta_start: float = 0.00085, beta_end: float = 0.012) -> None:
        roots = torch.linspace(math.sqrt(beta_start), math.sqrt(beta_end), NUM_TIMESTEPS, dtype=torch.float64)
        super().__init__(roots**2)


class Cosine(Discrete):
    """ᾱ = f(t)/f(0) with f(t) = cos²(½π (t + s)/(1 + s)), s = 0.008, β at most 0.999 (Nichol & Dhariwal 2021)."""

    name = "cosine"

    def __init__(self, offset: float = 0.008, most: float = 0.999) -> None:
        t = torch.arange(NUM_TIMESTEPS + 1, dtype=torch.float64) / NUM_TIMESTEPS
        f = torch.cos(0.5 * math.pi * (t + offset) / (1 + offset)) ** 2
        super().__init__((1 - f[1:] / f[:-1]).clamp(max=most))


class EDM(Process):
    """α = 1, ln σ ~ N(-1.2, 1.2²); the network sees x_t/√(σ² + σ_d²) and 1000 · ¼ ln σ (Karras et al. 2022)."""

    name = "edm"
    targets = ("edm", "x0", "epsilon")
    target = "edm"

    def __init__(self, mean: float = -1.2, deviation: float = 1.2) -> None:
        self.mean = mean
        self.deviation = deviation

    def timesteps(self, uniforms: Tensor) -> Tensor:
        """k = 250 ln σ."""
        log_sigma = self.mean + self.deviation * _normal_quantile(uniforms)
        return (_EDM_TIME * log_sigma).to(uniforms.dtype)

    def alpha_sigma(self, timesteps: Tensor) -> tuple[Tensor, Tensor]:
        """1 and exp(k/250)."""
        sigma = (timesteps.to(torch.float64) / _EDM_TIME).exp()
        return torch.ones_like(sigma), sigma

    def timestep_at(self, ratio: float) -> float:
        """250 ln σ."""
        return _EDM_TIME * math.log(ratio)

    def input_scale(self, timesteps: Tensor) -> Tensor | None:
        """c_in = 1/√(σ² + σ_d²)."""
        _, sigma = self.alpha_sigma(timesteps)
        return (sigma**2 + SIGMA_DATA**2).rsqrt()


class Flow(Process):
    """x_t = (1 - t) x_0 + t ε, t ~ U[0, 1) (Liu et al. 2022)."""

    name = "flow"
    targets = ("velocity", "x0")  # not ε: at t = 1, where sampling begins, it says nothing about the image
    target = "velocity"

    def timesteps(self, uniforms: Tensor) -> Tensor:
        """k = 1000 t - 1."""
        return NUM_TIMESTEPS * uniforms - 1

    def alpha_sigma(self, timesteps: Tensor) -> tuple[Tensor, Tensor]:
        """1 - t and t."""
        t = (timesteps.to(torch.float64) + 1) / NUM_TIMESTEPS
        return 1 - t, t

    def timestep_at(self, ratio: float) -> float:
        """t = ratio/(1 + ratio)."""
        return NUM_TIMESTEPS * ratio / (1 + ratio) - 1


class LogitNormalFlow(Flow):
    """The same with logit t ~ N(0, 1): more of the middle, where velocities are hard (Esser et al. 2024)."""

    name = "flow:logit-normal"

    def timesteps(self, uniforms: Tensor) -> Tensor:
        """k = 1000 t - 1."""
        return (NUM_TIMESTEPS * _normal_quantile(uniforms).sigmoid() - 1).to(uniforms.dtype)


PROCESSES: dict[str, type[Process]] = {
    "vp-sde": VPSDE,
    "ddpm": DDPM,
    "sd": StableDiffusion,
    "cosine": Cosine,
    "edm": EDM,
    "flow": Flow,
    "flow:logit-normal": LogitNormalFlow,
}


def process_named(name: str, target: str = "auto", weighting: str = "plain") -> Process:
    """Build a process that learns a target under a weighting; what is unknown or does not fit gets the list."""
    if name not in PROCESSES:
        raise ValueError(f"unknown noise process {name!r}; the known ones are {', '.join(PROCESSES)}.")
    return PROCESSES[name]().learning(target, weighting)


def mean_square_norm(process: Process, second_moment: float) -> float:
    """E‖x_t‖²/m = moment · E α² + E σ² for data with E‖x_0‖²/m = moment.

    Lemma 3.2: 1 - (1 - moment) E ᾱ where α² + σ² = 1.
    """
    k = process.timesteps((torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000)
    alpha, sigma = process.alpha_sigma(k)
    return math.fsum((alpha**2 * second_moment + sigma**2).tolist()) / len(k)


def _normal_quantile(uniforms: Tensor) -> Tensor:
    """[0, 1) -> standard normal, float64; the uniforms are multiples of 2^-24, and half of that keeps 0 finite."""
    return math.sqrt(2) * torch.erfinv(2 * (uniforms.to(torch.float64) + 2.0**-25) - 1)
