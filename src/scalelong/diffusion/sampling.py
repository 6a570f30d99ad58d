"""From noise to images, on diffusers' schedulers where they fit. Sample i of a seed is the same in any batch.

| sampler | | fits | steps |
|---|---|---|---|
| `dpm++` | DPM-Solver++, second order, deterministic: the default | all | 50 |
| `heun` | EDM's second order, deterministic | all | 35 … 79 |
| `ddim` | DDIM, deterministic | α² + σ² = 1 | 50 … 1000 |
| `ddpm` | DDPM ancestral | α² + σ² = 1 | 1000 |
| `em` | Euler-Maruyama on the reverse SDE: the paper's | vp-sde | 1000 |
| `flow-euler` | Euler along the flow | flow | 50 … 250 |

Steps are evaluations of the network.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.data.random import Stream
from scalelong.diffusion.process import NUM_TIMESTEPS, PROCESSES, VPSDE, Cosine, Flow, Process, VariancePreserving
from scalelong.diffusion.solvers import Predict, Progress, dpm, euler_maruyama, flow_euler, heun

# What a sampler fits: every process that is one of these.
_FITS: dict[str, Any] = {
    "dpm++": Process,
    "heun": Process,
    "ddim": VariancePreserving,
    "ddpm": VariancePreserving,
    "em": VPSDE,
    "flow-euler": Flow,
}
SAMPLERS = tuple(_FITS)
# Steps begin at k = 999, as the noise does. With diffusers' default few steps, or 501, begin far below it.
_FROM_THE_END = "trailing"
_MOST_UNEVEN = 1.05  # diffusers' DDIM rounds the length of its steps down, not that between their beginnings
_SOLVERS = {"dpm++": dpm, "heun": heun, "flow-euler": flow_euler}


def samplers_for(process: Process) -> list[str]:
    """Those that fit a process, the default first."""
    return [sampler for sampler, kind in _FITS.items() if isinstance(process, kind)]


def scheduler_for(process: Process, sampler: str, *, clip: bool = True) -> Any:
    """The diffusers scheduler of a sampler under a process; also what an exported pipeline carries.

    `clip` keeps the estimate of x_0 in [-1, 1]: right for pixels, not for latents.
    """
    from diffusers import DDIMScheduler, DDPMScheduler, DPMSolverMultistepScheduler

    if not isinstance(process, VariancePreserving):
        known = ", ".join(name for name, kind in PROCESSES.items() if issubclass(kind, VariancePreserving))
        raise ValueError(f"diffusers' schedulers run the processes {known}, got {process.name!r}.")
    common = {"trained_betas": process.betas().tolist(), "prediction_type": process.prediction_type}
    if sampler == "dpm++":
        # Steps even in log-SNR. Even in time, the default, the last step jumps from σ = 0.07 to 0 and takes 10 %
        # of the spread of normal data with it (docs/experiment_log.md).
        return DPMSolverMultistepScheduler(
            **common, algorithm_type="dpmsolver++", solver_order=2, use_lu_lambdas=True
        )
    if sampler == "ddim":
        return DDIMScheduler(**common, clip_sample=clip, set_alpha_to_one=True, timestep_spacing=_FROM_THE_END)
    if sampler == "ddpm":
        return DDPMScheduler(**common, clip_sample=clip, timestep_spacing=_FROM_THE_END)
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
    context: Tensor | None = None,
    null_context: Tensor | None = None,
    guidance: float = 1.0,
    clip: bool = True,
    progress: Progress = iter,
) -> Tensor:
    """Images number `indices` [B] of this seed: [B, C, H, W] in [-1, 1], or free with `clip=False` (latents).

    What to draw is told by `labels` [B], or by `context` [B, L, D], encoded text. `guidance` is the usual w:
    ε_null + w (ε_told - ε_null); the paper's s is w - 1. The null class is the model's last; the null context
    [L, D], the empty prompt's, has to be given.
    """
    check_request(process, sampler, steps, guidance, conditional=labels is not None or context is not None)
    told, null = _told(model, labels, context, null_context if guidance != 1 else None)
    predict = _guided(model, process, told, null, guidance)
    noise = Stream(seed, "sample").normal(indices, shape)
    if sampler == "em":
        assert isinstance(process, VPSDE)
        x = euler_maruyama(predict, process, noise, steps, progress, indices, seed)
    elif _on_scheduler(process, sampler):
        x = _scheduled(predict, scheduler_for(process, sampler, clip=clip), noise, steps, progress, indices, seed)
    else:
        x = _SOLVERS[sampler](predict, process, noise, steps, progress)
    check_finite(x, f"samples, after {steps} steps of {sampler},")  # clamped, an infinity would look like an image
    return x.clamp(-1, 1) if clip else x


def check_finite(images: Tensor, what: str) -> None:
    """Refuse images [B, …] of which any is not finite: as bytes they would be black, or worse."""
    bad = int((~images.isfinite()).flatten(1).any(1).sum())
    if bad:
        raise FloatingPointError(
            f"{bad:,} of {len(images):,} {what} are not finite: the weights are ruined, or far from having learned "
            "(an earlier checkpoint, another average or more steps may be better)."
        )


def _on_scheduler(process: Process, sampler: str) -> bool:
    """DPM-Solver++ is diffusers' where its steps are of use.

    Not under the cosine schedule, whose σ/α ends at 2·10⁴: a third of steps even in log-SNR would see noise alone.
    """
    if sampler == "dpm++":
        return isinstance(process, VariancePreserving) and not isinstance(process, Cosine)
    return sampler in ("ddim", "ddpm")


def _scheduled(
    predict: Predict, scheduler: Any, noise: Tensor, steps: int, progress: Progress, indices: Tensor, seed: int
) -> Tensor:
    scheduler.set_timesteps(steps)  # on the host: a scheduler that looks up a GPU's number waits for it each step
    x = noise * scheduler.init_noise_sigma
    extra = {}
    if type(scheduler).__name__ == "DDPMScheduler":  # one generator per image: its noise depends on no batch
        keys = Stream(seed, "ancestral").bits(indices, 1)[:, 0]
        extra["generator"] = [torch.Generator().manual_seed(int(key) & (2**63 - 1)) for key in keys]
    for k in progress(scheduler.timesteps):
        here = torch.full((), k.item(), dtype=k.dtype, device=x.device)
        x = scheduler.step(predict(scheduler.scale_model_input(x, k), here), k, x, **extra).prev_sample
    return x


def _told(
    model: nn.Module, labels: Tensor | None, context: Tensor | None, null_context: Tensor | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The network's arguments for what is to be drawn, and for nothing in particular."""
    if labels is not None:
        null = torch.full_like(labels, (model.config.num_class_embeds or 1) - 1)  # type: ignore[union-attr, operator, arg-type]
        return {"class_labels": labels}, {"class_labels": null}
    if context is None:
        return {}, {}
    told = {"encoder_hidden_states": context}
    return told, {} if null_context is None else {"encoder_hidden_states": null_context.expand_as(context)}


def _guided(
    model: nn.Module, process: Process, told: dict[str, Tensor], null: dict[str, Tensor], guidance: float
) -> Predict:
    """The trained target at (x_t, k). At a given x_t targets are linear in each other: guidance is one in all."""

    def predict(x: Tensor, k: Tensor) -> Tensor:
        x = process.scaled(x, k)
        if guidance == 1:
            return model(x, k, **told).sample
        both = model(torch.cat([x, x]), k, **{name: torch.cat([told[name], null[name]]) for name in told}).sample
        conditional, unconditional = both.chunk(2)
        return unconditional + guidance * (conditional - unconditional)

    return predict


def evaluations(sampler: str, steps: int) -> int:
    """How often the network is asked for one image: heun takes the odd number that is not above `steps`."""
    return steps - 1 + steps % 2 if sampler == "heun" and steps > 1 else steps


def check_request(process: Process, sampler: str, steps: int, guidance: float, conditional: bool) -> None:
    """Refuse what `sample` cannot do; `conditional` is whether it gets labels or text."""
    if sampler not in SAMPLERS:
        raise ValueError(f"unknown sampler {sampler!r}; the known ones are {', '.join(SAMPLERS)}.")
    if not isinstance(process, _FITS[sampler]):
        fits = ", ".join(name for name, kind in PROCESSES.items() if issubclass(kind, _FITS[sampler]))
        raise ValueError(
            f"the sampler {sampler!r} fits {fits}, and this model was trained on {process.name!r}; try "
            f"{' or '.join(samplers_for(process))}."
        )
    if not 1 <= steps <= NUM_TIMESTEPS:
        raise ValueError(f"steps is a whole number in 1 … {NUM_TIMESTEPS}, got {steps}.")
    if sampler == "ddim" and NUM_TIMESTEPS / steps > _MOST_UNEVEN * (NUM_TIMESTEPS // steps):
        near = min((n for n in range(1, NUM_TIMESTEPS + 1) if NUM_TIMESTEPS % n == 0), key=lambda n: abs(n - steps))
        raise ValueError(
            f"ddim takes every n-th of the {NUM_TIMESTEPS:,} steps of the training, so that {steps} of its steps "
            f"would not meet; try {near}, or dpm++, which takes any number."
        )
    if not math.isfinite(guidance):
        raise ValueError(f"guidance is a number, 1 for none, got {guidance}.")
    if guidance != 1 and not conditional:
        raise ValueError(
            f"guidance {guidance} needs class labels or text: this model is unconditional, or none were given."
        )
