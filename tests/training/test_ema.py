import pytest
import torch
from torch import nn

from scalelong.training.ema import EMA, default_rate


def test_the_average_is_the_closed_form():
    model = nn.Linear(3, 2)
    first = model.weight.detach().clone()
    ema = EMA(model, 0.9)
    history = []
    for step in range(5):
        with torch.no_grad():
            model.weight.fill_(float(step))
        history.append(float(step))
        ema.update(model)
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
