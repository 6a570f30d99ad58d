"""Samplers against a case with a known answer: data that is itself normal, where the best prediction is linear."""

import math
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from scalelong.diffusion.process import DDPM, EDM, NUM_TIMESTEPS, PROCESSES, VPSDE, Flow, process_named
from scalelong.diffusion.sampling import SAMPLERS, sample, samplers_for, scheduler_for
from scalelong.diffusion.solvers import even_ratios, karras_ratios
from scalelong.diffusion.targets import per_image, target_from

MEAN, STD = 0.2, 0.15


class GaussianOracle(nn.Module):
    """The best prediction of the process's target for x_0 ~ N(mean, std²) per pixel; classes shift the mean."""

    def __init__(self, process, shifts=(0.0,)):
        super().__init__()
        self.process, self.shifts = process, torch.tensor(shifts)
        self.config = SimpleNamespace(num_class_embeds=len(shifts))

    def forward(self, x, k, class_labels=None):
        alpha, sigma = self.process.alpha_sigma(k)
        scale = self.process.input_scale(k)
        x = x.double() if scale is None else x.double() / per_image(scale, x.double())
        mean = MEAN + (self.shifts[class_labels][:, None, None, None] if class_labels is not None else 0.0)
        surprise = (x - alpha * mean) / (alpha**2 * STD**2 + sigma**2)
        images, noise = mean + alpha * STD**2 * surprise, sigma * surprise
        return SimpleNamespace(sample=target_from(self.process.target, images, noise, alpha, sigma).float())


CASES = [
    (sampler, name, target)
    for name, kind in PROCESSES.items()
    for sampler in samplers_for(kind())
    for target in kind.targets
    if sampler not in ("ddpm", "em") or target == kind.targets[0] or name == "vp-sde"  # the slow ones
]
STEPS = {"dpm++": 50, "heun": 79, "ddim": 500, "ddpm": 1000, "em": 1000, "flow-euler": 100}


@pytest.mark.parametrize(("sampler", "name", "target"), CASES)
def test_samples_have_the_datas_mean_and_spread(sampler, name, target):
    process = process_named(name, target)
    how = dict(sampler=sampler, steps=STEPS[sampler])
    x = sample(GaussianOracle(process), process, torch.arange(64), (1, 8, 8), **how)
    n = x.numel()
    assert abs(x.mean() - MEAN) < 5 * STD / math.sqrt(n) + 0.005
    # DDPM's variance is the one for a single image, which tells at sd's first step of σ = 0.03.
    assert abs(x.std() / STD - 1) < (0.07 if (sampler, name) == ("ddpm", "sd") else 0.05)


@pytest.mark.parametrize(
    ("sampler", "steps"), [("ddim", 30), ("ddim", 47), ("ddim", 500), ("ddpm", 501), ("ddpm", 650)]
)
def test_steps_begin_where_the_noise_does(sampler, steps):
    """Begun at k = 500, noise of size 1 would be taken for a noised image, and the mean be lost."""
    process = DDPM()
    scheduler = scheduler_for(process, sampler)
    scheduler.set_timesteps(steps)
    assert scheduler.timesteps[0] == NUM_TIMESTEPS - 1
    x = sample(GaussianOracle(process), process, torch.arange(64), (1, 8, 8), sampler=sampler, steps=steps)
    assert abs(x.mean() - MEAN) < 5 * STD / math.sqrt(x.numel()) + 0.005


@pytest.mark.parametrize(
    ("sampler", "name"), [(s, name) for s, name, target in CASES if target == PROCESSES[name].targets[0]]
)
def test_a_sample_depends_on_seed_and_index_alone(sampler, name):
    process = process_named(name)
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


def exact(process, noise, ratios):
    """The flow of normal data from the first ratio to ρ = 0: x = x_t/α keeps (x - mean)/√(std² + ρ²)."""
    return MEAN + STD * (noise * ratios[0] - MEAN) / math.hypot(STD, ratios[0])


@pytest.mark.parametrize("name", ["vp-sde", "cosine", "edm", "flow"])
def test_the_solvers_are_of_second_order(name):
    process = process_named(name)
    noise = sampled_noise(16)
    how = dict(indices=torch.arange(16), shape=(1, 2, 2), clip=False)
    for sampler, steps, ratios in (("heun", (31, 63, 127), karras_ratios), ("dpm++", (32, 64, 128), even_ratios)):
        want = exact(process, noise, ratios(process, 2))
        if sampler == "dpm++" and name == "vp-sde":
            continue  # diffusers' own
        errors = [
            (sample(GaussianOracle(process), process, sampler=sampler, steps=n, **how) - want).abs().mean().item()
            for n in steps
        ]
        # What the last step to ρ = 0 leaves out does not shrink: it is the same in all, and small.
        assert errors[0] - errors[2] > 3 * (errors[1] - errors[2]), (sampler, errors)
        assert errors[2] < 0.01


def sampled_noise(count):
    from scalelong.data.random import Stream

    return Stream(0, "sample").normal(torch.arange(count), (1, 2, 2))


def test_heun_is_that_of_diffusers():
    from diffusers import HeunDiscreteScheduler

    process = DDPM()
    model = GaussianOracle(process)
    # Of its fractional timesteps diffusers' scheduler interpolates ln ρ, ours ln α: hence the tolerance.
    scheduler = HeunDiscreteScheduler(trained_betas=process.betas().tolist(), use_karras_sigmas=True)
    scheduler.set_timesteps(18)
    low, high = karras_ratios(process, 2)[1], karras_ratios(process, 2)[0]
    assert (scheduler.sigmas[-2].item(), high) == pytest.approx((low, 80), rel=1e-3)
    ours = sample(model, process, torch.arange(8), (1, 2, 2), sampler="heun", steps=35, clip=False)
    x = sampled_noise(8) * scheduler.init_noise_sigma
    for k in scheduler.timesteps:
        x = scheduler.step(model(scheduler.scale_model_input(x, k), k).sample, k, x).prev_sample
    torch.testing.assert_close(ours, x, rtol=0, atol=0.01)  # theirs starts at ρ = 157


def test_dpm_under_edm_is_that_of_diffusers():
    from diffusers import EDMDPMSolverMultistepScheduler

    process = EDM()
    model = GaussianOracle(process)
    scheduler = EDMDPMSolverMultistepScheduler(
        sigma_schedule="exponential", solver_order=2, final_sigmas_type="zero", euler_at_final=True
    )
    scheduler.set_timesteps(20)
    x = sampled_noise(8) * 80
    for c_noise in scheduler.timesteps:
        prediction = model(scheduler.scale_model_input(x, c_noise), 1000 * c_noise).sample
        x = scheduler.step(prediction, c_noise, x).prev_sample
    ours = sample(model, process, torch.arange(8), (1, 2, 2), steps=20, clip=False)
    torch.testing.assert_close(ours, x, rtol=1e-3, atol=1e-3)


def test_flow_euler_is_that_of_diffusers():
    from diffusers import FlowMatchEulerDiscreteScheduler

    process = Flow()
    model = GaussianOracle(process)
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(sigmas=[1 - i / 20 for i in range(20)])
    x = sampled_noise(8)
    for t in scheduler.timesteps:
        x = scheduler.step(model(x, t - 1).sample, t, x).prev_sample
    ours = sample(model, process, torch.arange(8), (1, 2, 2), sampler="flow-euler", steps=20, clip=False)
    torch.testing.assert_close(ours, x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("target", "prediction_type"), [("x0", "sample"), ("v", "v_prediction")])
def test_schedulers_know_the_target(target, prediction_type):
    for sampler in ("dpm++", "ddim", "ddpm"):
        scheduler = scheduler_for(process_named("sd", target), sampler)
        assert scheduler.config.prediction_type == prediction_type


def test_latents_are_not_clipped():
    process = DDPM()
    assert scheduler_for(process, "ddim").config.clip_sample
    assert not scheduler_for(process, "ddim", clip=False).config.clip_sample
    model = GaussianOracle(process, shifts=(3.0,))
    how = dict(labels=torch.zeros(4, dtype=torch.int64), sampler="ddim", steps=50)
    free = sample(model, process, torch.arange(4), (1, 4, 4), clip=False, **how)
    assert abs(free.mean() - 3.2) < 0.1
    assert sample(model, process, torch.arange(4), (1, 4, 4), **how).max() <= 1


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
    ("sampler", "steps", "evaluations"), [("heun", 35, 35), ("heun", 50, 49), ("dpm++", 50, 50)]
)
def test_steps_are_evaluations_of_the_network(sampler, steps, evaluations):
    model, calls, seen = GaussianOracle(EDM()), [], []
    model.register_forward_hook(lambda *_: calls.append(1))
    progress = lambda items: (seen.append(item) or item for item in items)  # noqa: E731
    sample(model, EDM(), torch.arange(1), (1, 2, 2), sampler=sampler, steps=steps, progress=progress)
    assert len(calls) == len(seen) == evaluations


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("name", PROCESSES)
def test_a_sampler_that_does_not_fit_says_which_do(sampler, name):
    process = process_named(name)
    if sampler in samplers_for(process):
        return
    fits = ", ".join(n for n in PROCESSES if sampler in samplers_for(process_named(n)))
    with pytest.raises(ValueError, match=f"'{sampler}' fits {fits}, and .* on '{name}'; try dpm.* or heun"):
        sample(GaussianOracle(process), process, torch.arange(1), (1, 2, 2), sampler=sampler)


def test_diffusers_schedulers_refuse_what_they_do_not_know():
    with pytest.raises(ValueError, match="run the processes vp-sde, ddpm, sd, cosine, got 'edm'"):
        scheduler_for(EDM(), "ddim")
    with pytest.raises(ValueError, match="are dpm.*, ddim and ddpm, got 'heun'"):
        scheduler_for(DDPM(), "heun")


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (dict(sampler="euler"), "unknown sampler 'euler'; the known ones are dpm"),
        (dict(sampler="em"), "the sampler .em. fits vp-sde, and this model was trained on 'ddpm'"),
        (dict(steps=0), "1 … 1000, got 0"),
        (dict(sampler="ddim", steps=501), "501 of its steps would not meet; try 500, or dpm"),
        (dict(guidance=2.0), "guidance 2.0 needs class labels"),
    ],
)
def test_bad_requests(how, says):
    with pytest.raises(ValueError, match=says):
        sample(GaussianOracle(DDPM()), DDPM(), torch.arange(1), (1, 2, 2), **how)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("sampler", ["dpm++", "ddim", "em", "heun"])
def test_samples_that_are_not_finite_are_no_images(sampler, value):
    """Clamped to [-1, 1] an infinity would look like one, and a NaN is black."""
    process = VPSDE()
    oracle = GaussianOracle(process)

    class Ruined(nn.Module):
        config = oracle.config

        def forward(self, x, k):
            out = oracle(x, k).sample
            out[1, 0, 0, 0] = value
            return SimpleNamespace(sample=out)

    with pytest.raises(FloatingPointError, match=f"1 of 3 samples, after 4 steps of {re.escape(sampler)}, are not"):
        sample(Ruined(), process, torch.arange(3), (1, 4, 4), sampler=sampler, steps=4)
