"""Samplers against a case with a known answer: data that is itself normal, where the best prediction is linear."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from scalelong.diffusion.process import DDPM, NUM_TIMESTEPS, VPSDE
from scalelong.diffusion.sampling import SAMPLERS, sample, scheduler_for

MEAN, STD = 0.2, 0.15


class GaussianOracle(nn.Module):
    """E[ε | x_t] for x_0 ~ N(mean, std²) per pixel; classes shift the mean."""

    def __init__(self, process, shifts=(0.0,)):
        super().__init__()
        self.process, self.shifts = process, torch.tensor(shifts)
        self.config = SimpleNamespace(num_class_embeds=len(shifts))

    def forward(self, x, k, class_labels=None):
        alpha, sigma = (c.item() for c in self.process.alpha_sigma(k))
        mean = MEAN + (self.shifts[class_labels][:, None, None, None] if class_labels is not None else 0.0)
        return SimpleNamespace(sample=sigma * (x - alpha * mean) / (alpha**2 * STD**2 + sigma**2))


CASES = [(s, VPSDE()) for s in SAMPLERS] + [(s, DDPM()) for s in SAMPLERS if s != "em"]


@pytest.mark.parametrize(("sampler", "process"), CASES, ids=lambda v: getattr(v, "name", v))
def test_samples_have_the_datas_mean_and_spread(sampler, process):
    steps = {"dpm++": 50, "ddim": 250, "ddpm": 1000, "em": 1000}[sampler]
    x = sample(GaussianOracle(process), process, torch.arange(64), (1, 8, 8), sampler=sampler, steps=steps)
    n = x.numel()
    assert abs(x.mean() - MEAN) < 5 * STD / math.sqrt(n) + 0.005
    assert abs(x.std() / STD - 1) < 0.05


@pytest.mark.parametrize(("sampler", "process"), CASES, ids=lambda v: getattr(v, "name", v))
def test_a_sample_depends_on_seed_and_index_alone(sampler, process):
    model = GaussianOracle(process)
    how = dict(shape=(1, 4, 4), sampler=sampler, steps=20)
    whole = sample(model, process, torch.arange(6), seed=1, **how)
    part = sample(model, process, torch.tensor([4, 1]), seed=1, **how)
    torch.testing.assert_close(part, whole[[4, 1]])
    assert not torch.allclose(sample(model, process, torch.arange(6), seed=2, **how), whole)


def test_guidance_extrapolates_from_the_null_class():
    process = VPSDE()
    model = GaussianOracle(process, shifts=(0.3, -0.3, 0.0))  # the last is null
    means = {}
    for guidance in (1.0, 2.0):
        labels = torch.tensor([0] * 32 + [1] * 32)
        x = sample(model, process, torch.arange(64), (1, 8, 8), labels=labels, guidance=guidance)
        means[guidance] = (x[:32].mean().item() - x[32:].mean().item()) / 2
    assert abs(means[1.0] - 0.3) < 0.02
    assert abs(means[2.0] - 0.6) < 0.04  # the linear case: w times the shift


def test_schedulers_carry_the_process():
    for process in (DDPM(), VPSDE()):
        alpha, _ = process.alpha_sigma(torch.arange(NUM_TIMESTEPS))
        for sampler in ("dpm++", "ddim", "ddpm"):
            scheduler = scheduler_for(process, sampler)
            torch.testing.assert_close(scheduler.alphas_cumprod, (alpha**2).float(), rtol=1e-3, atol=1e-6)


def test_progress_sees_every_step():
    seen = []
    sample(
        GaussianOracle(DDPM()),
        DDPM(),
        torch.arange(1),
        (1, 2, 2),
        steps=7,
        progress=lambda it: (seen.append(k) or k for k in it),
    )
    assert len(seen) == 7


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (dict(sampler="euler"), "unknown sampler 'euler'; the known ones are dpm"),
        (dict(sampler="em"), "solves the VP-SDE, and this model was trained on 'ddpm'"),
        (dict(steps=0), "1 … 1000, got 0"),
        (dict(guidance=2.0), "guidance 2.0 needs class labels"),
    ],
)
def test_bad_requests(how, says):
    with pytest.raises(ValueError, match=says):
        sample(GaussianOracle(DDPM()), DDPM(), torch.arange(1), (1, 2, 2), **how)
