"""What the pulse shows, against direct calculations."""

import numpy as np
import pytest
import torch
from torch import nn

import scalelong
from scalelong.stability.pulse import Pulse, Samples
from scalelong.stability.replay import StepCalls


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 40), nn.Linear(40, 5), nn.Linear(5, 5), nn.Linear(5, 1))


def pulse_of(model):
    return Pulse(model, StepCalls(model))


def taken(pulse, loss):
    values, note = pulse.take(loss)
    return dict(zip(pulse.names, pulse.read(values.numpy(), note), strict=True))


def test_values_of_a_step():
    model = net()
    pulse = pulse_of(model)
    x = torch.randn(6, 3)
    loss = model(x).square().mean()
    loss.backward()
    values = taken(pulse, loss)
    assert values["loss"] == pytest.approx(loss.item())
    assert values["gradient/1"] == pytest.approx(model[1].weight.grad.norm().item())
    assert values["output/0"] == pytest.approx(model[0](x).square().mean().sqrt().item())
    assert values["update/0"] < 0  # nothing to compare with yet
    assert values["peak/0"] < 0  # not in half precision
    both = {str(i): layer.weight.grad.norm().hypot(layer.bias.grad.norm()).item() for i, layer in enumerate(model)}
    assert pulse.gradient_norms() == pytest.approx(both)


def test_a_float64_model_is_watched_too():
    model = net().double()
    pulse = pulse_of(model)
    x = torch.randn(6, 3, dtype=torch.float64)
    loss = model(x).square().mean()
    loss.backward()
    assert taken(pulse, loss)["gradient/1"] == pytest.approx(model[1].weight.grad.norm().item())
    assert pulse.gradient_norms()["0"] > 0
    pulse.arm(1, everything=False)
    assert pulse.glance(loss)[0] == pytest.approx(loss.item())


def test_an_update_is_that_of_one_step():
    model = net()
    pulse = pulse_of(model)
    for step, factor in ((2, 1.0), (4, 1.1)):
        with torch.no_grad():
            model[1].weight.mul_(factor)
        pulse.arm(step, everything=False)
        values = taken(pulse, torch.tensor(1.0))
    assert values["update/1"] == pytest.approx(0.1 / 2, rel=1e-4)
    assert values["update/0"] < 0  # unchanged


def test_a_step_between_on_a_gpu_shows_the_loss_and_all_gradients():
    model = net()
    pulse = pulse_of(model)
    pulse.arm(3, everything=False)
    loss = model(torch.randn(6, 3)).square().mean()
    loss.backward()
    shown = {name for name, value in taken(pulse, loss).items() if value >= 0}
    assert shown == {"loss", "output/0", *(f"gradient/{i}" for i in range(4))}
    assert pulse._before is None  # nor is the time since the last update's sample begun anew


def test_what_weight_decay_alone_changes_is_no_update():
    """A gate that is asleep wakes up one day, and its first step would be a hundred times its usual one."""
    model = net()
    pulse = pulse_of(model)
    for step in (2, 4):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        model[1].weight.grad = torch.zeros_like(model[1].weight)
        model[2].weight.grad = None  # of an optimiser that takes gradients away at once
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 - 1e-5)
        pulse.arm(step, everything=False)
        values = taken(pulse, torch.tensor(1.0))
    assert [values[f"update/{i}"] > 0 for i in range(4)] == [True, False, True, True]
    assert values["update/1"] == 0
    pulse.arm(6, everything=False)
    assert taken(pulse, torch.tensor(1.0))["update/0"] < 0  # as when a GradScaler leaves out a step


def test_pieces_of_a_batch_make_the_whole():
    model = net()
    pulse = pulse_of(model)
    x = torch.randn(6, 3)
    model(x)
    whole = taken(pulse, torch.tensor(1.0))
    model(x[:4])
    model(x[4:])
    pieces = taken(pulse, torch.tensor(1.0))
    names = [f"output/{i}" for i in range(4)]
    assert [pieces[n] for n in names] == pytest.approx([whole[n] for n in names])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("layer", range(4))
def test_a_glance_finds_a_gradient_that_comes_back_through_any_layer(layer, bad):
    model = net()
    pulse = pulse_of(model)
    pulse.arm(1, everything=False)
    assert not pulse.looking
    model[layer].register_forward_hook(lambda m, a, output: output.register_hook(lambda g: g * bad) and None)
    loss = model(torch.randn(6, 3)).square().mean()
    loss.backward()
    values = pulse.glance(loss)
    assert np.isfinite(values[0])
    assert not np.isfinite(values[: pulse.telling]).all()


@pytest.mark.parametrize("step", [1, 2, 4], ids=["glance", "gradients", "everything"])
@pytest.mark.parametrize("layer", range(4))
def test_a_bad_gradient_of_one_bias_is_found_before_its_update(layer, step):
    """It goes nowhere from there: no other gradient shows it."""
    model = net()
    pulse = pulse_of(model)
    pulse.arm(step, everything=False)
    loss = model(torch.randn(6, 3)).square().mean()
    loss.backward()
    model[layer].bias.grad[0] = float("nan")
    values = np.array(list(taken(pulse, loss).values())) if pulse.looking else pulse.glance(loss)
    assert not np.isfinite(values[: pulse.telling]).all()
    assert np.isfinite(values[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_gradient_beyond_the_squares_of_float32_is_large_and_not_infinite(dtype):
    model = net().to(dtype)
    pulse = pulse_of(model)
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e25)
    values = pulse.glance(torch.tensor(1.0))
    assert pulse.is_finite(values) == (dtype is torch.float64)
    pulse.look_again(values)
    assert pulse.is_finite(values)
    assert values[1] == pytest.approx(1e25 * 120**0.5, rel=1e-2)
    assert pulse.gradient_norms()["0"] == pytest.approx(1e25 * 160**0.5, rel=1e-2)
    model[1].bias.grad[2] = float("inf")
    pulse.look_again(values)
    assert not pulse.is_finite(values)
    assert np.isfinite(values[1])


def test_a_glance_shows_the_first_output_alone():
    model = net()
    pulse = pulse_of(model)
    pulse.arm(3, everything=False)
    x = torch.randn(6, 3)
    model(x)
    values = dict(zip(pulse.names, pulse.glance(torch.tensor(2.0)), strict=True))
    assert {name for name, value in values.items() if value >= 0} == {"loss", "output/0"}
    assert values["output/0"] == pytest.approx(model[0](x).square().mean().sqrt().item())


def test_a_gates_odds_and_a_learned_number():
    for spec, shown in (("ls", lambda c: c / (1 - c)), ("scalar", lambda c: c)):
        model = scalelong.UViT(
            sample_size=8, patch_size=2, in_channels=1, hidden_size=16, num_layers=2, num_attention_heads=2
        )
        handle = scalelong.apply(model, spec)
        pulse = pulse_of(model)
        inputs = torch.randn(2, 1, 8, 8), torch.tensor([3, 900])
        (coefficient,) = handle.coefficients(*inputs)
        model(*inputs)
        mean = torch.as_tensor(coefficient).mean().item()
        assert taken(pulse, torch.tensor(1.0))["gate/skip 0"] == pytest.approx(shown(mean), rel=1e-4)


def test_what_was_frozen_is_told_and_joins_what_was_watched():
    model = net()
    model.requires_grad_(False)
    model[1].bias.requires_grad_(True)
    model[2].requires_grad_(True)
    first = pulse_of(model)
    assert not first.was_unfrozen()
    assert [name for name in first.names if name.startswith("output")] == ["output/1", "output/2"]
    model[1].weight.requires_grad_(True)
    model[3].requires_grad_(True)
    model[2].requires_grad_(False)
    assert first.was_unfrozen()
    second = Pulse(model, first.call, first.watched)
    assert not second.was_unfrozen()
    assert second.blocks == ["1", "2", "3"]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    # The bias stands for its block as before: the weight's gradient would look like a leap.
    values = taken(second, torch.tensor(1.0))
    assert [values[f"gradient/{i}"] for i in (1, 2, 3)] == pytest.approx([5**0.5, 5, 5**0.5])


def test_samples_follow_values_moves_and_layouts():
    long, short = torch.arange(1000.0), torch.tensor([1.0, 2.0])
    picture = long.reshape(10, 10, 2, 5).to(memory_format=torch.channels_last)
    parameters = [nn.Parameter(picture), nn.Parameter(short)]
    samples = Samples(parameters)
    first = samples.take()
    assert first.shape == (2, 256)
    assert len(first[0].unique()) == 256
    assert set(first[0].tolist()) <= set(long.tolist())
    assert first[1].square().mean() == pytest.approx(short.square().sum() / 16)
    with torch.no_grad():
        parameters[0].mul_(2)
    assert torch.equal(samples.take()[0], 2 * first[0])
    parameters[0].data = parameters[0].data.clone() * 2
    assert torch.equal(samples.take()[0], 4 * first[0])
