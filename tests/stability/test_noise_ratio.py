"""The ratio ‖ε‖²/‖x_t‖² against numpy and closed forms; CIFAR-10's figures where the data is at hand."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from scalelong.data.random import Stream
from scalelong.diffusion.process import mean_square_norm, process_named
from scalelong.stability import advice
from scalelong.stability.kappa import solve_kappa
from scalelong.stability.noise_ratio import Norms, advise_from, measure_norms, uniform_images


def test_norms_are_those_of_the_formula():
    images = torch.rand(6, 2, 3, 3) * 2 - 1
    found = measure_norms(iter([images[:4], images[4:]]), process_named("ddpm"), 6, seed=5)
    noise = Stream(5, "noise ratio").normal(torch.arange(6), (2, 3, 3)).double()
    k = (torch.arange(6) + 0.5) / 6 * 1000
    alpha_bar = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64), 0)[k.long()].view(
        -1, 1, 1, 1
    )
    noised = alpha_bar.sqrt() * images + (1 - alpha_bar).sqrt() * noise
    torch.testing.assert_close(found.noise, noise.square().mean((1, 2, 3)), rtol=1e-5, atol=0)
    torch.testing.assert_close(found.noised, noised.square().mean((1, 2, 3)), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["ddpm", "flow", "cosine"])
def test_uniform_images_have_the_closed_forms_mean(name):
    process = process_named(name)
    found = measure_norms(uniform_images((3072,)), process, 2000)
    assert found.noised.mean().item() == pytest.approx(mean_square_norm(process, 1 / 3), abs=1e-3)


def test_a_network_that_sees_scaled_inputs_is_measured_on_them():
    found = measure_norms(uniform_images((512,)), process_named("edm"), 500)
    assert found.noised.max() < 2  # c_in keeps it near 1, where σ alone goes to 80


def test_the_summary_is_numpys():
    noise, noised = torch.rand(2, 1000, dtype=torch.float64) + 0.5
    found = advise_from(Norms(noise, noised), "ddpm", 8)
    ratio = (noise / noised).numpy()
    assert found.mean == pytest.approx(ratio.mean())
    assert found.ratio_of_means == pytest.approx(noise.numpy().mean() / noised.numpy().mean())
    for share, value in found.quantiles.items():
        assert value == pytest.approx(np.quantile(ratio, float(share)))
    assert (
        found.low.kappa == pytest.approx(solve_kappa(found.ratio_of_means, 8)) if found.ratio_of_means > 1 else True
    )
    assert found.paper_high.kappa == pytest.approx(0.927, abs=5e-4)


def test_the_advice_names_the_range_and_what_has_no_kappa():
    ones = torch.ones(100, dtype=torch.float64)
    inside = advise_from(Norms(ones, ones / 2), "ddpm", 6)
    assert "gives κ = 0.7" in " ".join(advice.from_data(inside))
    assert advice.data_spec(inside) == f"cs:{inside.low.kappa:.2g}"
    above = advise_from(Norms(ones, ones / 9), "ddpm", 6)
    assert "Even the lower end asks for a sum of 6 or more" in " ".join(advice.from_data(above))
    assert advice.data_spec(above) == "none"


CIFAR10 = Path(os.environ.get("SCALELONG_CIFAR10", Path(__file__).parents[3] / "shared/data/cifar10"))


@pytest.mark.slow
@pytest.mark.skipif(not CIFAR10.is_dir(), reason="CIFAR-10 is not at hand; SCALELONG_CIFAR10 names its folder")
def test_cifar10_has_the_published_norm_and_tail(tmp_path):
    from scalelong.data.prepare import prepare
    from scalelong.data.sources import open_source
    from scalelong.stability.noise_ratio import measured

    store = prepare(open_source(str(CIFAR10)), tmp_path / "cifar10")
    found = advise_from(measured(store, process_named("ddpm"), 50_000), "ddpm", 6)
    assert found.mean_square_norm == pytest.approx(0.7944, abs=0.002)
    assert found.share_below_5 == pytest.approx(0.9715, abs=0.003)
    assert found.mean == pytest.approx(1.61, abs=0.05)


def test_norms_that_are_not_finite_ask_for_no_kappa():
    """A NaN sum would mean κ → 0."""
    norms = Norms(torch.ones(10), torch.tensor([1.0] * 9 + [float("nan")]))
    with pytest.raises(ValueError, match="1 of 10 noised images have norms that are not finite"):
        advise_from(norms, "ddpm", 6)
