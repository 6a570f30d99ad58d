"""A loss that rises slowly, on series whose answer is known."""

import json
import math

import numpy as np
import pytest

from scalelong.stability.alarm import Detector
from scalelong.stability.rise import DOUBLED, STEPS, STRANGE, Rise
from scalelong.training.log import LEVEL


def feed(losses, watching=None):
    """Where it rings, and by how much."""
    watching = watching or Rise()
    found = [(step, watching.update(loss, may_ring=True)) for step, loss in enumerate(losses, 1)]
    return [(step, *rung) for step, rung in found if rung]


def scattered(levels, spread, seed=0):
    return levels * np.exp(spread * np.random.default_rng(seed).standard_normal(len(levels)))


@pytest.mark.parametrize("percent", [0.5, 2, 4])
@pytest.mark.parametrize("spread", [0.0, 0.1, 0.3])
def test_a_rise_rings_when_the_level_has_doubled(percent, spread):
    """The mean logarithm of the last 30 lags by 14.5 steps."""
    steps = np.arange(600)
    losses = scattered((1 + percent / 100) ** np.maximum(steps - 200, 0), spread)
    first = feed(losses)[0][0]
    doubled = 200 + 14.5 + DOUBLED / math.log(1 + percent / 100)
    error = 1.5 * STRANGE * spread / math.sqrt(STEPS) / math.log(1 + percent / 100)
    assert doubled - error - 2 <= first <= doubled + error + 3


def test_each_doubling_rings_once():
    steps = np.arange(500)
    rung = feed(scattered(1.02 ** np.maximum(steps - 200, 0), 0.05))
    assert len(rung) in (7, 8)  # of 300 · ln 1.02 / ln 2 = 8.6, which begin 14 steps late
    assert all(factor == pytest.approx(2, rel=0.1) for _, factor, _ in rung)


@pytest.mark.parametrize("spread", [0.05, 0.3, 1.5])  # of batches of some 256, 16 and 1
def test_scatter_alone_never_rings(spread):
    for seed in range(3):
        assert not feed(scattered(np.ones(20_000), spread, seed))
    falling = 1 / (1 + np.arange(20_000) / 50)
    assert not feed(scattered(falling, spread))


def test_the_alarm_tells_of_what_its_other_rules_never_see():
    steps = np.arange(700)
    losses = scattered(1.02 ** np.maximum(steps - 300, 0), 0.1)
    detector = Detector(["loss"])
    rung = [alarm for step, loss in enumerate(losses, 1) if (alarm := detector.update(step, [loss]))]
    assert {alarm.signal for alarm in rung} == {LEVEL}
    assert str(rung[0]).startswith(f"step {rung[0].step}: the level of the loss, over 30 steps, is 2")
    assert not [alarm for alarm in rung if alarm.step <= 300]


def test_a_state_goes_on_where_it_was():
    losses = scattered(1.01 ** np.maximum(np.arange(500) - 200, 0), 0.2)
    whole, first, second = Rise(), Rise(), Rise()
    rung = feed(losses, whole)
    feed(losses[:260], first)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [step for step, *_ in rung if step > 260] == [260 + step for step, *_ in feed(losses[260:], second)]


def test_what_is_no_loss_is_passed_over():
    watching = Rise()
    for loss in (math.nan, math.inf, 0.0, -1.0):
        assert watching.update(loss, may_ring=True) is None
    assert watching.seen == 0
