"""What is said follows from the numbers, and says no more than they do."""

import dataclasses

import pytest
import torch

from scalelong.skips.spec import parse_scaling
from scalelong.stability import advice
from scalelong.stability.calibration import Calibration, Merge
from scalelong.stability.noise_ratio import Norms, advise_from


def ratios(*values, num_skips=6):
    """The advice from images of which each has one of these ratios."""
    return advise_from(Norms(torch.tensor(values), torch.ones(len(values))), "edm", num_skips)


@pytest.mark.parametrize(
    ("values", "num_skips", "spec", "says"),
    [
        ((1.2, 1.4, 2.0), 6, "cs:0.65", "cs:0.65 is the middle of the range"),
        ((0.5, 0.6, 1.9), 6, "cs:0.34", "gives κ → 0, as Σκ² > 1 for every κ > 0"),  # a small κ, not none
        ((0.5, 0.6, 0.7), 6, "none", "Even the upper end asks for a sum of 1 or less"),
        ((7.0, 8.0, 9.0), 6, "none", "Even the lower end asks for a sum of 6 or more: leave the skips"),
        ((1.5,) * 30 + (90.0,), 10, "cs:0.95", "gives κ = 1, as Σκ² < N for every κ < 1"),
        ((0.5, 0.6, 1.9), 1, "none", "with one there is no κ to choose"),
    ],
)
def test_the_datas_spec_and_its_reason(values, num_skips, spec, says):
    found = ratios(*values, num_skips=num_skips)
    assert advice.data_spec(found) == spec
    parse_scaling(spec)
    assert says in " ".join(advice.from_data(found))


def calibration(**changes):
    merge = Merge(
        index=0, module="m", behind="linear", main_variance=1.0, skip_variance=40.0, coefficient=1.0,
        undone_by_norm=0.0, pair_gain=4.1,
    )  # fmt: skip
    values = {
        "merges": [merge, dataclasses.replace(merge, index=1, skip_variance=1.0)],
        "undone_by_norm": 0.0,
        "m0": 4.1,
        "middle_gain": 1.0,
        "largest_gain": 0.305,
        "typical_gain": 0.2,
        "predicted": {"none": {"with_m0": 0.047, "with_own_gains": 0.03}},
        "directions": {"cs:0.7": [1.9, 1.8], "cs-reversed:0.7": [1.5, 1.4]},
        "balance": 1.0,
        "coefficients": [0.16, 1.0],
        "kappa": 1.0,
        "misfit": 6.3,
        "spec": "per-skip:0.16/1",
        "spec_per_skip": "per-skip:0.16/1",
        "flat_gains": [2.0, 2.0],
    }
    return Calibration(**values | changes)


@pytest.mark.parametrize(
    ("directions", "says"),
    [
        (([1.9, 1.8], [1.5, 1.4]), "cs-reversed:0.7 has the smaller one at every input, against Thm 3.4"),
        (([101, 99], [112, 111]), "cs:0.7 has the smaller one at every input"),
        (([1.9, 1.2], [1.5, 1.4]), "which is smaller depends on the input"),
    ],
)
def test_the_direction_is_judged_by_what_was_measured_and_not_by_m_0(directions, says):
    found = calibration(directions=dict(zip(("cs:0.7", "cs-reversed:0.7"), directions, strict=True)))
    text = " ".join(advice.from_model(found, folder=None))
    assert says in text
    assert "the right way round" not in text


def test_the_estimates_are_called_so_and_the_coefficients_carry_a_caution():
    text = " ".join(advice.from_model(calibration(), folder=None))
    assert "estimates and no bounds" in text
    assert "at most" not in text
    assert "per-skip:0.16/1 would hold every skip to 1 times" in text
    assert "A flat gain is no promise: trained with" in text
    assert "Proposed" not in text
    assert text.startswith("With these first weights the skips make")
    flat = " ".join(advice.from_model(calibration(spec="none"), folder="my_unet"))
    assert "flat as is" in flat
    assert "not recommended" not in flat
    assert flat.startswith("With the weights in my_unet the skips make")  # trained or fresh: nobody knows


@pytest.mark.parametrize(
    ("images", "says"), [(None, "over 3 images;"), (3, "over 3 images;"), (2, "over 3 draws from 2 images;")]
)
def test_an_image_that_is_drawn_again_is_not_counted_again(images, says):
    norms = Norms(torch.tensor([1.2, 1.4, 2.0]), torch.ones(3), images)
    assert says in advice.from_data(advise_from(norms, "edm", 6))[0]
