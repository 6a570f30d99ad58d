"""The detector on series whose answer is known."""

import json
import math

import numpy as np
import pytest

from scalelong.stability import alarm
from scalelong.stability.alarm import LEARNING, Detector, median, steps_to_overflow, usual


def feed(series, names=("loss",)):
    """All alarms of a detector over [steps, signals]."""
    detector = Detector(names)
    rung = [detector.update(step + 1, row) for step, row in enumerate(np.reshape(series, (-1, len(names))))]
    return [a for a in rung if a]


def noisy(steps, level=1.0, spread=0.2, seed=0):
    return level * np.exp(spread * np.random.default_rng(seed).standard_normal(steps))


def test_deviation_and_spread_of_known_rows():
    detector = Detector(["loss"])
    for step, log in enumerate([*range(-2, 50), 7, 8, 9]):
        detector.update(step, [math.exp(log)])
    assert detector.seen == 55  # a step that takes a new median
    assert detector.deviations[0, 55] == pytest.approx(8 - 25)
    assert median(np.arange(5.0)[None]) == 2
    values = np.random.default_rng(0).normal(3, 2, (1, 100_001))
    centre, spread = usual(values)
    assert centre == pytest.approx(3, abs=0.05)
    assert spread == pytest.approx(2 + alarm.QUIET, abs=0.05)  # 1.48 MAD is the deviation of normal values


def test_overflow_is_foretold_from_growth():
    grows = math.log(1e-3) + 0.1 * np.arange(20)  # e^(0.1) a step, 50 steps to go from 1e-3 e^1.9
    assert steps_to_overflow(np.stack([grows, np.full(20, -0.1)])) == pytest.approx([-grows[-1] / 0.1, np.inf])


@pytest.mark.parametrize("seed", range(2))
def test_noise_a_falling_loss_and_a_warm_up_ring_nothing(seed):
    t = np.arange(1000)
    assert not feed(noisy(1000, seed=seed, spread=0.5))
    assert not feed(noisy(1000, level=1 / (1 + t / 100), seed=seed))
    assert not feed(noisy(1000, level=np.minimum(1, (t + 1) / 500), spread=0.05, seed=seed), ["update/a"])
    assert not feed(np.ones(1000))


def test_a_single_spike_rings_nothing_and_a_lasting_one_does():
    x = noisy(400, spread=0.2)
    x[300] *= 4
    assert not feed(x)
    x[300:] *= 30
    (first, *_) = feed(x)
    assert 301 <= first.step <= 303


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_the_threshold_is_that_of_the_signal_itself(scale):
    """The same growth rings in a quiet signal and not in one that always varies so much, at any size."""
    growth = np.where(np.arange(400) < 300, 1.0, 2.5) * scale
    quiet, loud = noisy(400, growth, 0.05), noisy(400, growth, 1.0)
    alarms = feed(np.stack([quiet, loud], 1), ("output/in_blocks.0", "gradient/in_blocks.0"))
    assert alarms[0].step <= 304
    assert {a.signal for a in alarms} == {"output"}
    assert "gradient/in_blocks.0" not in alarms[0].others
    assert alarms[0].layer == "in_blocks.0"
    assert alarms[0].factor == pytest.approx(2.5, rel=0.6)


def test_a_slow_ramp_rings_long_before_it_is_tenfold():
    x = noisy(600, spread=0.05)
    x[300:] *= 1.03 ** np.arange(300)
    (first, *_) = feed(x, ("output/b",))
    tenfold = 301 + math.log(10) / math.log(1.03)
    assert first.step <= tenfold - 20


def test_gates_ring_both_ways_and_others_only_upwards():
    x = noisy(600, spread=0.05)
    x[300:] *= 0.95 ** np.arange(300)
    assert not feed(x, ("output/b",))
    assert feed(x, ("gate/skip 0",))


def test_nothing_rings_while_the_run_is_young():
    x = noisy(LEARNING)
    x[60:] *= 100
    assert not feed(x)


def test_unseen_signals_wait_without_harm():
    x = noisy(1000)
    x[::3] = -1  # not seen
    x[:200] = -1
    assert not feed(x, ("output/b",))
    x[800:] *= 50
    assert feed(x, ("output/b",))


def test_what_sleeps_now_and_then_rings_nothing_until_it_has_been_awake_for_long():
    x = noisy(1600)
    x[100:900] *= np.random.default_rng(1).random(800) < 0.1  # a dead unit, alive for every tenth batch
    x[500:900] *= 30
    assert not feed(x, ("gradient/skip_scaling",))
    x[900:] = noisy(700, seed=1)
    x[1400:] *= 30
    (first, *_) = feed(x, ("gradient/skip_scaling",))
    assert 1401 <= first.step <= 1404


def test_half_precision_rings_before_its_range_ends():
    detector = Detector(["peak/mid_block"])
    share = 1e-4
    for step in range(1, 1000):
        share *= 1.012 if step > LEARNING else 1.0
        rung = detector.update(step, [share])
        if rung:
            break
    left = -math.log(share) / math.log(1.012)
    assert 20 < left <= alarm.SOON + 1
    assert "float16" in str(rung)
    assert "mid_block" in str(rung)


def test_new_signals_begin_and_the_others_go_on():
    x = noisy(600, seed=1)
    x[550:] *= 30
    old = [Detector(["gradient/a", "loss"]) for _ in range(2)]
    for step in range(500):
        for detector in old:
            detector.update(step, [1.0, x[step]])
    plain, new = old[0], old[1].renamed(["loss", "gradient/new", "gradient/a"])
    for step in range(500, 600):
        expected = plain.update(step, [1.0, x[step]])
        assert new.update(step, [x[step], 100.0 ** (step > 520), 1.0]) == expected
    assert plain._quiet_until > 550


@pytest.mark.parametrize("saved_at", [240, 270])  # before an alarm, and in the quiet after it
def test_state_goes_through_json_and_other_models_are_refused(saved_at):
    x = noisy(400)
    x[250:] *= 30
    x[300:] *= 30
    whole, first = Detector(["loss"]), Detector(["loss"])
    rung = [step for step in range(saved_at) if whole.update(step, x[step : step + 1])]
    assert bool(rung) == (saved_at > 250)
    for step in range(saved_at):
        first.update(step, x[step : step + 1])
    second = Detector(["loss"])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for step in range(saved_at, 400):
        assert whole.update(step, x[step : step + 1]) == second.update(step, x[step : step + 1])
    with pytest.raises(ValueError, match="other ones than the 2"):
        Detector(["loss", "x"]).load_state_dict(first.state_dict())


def test_an_update_may_wander_by_half_and_not_double():
    """Under a momentum of 0.99 it is a slow mean of gradients: quiet for long, and then larger for a while."""
    wanders = noisy(600, spread=0.02)
    wanders[400:440] *= 1.6
    assert feed(wanders, ("gradient/block",))
    assert not feed(wanders, ("update/block",))
    wanders[400:440] *= 1.6
    (rung,) = feed(wanders, ("update/block",))
    assert rung.step in range(401, 405)


@pytest.mark.parametrize("kind", ["gradient", "update", "output"])
def test_a_block_that_wakes_up_rings_only_when_it_is_as_large_as_the_largest(kind):
    names = (f"{kind}/large", f"{kind}/small")
    series = np.stack([noisy(400), noisy(400, level=1e-3, seed=1)], axis=1)
    series[300:, 1] *= 50
    assert not feed(series, names)
    series[300:, 1] *= 50
    (rung, *_) = feed(series, names)
    assert rung.layer == "small"
    assert 301 <= rung.step <= 303


def test_an_update_rings_only_where_its_gradient_takes_part():
    """Adam's update of a block that hardly has gradients doubles by itself, and moves nothing else."""
    names = ("gradient/large", "gradient/small", "update/large", "update/small")
    levels = (1.0, 1e-3, 1e-3, 1e-3)
    series = np.stack([noisy(400, level, 0.05, seed) for seed, level in enumerate(levels)], axis=1)
    series[300:, 3] *= 5
    assert not feed(series, names)
    series[:, 1] *= 100
    (rung, *_) = feed(series, names)
    assert (rung.signal, rung.layer) == ("update", "small")


def test_signals_that_were_never_seen_are_compared_with_nothing():
    series = np.stack([noisy(400, level=1e-4), np.full(400, np.nan)], axis=1)
    series[300:, 0] *= 50
    assert feed(series, ("gradient/seen", "gradient/never"))
