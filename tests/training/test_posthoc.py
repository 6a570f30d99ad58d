from fractions import Fraction

import pytest
import torch
from torch import nn

from scalelong import experiment
from scalelong.training.ema import move_averages
from scalelong.training.posthoc import PROFILES, PowerEMA, Profile, combination, gamma_of, missed
from tests.training.test_fit import config, same, store, tensors_of  # noqa: F401 - a fixture


def test_published_widths():
    assert gamma_of(0.05) == pytest.approx(16.97, abs=0.005)
    assert gamma_of(0.10) == pytest.approx(6.94, abs=0.005)
    with pytest.raises(ValueError, match=r"between 0 and 0\.28, got 0\.5"):
        gamma_of(0.5)


def test_a_tracked_average_has_the_power_profile():
    """Feed θ_t = 1 at one update and 0 else: the average is that update's weight."""
    model = nn.Linear(1, 1, bias=False)
    steps = 200
    for update in (50, 120, 199):
        ema = PowerEMA(model, 0.1)
        for step in range(steps):
            with torch.no_grad():
                model.weight.fill_(float(step == update))
                weight = ema.weight(torch.tensor(step), torch.tensor(1.0))
                move_averages([list(ema.weights.values())], list(model.parameters()), [weight])
        # The update's share of ∫ p: P(τ) = (τ/t)^(γ+1).
        share = ((update + 1) / steps) ** (ema.gamma + 1) - (update / steps) ** (ema.gamma + 1)
        assert ema.weights["weight"].item() == pytest.approx(share, rel=1e-3, abs=1e-7)


@pytest.mark.parametrize("step", [0, 9, 99_999, 500_001, 2_000_000])
def test_an_updates_weight_is_exact_late_in_training_too(step):
    ema = PowerEMA(nn.Linear(1, 1), 0.05)
    ema.gamma = 17.0  # a whole power, which fractions take exactly
    found = ema.weight(torch.tensor(step), torch.tensor(1.0)).item()
    assert found == pytest.approx(float(1 - Fraction(step, step + 1) ** 18), rel=1e-6)


def test_inner_products_against_quadrature():
    a, b = Profile(100, gamma_of(0.05)), Profile(140, gamma_of(0.2))
    tau = (torch.arange(1_000_000, dtype=torch.float64) + 0.5) / 10_000  # 0 … 100
    density = [(p.gamma + 1) * tau**p.gamma / p.t ** (p.gamma + 1) for p in (a, b)]
    assert a.dot(b) == pytest.approx((density[0] * density[1]).sum().item() / 10_000, rel=1e-6)
    assert a.dot(b) == b.dot(a)


def test_what_was_kept_is_its_own_reconstruction():
    kept = [Profile(t, gamma_of(width)) for t in (100, 200, 300) for width in PROFILES]
    assert combination(kept, kept[4]) == pytest.approx([0, 0, 0, 0, 1, 0], abs=1e-6)


def test_what_cannot_be_made_of_the_snapshots_is_measured():
    kept = [Profile(t, gamma_of(width)) for t in (25, 50, 75, 100) for width in PROFILES]
    tau = (torch.arange(400_000, dtype=torch.float64) + 0.5) / 4000  # 0 … 100

    def density(p):
        return torch.where(tau < p.t, (p.gamma + 1) / p.t * (tau / p.t) ** p.gamma, 0.0)

    for width, least, most in ((0.07, 0, 0.01), (0.005, 0.5, 1)):
        wanted = Profile(100, gamma_of(width))
        weights = combination(kept, wanted)
        made = sum(float(w) * density(p) for w, p in zip(weights, kept, strict=True))
        share = ((made - density(wanted)).square().sum() / density(wanted).square().sum()).item()
        assert least < share < most
        assert missed(kept, weights, wanted) == pytest.approx(share, rel=1e-3)


@pytest.mark.parametrize("width", [0.06, 0.08, 0.12])
def test_any_width_is_near_the_average_that_was_tracked_directly(width):
    torch.manual_seed(0)
    model = nn.Linear(20, 20, bias=False)
    tracked, direct, kept = [PowerEMA(model, w) for w in PROFILES], PowerEMA(model, width), []
    for step in range(800):
        with torch.no_grad():
            model.weight.add_(torch.randn_like(model.weight) / (step + 10) ** 0.5)  # it wanders, ever slower
            for ema in (*tracked, direct):
                weight = ema.weight(torch.tensor(step), torch.tensor(1.0))
                move_averages([list(ema.weights.values())], list(model.parameters()), [weight])
        if (step + 1) % 50 == 0:
            kept += [(Profile(step + 1, ema.gamma), ema.weights["weight"].clone()) for ema in tracked]
    weights = combination([profile for profile, _ in kept], Profile(800, gamma_of(width)))
    made = sum(float(w) * tensor.double() for w, (_, tensor) in zip(weights, kept, strict=True))
    wanted = direct.weights["weight"].double()
    spread = (tracked[0].weights["weight"] - tracked[1].weights["weight"]).norm()
    assert (made - wanted).norm() < 0.03 * spread  # far nearer than the two that were kept are to each other


def test_a_run_keeps_snapshots_and_resumes_exactly(store, tmp_path):  # noqa: F811
    settings = ["train.posthoc_every=3", "train.checkpoint_every=4"]
    experiment.train(config("train.steps=8", *settings), store, tmp_path / "straight", device="cpu")
    for steps in (4, 8):
        experiment.train(config(f"train.steps={steps}", *settings), store, tmp_path / "halting", device="cpu")
    assert same(tmp_path / "straight", tmp_path / "halting")
    steps = sorted(folder.name for folder in (tmp_path / "straight" / "posthoc").iterdir())
    assert steps == ["step-000000003", "step-000000006", "step-000000008"]
    loaded = experiment.load_run(tmp_path / "straight", posthoc_width=0.1, device="cpu")
    assert (loaded.step, loaded.ema_rate) == (8, "post-hoc 0.1")
    _, tensors = tensors_of(tmp_path / "straight")
    for name, tensor in loaded.model.state_dict().items():
        torch.testing.assert_close(tensor, tensors[f"ema-power-0.1/{name}"], rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match=r"3 snapshots of .* width 0\.001: \d\d% of it would be missed"):
        experiment.load_run(tmp_path / "straight", posthoc_width=0.001, device="cpu")
    with pytest.raises(ValueError, match="--ema or --posthoc-ema"):
        experiment.load_run(tmp_path / "straight", posthoc_width=0.1, ema_rate=0.9)
    experiment.train(config("train.steps=1"), store, tmp_path / "plain", device="cpu")
    with pytest.raises(ValueError, match=r"train\.posthoc_every=1000"):
        experiment.load_run(tmp_path / "plain", posthoc_width=0.1)
