"""What follows from the measurements, in sentences with their reasons."""

from __future__ import annotations

from scalelong.stability.calibration import Calibration
from scalelong.stability.kappa import PAPER_RANGE, Bound
from scalelong.stability.noise_ratio import UPPER_QUANTILE, RatioAdvice


def from_data(found: RatioAdvice) -> list[str]:
    """What the ratio says about κ for this number of skips."""
    low, high = PAPER_RANGE
    sentences = [
        f"Under {found.process}, E‖x_t‖²/m = {found.mean_square_norm:.4f} over {found.images:,} images; the ratio "
        f"‖ε‖²/‖x_t‖² has mean {found.mean:.3f} and ratio of means {found.ratio_of_means:.3f}, and "
        f"{found.share_below_5:.2%} of it lies below 5.",
        f"For {found.num_skips} skips: {_end('the ratio of means', found.low)}; "
        f"{_end(f'the {UPPER_QUANTILE:.0%} quantile', found.high)}.",
        f"The paper's κ in [{low}, {high}] stands for Σκ² from 1.22 ({_kappa(found.paper_low)}) to 5 "
        f"({_kappa(found.paper_high)}) at this number of skips.",
    ]
    if found.low.kappa is not None:
        sentences.append(
            f"{data_spec(found)} is the middle of the range. The rule is the paper's, a matching of orders of "
            "magnitude: it says which κ are plausible, not which is best."
        )
    return sentences


def data_spec(found: RatioAdvice) -> str:
    """The middle of the range as a spec; κ = 1 stands for an upper end that no κ reaches."""
    if found.low.kappa is None:
        return "none"
    high = 1.0 if found.high.kappa is None else found.high.kappa
    return f"cs:{(found.low.kappa + high) / 2:.2g}"


def from_model(found: Calibration, trained: bool) -> list[str]:
    """What the merges and the gains say."""
    gains = [merge.gain for merge in found.merges]
    weights = "trained weights" if trained else "first weights"
    sentences = [
        f"With these {weights} the skips make the variance at the merges {min(gains):.3g} … {max(gains):.3g} times "
        "that of the main path alone.",
        f"Proposed: {found.spec}. {_reason(found)}",
        _gain_sentence(found),
    ]
    undone = sum(merge.undone_by_norm for merge in found.merges) / len(found.merges)
    if undone > 0:
        sentences.append(
            f"A GroupNorm follows the concatenation: on {undone:.0%} of the skips' channels it divides a constant "
            "out again, and only the shortcut sees it. With placement='norm' the constant acts behind the norm, "
            "where skip and main path come with equal variance whatever was measured here: take κ from the data or "
            "from --probe there."
        )
    elif any(merge.behind == "concat" for merge in found.merges):
        sentences.append(
            "A LayerNorm over skip and main path follows the concatenation: a coefficient changes their shares, "
            "not the size of the sum."
        )
    if not trained:
        sentences.append(
            "First weights say how training starts, not how it goes on: measure a run's folder too, or use --probe."
        )
    return sentences


def _reason(found: Calibration) -> str:
    if found.spec == "none":
        return "No skip brings much more to its merge, against the main path, than another: the gain is flat as is."
    how = (
        f"κ^i is within a factor of {found.misfit:.2f} of the coefficients that"
        if found.spec.startswith("cs:")
        else f"No κ^i comes near (the best, κ = {found.kappa:.2g}, is {found.misfit:.1f} times off): these numbers"
    )
    outwards = (
        " They shrink the outer skips most, the opposite of CS: the main path arrives weakest there, as the merges "
        "before have shrunk it. Such numbers describe first weights; trained with, they were much worse than no "
        "scaling (docs/experiment_log.md). To keep skips at one size all through training there is skip-norm."
        if found.merges[0].behind == "linear" and found.coefficients[0] == min(found.coefficients)
        else ""
    )
    return f"{how} hold every skip to {found.balance:.3g} times the variance of its main path.{outwards}"


def _gain_sentence(found: Calibration) -> str:
    plain = found.predicted["none"]
    direction = (
        "so inner skips count more and CS, which shrinks them most, runs the right way round"
        if found.m0 > 1
        else "so inner skips count less by themselves, and Thm 3.4 gives no reason for CS's direction"
    )
    return (
        f"M_0 = {found.m0:.3g}, {direction}. Small changes of the input are enlarged {found.largest_gain:.3g} "
        f"times at most, {found.typical_gain:.3g} typically; Thm 3.4 bounds that by {plain['bound']:.3g} without "
        f"scaling, by {plain['with_own_gains']:.3g} with each pair's own gain."
    )


def _end(name: str, bound: Bound) -> str:
    return f"{name} (Σκ² = {bound.sum:.3f}) gives {_kappa(bound)}"


def _kappa(bound: Bound) -> str:
    return f"κ = {bound.kappa:.3f}" if bound.kappa is not None else "no κ in (0, 1)"
