"""The constant schedules: pure functions of the number of skips, index 0 the outermost (paper §4.1).

The paper counts from 1, so its κ^(i-1) is κ^i here.
"""


def uniform(num_skips: int, value: float) -> tuple[float, ...]:
    """The same coefficient on every skip: 1 is the plain net, 2^-½ the prior art of §2."""
    return (value,) * num_skips


def cs(num_skips: int, kappa: float) -> tuple[float, ...]:
    """Constant scaling, Eq. 8: κ_i = κ^i. The outermost skip keeps 1, the innermost gets κ^(N-1)."""
    return tuple(kappa**i for i in range(num_skips))


def cs_reversed(num_skips: int, kappa: float) -> tuple[float, ...]:
    """The ablation of Table 4: κ_i = κ^(N-i). The outermost skip gets κ^N, the innermost κ."""
    return tuple(kappa ** (num_skips - i) for i in range(num_skips))
