"""Targets: each is what its definition says, and each gives all others."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelong.diffusion.process import PROCESSES, process_named
from scalelong.diffusion.targets import (
    TARGETS,
    coefficients,
    converted,
    determinant,
    images_from,
    noise_from,
    target_from,
)

TWO = st.sampled_from(TARGETS)


def case(name, u, seed, dtype):
    """Images, noise, α, σ and x_t somewhere in a process."""
    process = process_named(name)
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(2, 1, 2, 2, generator=generator, dtype=dtype) * 2 - 1
    noise = torch.randn(2, 1, 2, 2, generator=generator, dtype=dtype)
    k = process.timesteps(torch.tensor([u, 1 - u]))
    return images, noise, *process.alpha_sigma(k), process.noised(images, noise, k)


@given(name=st.sampled_from(list(PROCESSES)), u=st.floats(1e-3, 1 - 1e-3), seed=st.integers(0, 99), a=TWO, b=TWO)
@settings(deadline=None, max_examples=300)
def test_round_trips_in_double_precision(name, u, seed, a, b):
    images, noise, alpha, sigma, noised = case(name, u, seed, torch.float64)
    given_a = target_from(a, images, noise, alpha, sigma)
    at = (noised, alpha, sigma)
    # Rounding of ε is divided by α where it becomes x_0, and that of x_0 by σ/α where it becomes ε.
    tolerance = dict(rtol=1e-8, atol=1e-8 * max(1, (1 / alpha).max().item(), (alpha / sigma).max().item() * 1e-2))
    torch.testing.assert_close(images_from(a, given_a, *at), images, **tolerance)
    torch.testing.assert_close(noise_from(a, given_a, *at), noise, **tolerance)
    as_b = converted(given_a, a, b, *at)
    torch.testing.assert_close(as_b, target_from(b, images, noise, alpha, sigma), **tolerance)
    torch.testing.assert_close(converted(as_b, b, a, *at), given_a, **tolerance)


@given(
    angle=st.floats(0.1, 1.47),
    images=st.floats(-1, 1, width=32),
    noise=st.floats(-4, 4, width=32),
    a=TWO,
    b=TWO,
)
@settings(deadline=None, max_examples=300)
def test_round_trips_in_single_precision(angle, images, noise, a, b):
    """To 1e-5 where α and σ are at least 0.1; nearer to the ends single precision itself holds no more."""
    alpha, sigma = torch.tensor(angle).cos(), torch.tensor(angle).sin()
    x, e = torch.full((1, 1, 1, 1), images), torch.full((1, 1, 1, 1), noise)
    noised = alpha * x + sigma * e
    given_a = target_from(a, x, e, alpha, sigma)
    back = converted(converted(given_a, a, b, noised, alpha, sigma), b, a, noised, alpha, sigma)
    torch.testing.assert_close(back, given_a, rtol=1e-5, atol=1e-5)


def test_targets_are_their_definitions():
    images, noise, alpha, sigma, _ = case("sd", 0.4, 0, torch.float64)
    a, s = alpha[:, None, None, None], sigma[:, None, None, None]
    for target, want in {
        "epsilon": noise,
        "x0": images,
        "v": a * noise - s * images,
        "velocity": noise - images,
    }.items():
        torch.testing.assert_close(target_from(target, images, noise, alpha, sigma), want)


def test_velocity_is_the_slope_of_the_flow():
    process = process_named("flow")
    images, noise, k = torch.rand(2, 1, 2, 2), torch.randn(2, 1, 2, 2), torch.tensor([99.0, 499.0])
    slope = (process.noised(images, noise, k + 100) - process.noised(images, noise, k)) / 0.1
    torch.testing.assert_close(process.example(images, noise, k).target, slope, rtol=1e-4, atol=1e-4)


def test_edm_is_its_preconditioning():
    """x_0 = c_skip x + c_out F, with c_skip and c_out as published."""
    images, noise, alpha, sigma, noised = case("edm", 0.3, 0, torch.float64)
    s = sigma[:, None, None, None]
    c_skip, c_out = 0.25 / (s**2 + 0.25), s * 0.5 / (s**2 + 0.25).sqrt()
    network = target_from("edm", images, noise, alpha, sigma)
    torch.testing.assert_close(c_skip * noised + c_out * network, images)
    guess = torch.randn_like(network)
    torch.testing.assert_close(images_from("edm", guess, noised, alpha, sigma), c_skip * noised + c_out * guess)
    # and the target has unit variance for data of variance σ_d²
    p, q = coefficients("edm", alpha, sigma)
    torch.testing.assert_close(p**2 * 0.25 + q**2, torch.ones(2, dtype=torch.float64))


def test_v_is_diffusers_velocity():
    from diffusers import DDPMScheduler

    scheduler, k = DDPMScheduler(), torch.tensor([3, 700])
    images, noise = torch.rand(2, 1, 2, 2), torch.randn(2, 1, 2, 2)
    ours = process_named("ddpm", "v").example(images, noise, k).target
    torch.testing.assert_close(ours, scheduler.get_velocity(images, noise, k), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("target", TARGETS)
def test_the_ends_give_what_is_determined_and_zero_for_what_is_not(target):
    images, noise = torch.full((2, 1, 1, 1), 0.3), torch.full((2, 1, 1, 1), -2.0)
    alpha, sigma = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])  # no noise, and noise alone
    noised = alpha[:, None, None, None] * images + sigma[:, None, None, None] * noise
    prediction = target_from(target, images, noise, alpha, sigma)
    found = images_from(target, prediction, noised, alpha, sigma).flatten()
    torch.testing.assert_close(found, torch.tensor([0.3, 0.0 if target == "epsilon" else 0.3]))
    found = noise_from(target, prediction, noised, alpha, sigma).flatten()
    torch.testing.assert_close(found, torch.tensor([0.0 if target == "x0" else -2.0, -2.0]))


@pytest.mark.parametrize("target", TARGETS)
def test_an_error_of_the_image_becomes_one_of_the_target(target):
    images, noise, alpha, sigma, noised = case("vp-sde", 0.3, 0, torch.float64)
    off = images + 0.01
    shifted = converted(off, "x0", target, noised, alpha, sigma)
    change = (shifted - target_from(target, images, noise, alpha, sigma))[:, 0, 0, 0]
    torch.testing.assert_close(change, 0.01 * determinant(target, alpha, sigma) / sigma)


def test_unknown_targets_get_the_list():
    with pytest.raises(ValueError, match="unknown target 'score'; the known ones are epsilon, x0, v"):
        coefficients("score", torch.ones(1), torch.ones(1))
