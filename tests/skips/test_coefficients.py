from hypothesis import given
from hypothesis import strategies as st

from scalelong.skips import coefficients

kappas = st.floats(0.05, 1)
counts = st.integers(1, 30)


@given(counts, kappas)
def test_cs_is_a_geometric_series_from_one(n, kappa):
    series = coefficients.cs(n, kappa)
    assert len(series) == n
    assert series[0] == 1
    # The paper's sum (§4.1): Σ κ_j² = (1 - κ^2N) / (1 - κ²)
    closed_form = n if kappa == 1 else (1 - kappa ** (2 * n)) / (1 - kappa**2)
    assert abs(sum(c * c for c in series) - closed_form) <= 1e-6 * n


@given(counts, kappas)
def test_reversed_is_the_other_way_round_and_one_power_smaller(n, kappa):
    forwards, backwards = coefficients.cs(n, kappa), coefficients.cs_reversed(n, kappa)
    assert all(abs(b - f * kappa) < 1e-12 for f, b in zip(forwards, reversed(backwards), strict=True))


def test_the_papers_direction():
    # PAPER: κ = 0.5 and depth 12; decoder blocks in order of execution, innermost first.
    assert coefficients.cs(6, 0.5)[::-1] == (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
    assert coefficients.cs_reversed(3, 0.5) == (0.125, 0.25, 0.5)
    assert coefficients.uniform(2, 0.3) == (0.3, 0.3)
