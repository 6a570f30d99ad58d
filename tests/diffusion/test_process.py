import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from scalelong.diffusion.process import (
    DDPM,
    EDM,
    PROCESSES,
    VPSDE,
    Cosine,
    Flow,
    LogitNormalFlow,
    StableDiffusion,
    mean_square_norm,
    process_named,
)

K = torch.arange(1000)
PRESERVING = [VPSDE(), DDPM(), StableDiffusion(), Cosine()]


def named(process):
    return getattr(process, "name", None)


@pytest.mark.parametrize("process", PRESERVING, ids=named)
def test_the_variance_is_preserved_and_noise_only_grows(process):
    alpha, sigma = process.alpha_sigma(K)
    torch.testing.assert_close(alpha**2 + sigma**2, torch.ones(1000, dtype=torch.float64))
    assert (alpha.diff() < 0).all()
    assert (sigma.diff() >= 0).all()


@pytest.mark.parametrize(
    ("process", "how"),
    [
        (DDPM(), {}),
        (StableDiffusion(), dict(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)),
        (Cosine(), dict(beta_schedule="squaredcos_cap_v2")),
    ],
    ids=named,
)
def test_discrete_schedules_are_those_of_diffusers(process, how):
    from diffusers import DDPMScheduler

    scheduler = DDPMScheduler(**how)
    alpha, _ = process.alpha_sigma(K)
    torch.testing.assert_close((alpha**2).float(), scheduler.alphas_cumprod, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(process.betas().float(), scheduler.betas, rtol=1e-3, atol=0)


def test_cosine_is_its_formula_until_the_cap():
    f = torch.cos((torch.arange(1001).double() / 1000 + 0.008) / 1.008 * math.pi / 2) ** 2
    alpha, _ = Cosine().alpha_sigma(K)
    torch.testing.assert_close(alpha[:999] ** 2, f[1:1000] / f[0], rtol=1e-6, atol=0)
    assert Cosine().betas().max().item() == pytest.approx(0.999)


def test_edm_is_its_table():
    sigma = torch.tensor([0.002, 0.5, 80.0], dtype=torch.float64)
    k = 1000 * sigma.log() / 4  # c_noise, times 1000
    one, found = EDM().alpha_sigma(k)
    torch.testing.assert_close(found, sigma)
    assert (one == 1).all()
    torch.testing.assert_close(EDM().input_scale(k), 1 / (sigma**2 + 0.25).sqrt())
    # c_in makes the input's variance 1 for data of variance σ_d².
    noised = EDM().noised(0.5 * torch.randn(3, 1, 100, 100), torch.randn(3, 1, 100, 100), k)
    torch.testing.assert_close(EDM().scaled(noised, k).std((1, 2, 3)), torch.ones(3), rtol=0.03, atol=0)


def test_flow_is_a_straight_line():
    alpha, sigma = Flow().alpha_sigma(1000 * torch.tensor([0.0, 0.25, 1.0]) - 1)
    torch.testing.assert_close(sigma, torch.tensor([0.0, 0.25, 1.0], dtype=torch.float64))
    torch.testing.assert_close(alpha + sigma, torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("name", PROCESSES)
@pytest.mark.parametrize("u", [0.001, 0.3, 0.9])
def test_marginals(name, u):
    """x_t given x_0 has mean α x_0 and variance σ²."""
    process = process_named(name)
    images = torch.linspace(-1, 1, 4)[None, None, :, None].expand(1, 1, 4, 50_000)
    k = process.timesteps(torch.tensor([u]))
    alpha, sigma = (c.item() for c in process.alpha_sigma(k))
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    x = process.noised(images, noise, k)
    mean, spread = x.mean((0, 1, 3)), x.std((0, 1, 3))
    torch.testing.assert_close(mean, alpha * images[0, 0, :, 0], rtol=0, atol=5 * sigma / math.sqrt(50_000))
    torch.testing.assert_close(spread, torch.full((4,), sigma), rtol=0.02, atol=0)


@pytest.mark.parametrize("name", PROCESSES)
def test_times_are_found_by_their_ratio(name):
    process = process_named(name)
    for ratio in (0.05, 0.7, 3.0, 14.0):
        alpha, sigma = process.alpha_sigma(torch.tensor(process.timestep_at(ratio), dtype=torch.float64))
        assert (sigma / alpha).item() == pytest.approx(ratio, rel=1e-9)
    if isinstance(process, DDPM | StableDiffusion | Cosine):
        assert (process.timestep_at(1e-9), process.timestep_at(1e9)) == (0, 999)


def test_times_between_steps_are_interpolated():
    alpha, _ = DDPM().alpha_sigma(torch.tensor([10, 10.5, 11, 999]))
    table, _ = DDPM().alpha_sigma(K)
    assert torch.equal(alpha[[0, 2, 3]], table[[10, 11, 999]])
    torch.testing.assert_close(alpha[1], (table[10] * table[11]).sqrt())


def test_training_times_have_their_distribution():
    u = (torch.arange(200_000) + 0.5) / 200_000
    log_sigma = EDM().alpha_sigma(EDM().timesteps(u))[1].log()
    assert log_sigma.mean().item() == pytest.approx(-1.2, abs=1e-3)
    assert log_sigma.std().item() == pytest.approx(1.2, abs=2e-3)
    _, t = LogitNormalFlow().alpha_sigma(LogitNormalFlow().timesteps(u))
    assert t.logit().mean().item() == pytest.approx(0, abs=1e-3)
    assert t.logit().std().item() == pytest.approx(1, abs=2e-3)
    _, t = Flow().alpha_sigma(Flow().timesteps(u))
    torch.testing.assert_close(t, u.double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", PROCESSES)
def test_the_ends_of_the_uniforms_are_finite(name):
    process = process_named(name)
    k = process.timesteps(torch.tensor([0, 1 - 2.0**-24]))
    assert k.isfinite().all()
    for target in process.targets:
        for weighting in ("plain", "min-snr:5", "p2"):
            example = process_named(name, target, weighting).example(
                torch.ones(2, 1, 1, 1), torch.ones(2, 1, 1, 1), k
            )
            assert all(part.isfinite().all() for part in example if part is not None), (target, weighting)


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
    for process in PRESERVING:
        alpha, _ = process.alpha_sigma(K)
        torch.testing.assert_close(torch.cumprod(1 - process.betas(), 0), alpha**2, rtol=1e-10, atol=0)


def test_training_times_cover_the_process():
    u = torch.linspace(0, 1 - 1e-7, 10_001)
    k = DDPM().timesteps(u)
    assert (k.min(), k.max()) == (0, 999)
    assert torch.bincount(k).max() <= 12
    k = VPSDE().timesteps(u)
    assert (k.min(), k.max().round()) == (-1, 999)


@pytest.mark.parametrize(
    ("process", "expected"),
    [
        (DDPM(), 0.8163),
        (VPSDE(), 0.8160),
        (StableDiffusion(), 0.7511),
        (Cosine(), 0.6696),
        (Flow(), (1 / 3 + 1) / 3),  # E (1 - t)² = E t² = 1/3
        (EDM(), 1 / 3 + math.exp(2 * -1.2 + 2 * 1.2**2)),  # E σ² of a lognormal σ
    ],
    ids=named,
)
def test_lemma_3_2(process, expected):
    # x_0 uniform on [-1, 1]: second moment 1/3. The first four values are those of the paper's schedules.
    assert mean_square_norm(process, 1 / 3) == pytest.approx(expected, rel=1e-4 if expected < 1 else 1e-2)
    generator = torch.Generator().manual_seed(1)
    u, images = torch.rand(2, 40_000, generator=generator)
    noise = torch.randn(40_000, 1, 1, 1, generator=generator)
    x = process.noised(2 * images[:, None, None, None] - 1, noise, process.timesteps(u))
    assert x.square().mean().item() == pytest.approx(expected, rel=0.03 if expected < 1 else 0.15)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("ve",), "unknown noise process 've'; the known ones are vp-sde, ddpm, sd, cosine, edm, flow"),
        (("ddpm", "velocity"), "fit process=ddpm are epsilon, x0, v, got 'velocity'; target=auto"),
        (("edm", "v"), "fit process=edm are edm, x0, epsilon, got 'v'"),
        (("flow", "epsilon"), "fit process=flow are velocity, x0, got 'epsilon'"),
        (("flow", "score"), "got 'score'"),
        (("ddpm", "auto", "snr"), "unknown weighting 'snr'; the known ones are plain, min-snr:5, p2:1 and edm"),
        (("ddpm", "auto", "min-snr:0"), "positive, such as min-snr:5; got 'min-snr:0'"),
        (("ddpm", "auto", "p2:x"), "positive, such as p2:1; got 'p2:x'"),
        (("ddpm", "v", "edm:3"), "'edm' takes no number, got 'edm:3'"),
        (("ddpm", "x0", "edm"), "no bound for process=ddpm with target=x0"),
    ],
)
def test_what_does_not_fit_gets_a_sentence(settings, says):
    with pytest.raises(ValueError, match=says):
        process_named(*settings)


class TensorsSeen(TorchDispatchMode):
    """Notes the devices of all tensors that operations read."""

    def __init__(self):
        super().__init__()
        self.devices = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.devices |= {
            arg.device.type for arg in tree_flatten((args, kwargs))[0] if isinstance(arg, torch.Tensor)
        }
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", PROCESSES)
def test_an_example_stays_on_its_device_and_reads_no_value(name):
    """As a captured graph needs it: the device "meta" has no values, and a table left elsewhere would be seen."""
    for target in PROCESSES[name].targets:
        for weighting in ("plain", "min-snr:5", "p2"):
            process = process_named(name, target, weighting).to(torch.device("meta"))
            uniforms, images, noise = (torch.empty(s, device="meta") for s in ([2], [2, 1, 4, 4], [2, 1, 4, 4]))
            with TensorsSeen() as seen:
                example = process.example(images, noise, process.timesteps(uniforms))
            assert seen.devices == {"meta"}
            assert example.inputs.shape == example.target.shape == (2, 1, 4, 4)
            assert example.inputs.dtype == example.target.dtype == torch.float32


def test_each_process_has_its_own_target():
    found = {name: process_named(name).target for name in PROCESSES}
    assert {name: t for name, t in found.items() if t != "epsilon"} == {
        "edm": "edm",
        "flow": "velocity",
        "flow:logit-normal": "velocity",
    }
    assert str(process_named("sd", "v", "min-snr").weighting) == "min-snr:5"
    assert str(process_named("sd").weighting) == "plain"
