"""κ from a budget (§4.1): the sum of the squared coefficients of CS should match ‖ε‖²/‖x_t‖².

With κ_i = κ^i the sum over N skips is 1 + κ² + … + κ^(2(N-1)) = (1 - κ^(2N))/(1 - κ²), between 1 and N.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

PAPER_RANGE = (0.5, 0.95)
PAPER_SUMS = (1.22, 5.0)


def sum_of_squares(kappa: float, num_skips: int) -> float:
    """Σ κ_i² of CS."""
    return math.fsum(kappa ** (2 * i) for i in range(num_skips))


def solve_kappa(total: float, num_skips: int) -> float:
    """The κ in (0, 1) whose squares sum to `total`, by bisection down to neighbouring floats."""
    if isinstance(num_skips, bool) or not isinstance(num_skips, int) or num_skips < 2:
        raise ValueError(f"κ acts from the second skip on, so it takes at least 2 skips, got {num_skips!r}.")
    if not math.isfinite(total) or total <= 1:
        raise ValueError(f"the outermost skip keeps 1, so Σκ² is above 1 for every κ > 0, got {total!r}.")
    if total >= num_skips:
        raise ValueError(
            f"no κ below 1 has Σκ² = {total:g} over {num_skips} skips: Σκ² < N, and κ = 1 (no scaling) has N. Give "
            f"a sum below {num_skips}, or leave the skips as they are."
        )
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if sum_of_squares(middle, num_skips) < total else (low, middle)
    return min(low, high, key=lambda kappa: abs(sum_of_squares(kappa, num_skips) - total))


@dataclass(frozen=True)
class Bound:
    """One end of a range of κ: the sum it stands for, and the κ; None where no κ in (0, 1) has that sum."""

    sum: float
    kappa: float | None
    why: str = ""

    @property
    def nearest(self) -> float:
        """The κ of [0, 1] that comes nearest to the sum: 0 for 1 or less, 1 for N or more."""
        return float(self.sum > 1) if self.kappa is None else self.kappa


def bound_for(total: float, num_skips: int) -> Bound:
    """The κ of a sum, or why there is none."""
    try:
        return Bound(total, solve_kappa(total, num_skips))
    except ValueError as error:
        return Bound(total, None, str(error))
