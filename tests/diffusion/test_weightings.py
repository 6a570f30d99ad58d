"""Weightings against their published formulas."""

import pytest
import torch

from scalelong.diffusion.process import process_named
from scalelong.diffusion.targets import TARGETS, converted, target_from
from scalelong.diffusion.weightings import Weighting, parse_weighting, weight_on_images, weight_on_target

ALPHA, SIGMA = process_named("ddpm").alpha_sigma(torch.arange(0, 1000, 37))
SNR = (ALPHA / SIGMA) ** 2
RHO = torch.logspace(-2.5, 1.9, 30, dtype=torch.float64)  # EDM's σ


@pytest.mark.parametrize(
    ("weighting", "target", "published"),
    [
        ("min-snr:5", "x0", SNR.clamp(max=5)),
        ("min-snr:5", "epsilon", SNR.clamp(max=5) / SNR),
        ("min-snr:5", "v", SNR.clamp(max=5) / (SNR + 1)),
        ("min-snr:1", "epsilon", (1 / SNR).clamp(max=1)),
        ("p2", "epsilon", 1 / (1 + SNR)),
        ("p2:0.5", "epsilon", 1 / (1 + SNR) ** 0.5),
        ("p2", "x0", SNR / (1 + SNR)),
        ("edm", "v", (SNR + 4) / (SNR + 1)),
    ],
)
def test_published_forms(weighting, target, published):
    found = weight_on_target(parse_weighting(weighting), target, ALPHA, SIGMA)
    torch.testing.assert_close(found, published, rtol=1e-9, atol=0)


def test_edm_is_its_lambda_and_one_on_its_own_target():
    """λ(σ) = (σ² + σ_d²)/(σ σ_d)² on the denoised image, which is 1/c_out²: 1 on F."""
    one = torch.ones_like(RHO)
    on_images = weight_on_target(Weighting("edm"), "x0", one, RHO)
    torch.testing.assert_close(on_images, (RHO**2 + 0.25) / (RHO * 0.5) ** 2)
    torch.testing.assert_close(weight_on_target(Weighting("edm"), "edm", one, RHO), one)


@pytest.mark.parametrize("weighting", ["min-snr:5", "p2:0.5", "edm"])
def test_all_targets_weigh_an_error_of_the_image_alike(weighting):
    """The same wrong image, told in each target, costs the same."""
    parsed = parse_weighting(weighting)
    images, noise, wrong = torch.randn(3, len(ALPHA), 1, 2, 2, dtype=torch.float64)
    a, s = ALPHA[:, None, None, None], SIGMA[:, None, None, None]
    noised = a * images + s * noise
    want = weight_on_images(parsed, SNR) * (wrong - images).square().mean((1, 2, 3))
    for target in TARGETS:
        prediction = converted(wrong, "x0", target, noised, ALPHA, SIGMA)
        error = (prediction - target_from(target, images, noise, ALPHA, SIGMA)).square().mean((1, 2, 3))
        found = weight_on_target(parsed, target, ALPHA, SIGMA) * error
        torch.testing.assert_close(found, want, rtol=1e-8, atol=1e-12)


def test_plain_is_one_on_whatever_is_trained():
    for target in TARGETS:
        assert weight_on_target(Weighting(), target, ALPHA, SIGMA) is None
    with pytest.raises(ValueError, match="'plain' is a weight on the trained target"):
        weight_on_images(Weighting(), SNR)


def test_names_are_read_and_written():
    for text, want in {"min-snr": "min-snr:5", "min-snr:2.5": "min-snr:2.5", "p2": "p2:1", "edm": "edm"}.items():
        assert str(parse_weighting(text)) == want
