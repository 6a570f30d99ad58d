import pytest
import torch
from torch import nn

from scalelong.training.ema import EMA, default_rate, move_averages


def update(ema, model, step=0, keep=1.0):
    weight = ema.weight(torch.tensor(step), torch.tensor(keep))
    with torch.no_grad():
        move_averages([list(ema.weights.values())], list(model.parameters()), [weight])


def test_the_average_is_the_closed_form():
    model = nn.Linear(3, 2)
    first = model.weight.detach().clone()
    ema = EMA(model, 0.9)
    history = []
    for step in range(5):
        with torch.no_grad():
            model.weight.fill_(float(step))
        history.append(float(step))
        update(ema, model)
    want = first * 0.9**5 + sum(0.1 * 0.9 ** (4 - i) * h for i, h in enumerate(history))
    torch.testing.assert_close(ema.weights["weight"], want)


def test_applied_for_as_long_as_the_block_lasts():
    model = nn.Linear(3, 2)
    ema = EMA(model, 0.5)
    with torch.no_grad():
        model.weight.add_(1)
    live = model.weight.detach().clone()
    with ema.applied_to(model):
        assert torch.equal(model.weight, ema.weights["weight"])
    with pytest.raises(ZeroDivisionError), ema.applied_to(model):
        1 / 0  # noqa: B018
    assert torch.equal(model.weight, live)


@pytest.mark.parametrize(
    ("step", "rate"), [(0, 0.999), (4999, 0.999), (5000, 0.999), (49_999, 0.999), (50_001, 0.9999)]
)
def test_the_slowest_average_that_has_forgotten_its_start(step, rate):
    assert default_rate([0.999, 0.9999], step) == rate


def test_a_skipped_step_leaves_every_bit():
    model = nn.Linear(3, 2)
    ema = EMA(model, 0.9)
    before = {name: w.clone() for name, w in ema.weights.items()}
    with torch.no_grad():
        model.weight.add_(1)
    update(ema, model, keep=0.0)
    assert all(torch.equal(w, before[name]) for name, w in ema.weights.items())


def test_warm_up_forgets_the_first_weights_sooner():
    ema = EMA(nn.Linear(1, 1), 0.99, warmup=True)
    weights = [ema.weight(torch.tensor(step), torch.tensor(1.0)).item() for step in (0, 90, 890, 5000)]
    assert weights == pytest.approx([0.9, 0.09, 0.01, 0.01])
