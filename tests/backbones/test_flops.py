from functools import partial

import pytest

from scalelong.backbones.build import build
from scalelong.backbones.flops import training_flops_per_image


@pytest.mark.parametrize("scaling", ["none", "cs:0.7"])
def test_a_uvit_does_what_its_formula_says(scaling):
    flops = training_flops_per_image(partial(build, "cifar10-uvit-s", scaling=scaling), 3, 32)
    linear = 12 * 512 * 512 * 13 + 2 * 512 * 512 * 6  # weights that every token meets, per block and per merge
    by_hand = 3 * (2 * linear * 257 + 4 * 257**2 * 512 * 13)
    assert flops == pytest.approx(by_hand, rel=0.005)  # patches in and out come on top
    assert flops == pytest.approx(73.2e9, rel=0.005)
