"""The solver against the sums it must reproduce, and against the closed form of the geometric series."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelong.skips.coefficients import cs
from scalelong.stability.kappa import bound_for, solve_kappa, sum_of_squares


@pytest.mark.parametrize(
    ("total", "skips", "kappa"),
    [(5, 6, 0.963), (5, 8, 0.927), (5, 10, 0.912), (5, 16, 0.898), (1.22, 6, 0.425), (1.22, 16, 0.425)],
)
def test_the_papers_sums(total, skips, kappa):
    assert round(solve_kappa(total, skips), 3) == kappa


@given(st.floats(0.01, 0.999), st.integers(2, 40))
def test_the_sum_is_the_closed_form_and_that_of_the_scaling(kappa, skips):
    closed = (1 - kappa ** (2 * skips)) / (1 - kappa**2)
    assert sum_of_squares(kappa, skips) == pytest.approx(closed, rel=1e-9)
    assert sum_of_squares(kappa, skips) == pytest.approx(sum(c**2 for c in cs(skips, kappa)), rel=1e-12)


@given(st.floats(0.01, 0.999), st.integers(2, 40))
def test_solving_undoes_summing(kappa, skips):
    assert solve_kappa(sum_of_squares(kappa, skips), skips) == pytest.approx(kappa, rel=1e-9)


@given(st.integers(2, 40), st.floats(0.001, 0.998), st.floats(0.001, 0.5))
def test_a_larger_sum_takes_a_larger_kappa_and_more_skips_a_smaller_one(skips, where, further):
    total = 1 + where * (skips - 1)
    more = total + further * (skips - total)
    assert solve_kappa(total, skips) < solve_kappa(more, skips) < 1
    assert solve_kappa(total, skips + 1) <= solve_kappa(total, skips)


@pytest.mark.parametrize(
    ("total", "skips", "says"),
    [
        (6, 6, "no κ below 1 has Σκ² = 6 over 6 skips"),
        (7.5, 6, "Give a sum below 6"),
        (1, 6, "above 1 for every κ > 0, got 1"),
        (math.nan, 6, "got nan"),
        (math.inf, 6, "got inf"),
        (1.5, 1, "at least 2 skips, got 1"),
        (1.5, True, "at least 2 skips, got True"),
    ],
)
def test_what_has_no_kappa_is_a_sentence(total, skips, says):
    with pytest.raises(ValueError, match=says.replace("(", r"\(")):
        solve_kappa(total, skips)
    if skips == 6:
        assert bound_for(total, skips).kappa is None
        assert says in bound_for(total, skips).why
