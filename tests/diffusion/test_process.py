import math

import pytest
import torch

from scalelong.diffusion.process import DDPM, VPSDE, mean_square_norm, process_named

K = torch.arange(1000)


@pytest.mark.parametrize("process", [DDPM(), VPSDE()])
def test_the_variance_is_preserved_and_noise_only_grows(process):
    alpha, sigma = process.alpha_sigma(K)
    torch.testing.assert_close(alpha**2 + sigma**2, torch.ones(1000, dtype=torch.float64))
    assert (sigma.diff() > 0).all()


def test_ddpm_is_diffusers_linear_schedule():
    from diffusers import DDPMScheduler

    scheduler = DDPMScheduler()
    alpha, _ = DDPM().alpha_sigma(K)
    torch.testing.assert_close((alpha**2).float(), scheduler.alphas_cumprod, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(DDPM().betas().float(), scheduler.betas, rtol=1e-5, atol=0)
    images, noise, k = torch.rand(4, 3, 2, 2), torch.randn(4, 3, 2, 2), torch.tensor([0, 10, 500, 999])
    torch.testing.assert_close(
        DDPM().noised(images, noise, k), scheduler.add_noise(images, noise, k), rtol=1e-4, atol=1e-5
    )


def test_vp_sde_is_the_integral_of_its_beta():
    process = VPSDE()
    for t in (0.001, 0.3, 1.0):
        grid = torch.linspace(0, t, 100_001, dtype=torch.float64)
        integral = torch.trapezoid(0.1 + grid * 19.9, grid).item()
        alpha, sigma = process.alpha_sigma(torch.tensor(1000 * t - 1))
        assert math.isclose(alpha.item(), math.exp(-0.5 * integral), rel_tol=1e-9)
        assert math.isclose(sigma.item(), math.sqrt(1 - math.exp(-integral)), rel_tol=1e-9)


def test_betas_rebuild_the_process():
    for process in (DDPM(), VPSDE()):
        alpha, _ = process.alpha_sigma(K)
        torch.testing.assert_close(torch.cumprod(1 - process.betas(), 0), alpha**2, rtol=1e-10, atol=0)


def test_training_times_cover_the_process():
    u = torch.linspace(0, 1 - 1e-7, 10_001)
    k = DDPM().timesteps(u)
    assert (k.min(), k.max()) == (0, 999)
    assert torch.bincount(k).max() <= 12
    k = VPSDE().timesteps(u)
    assert (k.min(), k.max().round()) == (-1, 999)


@pytest.mark.parametrize(("process", "expected"), [(DDPM(), 0.8163), (VPSDE(), 0.8160)])
def test_lemma_3_2(process, expected):
    # x_0 uniform on [-1, 1]: second moment 1/3. The values are those of the paper's schedules.
    assert abs(mean_square_norm(process, 1 / 3) - expected) < 1e-4


def test_unknown_processes_get_the_list():
    with pytest.raises(ValueError, match="unknown noise process 'edm'; the known ones are vp-sde, ddpm"):
        process_named("edm")
