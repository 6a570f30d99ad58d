"""From noise to images, on diffusers' schedulers. Sample i of a seed is the same in any batch.

| sampler | | steps |
|---|---|---|
| `dpm++` | DPM-Solver++, second order, deterministic: the default | 50 |
| `ddim` | DDIM, deterministic | 50 … 1000 |
| `ddpm` | DDPM ancestral | 1000 |
| `em` | Euler-Maruyama on the reverse SDE: the paper's, VP-SDE alone | 1000 |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.data.random import Stream
from scalelong.diffusion.process import NUM_TIMESTEPS, VPSDE, Process

SAMPLERS = ("dpm++", "ddim", "ddpm", "em")
Progress = Callable[[Iterable[Any]], Iterable[Any]]
_EM_END = 1e-3  # the reverse SDE stops here: at 0 the score is not defined


def scheduler_for(process: Process, sampler: str) -> Any:
    """The diffusers scheduler of a sampler under a process; also what an exported pipeline carries."""
    from diffusers import DDIMScheduler, DDPMScheduler, DPMSolverMultistepScheduler

    common = {"trained_betas": process.betas().tolist(), "prediction_type": process.prediction_type}
    if sampler == "dpm++":
        # Steps even in log-SNR. Even in time, the default, the last step jumps from σ = 0.07 to 0 and takes 10 %
        # of the spread of normal data with it (docs/experiment_log.md).
        return DPMSolverMultistepScheduler(
            **common, algorithm_type="dpmsolver++", solver_order=2, use_lu_lambdas=True
        )
    if sampler == "ddim":
        return DDIMScheduler(**common, clip_sample=True, set_alpha_to_one=True)
    if sampler == "ddpm":
        return DDPMScheduler(**common, clip_sample=True)
    raise ValueError(f"the samplers on diffusers' schedulers are dpm++, ddim and ddpm, got {sampler!r}.")


@torch.no_grad()
def sample(
    model: nn.Module,
    process: Process,
    indices: Tensor,
    shape: tuple[int, int, int],
    *,
    seed: int = 0,
    sampler: str = "dpm++",
    steps: int = 50,
    labels: Tensor | None = None,
    guidance: float = 1.0,
    progress: Progress = iter,
) -> Tensor:
    """Images number `indices` [B] of this seed: [B, C, H, W] in [-1, 1].

    `guidance` is the usual w: ε_null + w (ε_class - ε_null); the paper's s is w - 1. The null class is the
    model's last.
    """
    check_request(process, sampler, steps, guidance, conditional=labels is not None)
    predict = _guided(model, labels, guidance)
    x = Stream(seed, "sample").normal(indices, shape)
    if sampler == "em":
        return _euler_maruyama(predict, process, x, indices, seed, steps, progress).clamp(-1, 1)  # type: ignore[arg-type]
    scheduler = scheduler_for(process, sampler)
    scheduler.set_timesteps(steps, device=x.device)
    x = x * scheduler.init_noise_sigma
    generators = None
    if sampler == "ddpm":  # one generator per image, so that its noise does not depend on the batch
        keys = Stream(seed, "ancestral").bits(indices, 1)[:, 0]
        generators = [torch.Generator().manual_seed(int(key) & (2**63 - 1)) for key in keys]
    extra = {"generator": generators} if generators is not None else {}
    for k in progress(scheduler.timesteps):
        epsilon = predict(scheduler.scale_model_input(x, k), k)
        x = scheduler.step(epsilon, k, x, **extra).prev_sample
    return x.clamp(-1, 1)


def _guided(model: nn.Module, labels: Tensor | None, guidance: float) -> Callable[[Tensor, Any], Tensor]:
    def predict(x: Tensor, k: Any) -> Tensor:
        k = torch.as_tensor(k, device=x.device)
        if labels is None:
            return model(x, k).sample
        if guidance == 1:
            return model(x, k, class_labels=labels).sample
        null = torch.full_like(labels, model.config.num_class_embeds - 1)  # type: ignore[union-attr, operator, arg-type]
        both = model(torch.cat([x, x]), k, class_labels=torch.cat([labels, null])).sample
        conditional, unconditional = both.chunk(2)
        return unconditional + guidance * (conditional - unconditional)

    return predict


def _euler_maruyama(
    predict: Callable[[Tensor, Any], Tensor],
    process: VPSDE,
    x: Tensor,
    indices: Tensor,
    seed: int,
    steps: int,
    progress: Progress,
) -> Tensor:
    """dx = [-½ β x - β ∇log p] dt + √β dw from t = 1 to 1e-3, with ∇log p = -ε/σ."""
    dt = (1 - _EM_END) / steps
    for i in progress(range(steps)):
        t = 1 - i * dt
        k = torch.tensor(NUM_TIMESTEPS * t - 1, device=x.device)
        _, sigma = process.alpha_sigma(k)
        beta = process.beta(t)
        drift = -0.5 * beta * x + beta * predict(x, k) / sigma.item()
        x = x - drift * dt
        if i < steps - 1:
            x = x + math.sqrt(beta * dt) * Stream(seed, f"sde step {i}").normal(indices, tuple(x.shape[1:]))
    return x


def check_request(process: Process, sampler: str, steps: int, guidance: float, conditional: bool) -> None:
    """Refuse what `sample` cannot do; `conditional` is whether it gets labels."""
    if sampler not in SAMPLERS:
        raise ValueError(f"unknown sampler {sampler!r}; the known ones are {', '.join(SAMPLERS)}.")
    if sampler == "em" and not isinstance(process, VPSDE):
        raise ValueError(
            f"the sampler 'em' solves the VP-SDE, and this model was trained on {process.name!r}; try 'dpm++'."
        )
    if not 1 <= steps <= NUM_TIMESTEPS:
        raise ValueError(f"steps is a whole number in 1 … {NUM_TIMESTEPS}, got {steps}.")
    if not math.isfinite(guidance):
        raise ValueError(f"guidance is a number, 1 for none, got {guidance}.")
    if guidance != 1 and not conditional:
        raise ValueError(
            f"guidance {guidance} needs class labels: this model is unconditional, or none were given."
        )
