"""What follows from the measurements, in sentences with their reasons."""

from __future__ import annotations

from scalelong.stability.calibration import Calibration
from scalelong.stability.kappa import PAPER_RANGE, Bound
from scalelong.stability.noise_ratio import UPPER_QUANTILE, RatioAdvice

CAUTION = (
    "A flat gain is no promise: trained with, the coefficients of first weights were much worse than no scaling "
    "(docs/experiment_log.md). To choose, take κ from images (--data) or from short runs (--probe)."
)


def from_data(found: RatioAdvice) -> list[str]:
    """What the ratio says about κ for this number of skips."""
    low, high = PAPER_RANGE
    again = f"{found.draws:,} draws from " if found.draws > found.images else ""
    sentences = [
        f"Under {found.process}, E‖x_t‖²/m = {found.mean_square_norm:.4f} over {again}{found.images:,} images; the "
        f"ratio ‖ε‖²/‖x_t‖² has mean {found.mean:.3f} and ratio of means {found.ratio_of_means:.3f}, and "
        f"{found.share_below_5:.2%} of it lies below 5.",
        f"For {found.num_skips} skips: {_end('the ratio of means', found.low)}; "
        f"{_end(f'the {UPPER_QUANTILE:.0%} quantile', found.high)}.",
        f"The paper's κ in [{low}, {high}] stands for Σκ² from 1.22 ({_kappa(found.paper_low)}) to 5 "
        f"({_kappa(found.paper_high)}) at this number of skips.",
    ]
    return [*sentences, _data_reason(found)]


def data_spec(found: RatioAdvice) -> str:
    """The middle of the range as a spec; 0 and 1 stand for ends that no κ reaches, none for a range of such."""
    low, high = found.low.nearest, found.high.nearest
    if found.num_skips < 2 or low == 1 or high == 0:
        return "none"
    return f"cs:{(low + high) / 2:.2g}"


def _data_reason(found: RatioAdvice) -> str:
    if found.num_skips < 2:
        return "CS begins to scale at the second skip: with one there is no κ to choose."
    if found.low.nearest == 1:
        return f"Even the lower end asks for a sum of {found.num_skips} or more: leave the skips as they are."
    if found.high.nearest == 0:
        return (
            "Even the upper end asks for a sum of 1 or less, which the outermost skip has by itself: the rule "
            "would cut all others, and no spec is made of it."
        )
    return (
        f"{data_spec(found)} is the middle of the range. The rule is the paper's, a matching of orders of "
        "magnitude: it says which κ are plausible, not which is best."
    )


def from_model(found: Calibration, folder: str | None) -> list[str]:
    """What the merges and the gains say; `folder` is where the weights came from, None for fresh ones."""
    gains = [merge.gain for merge in found.merges]
    weights = "these first weights" if folder is None else f"the weights in {folder}"
    sentences = [
        f"With {weights} the skips make the variance at the merges {min(gains):.3g} … {max(gains):.3g} times "
        "that of the main path alone.",
        _flat_sentence(found),
        _gain_sentence(found),
        _direction_sentence(found),
    ]
    if found.undone_by_norm > 0:
        sentences.append(
            f"A GroupNorm follows the concatenation: on {found.undone_by_norm:.0%} of the skips' channels it "
            "divides a constant out again, and only the shortcut sees it. With placement='norm' the constant acts "
            "behind the norm, where skip and main path come with equal variance whatever was measured here: take κ "
            "from the data or from --probe there."
        )
    elif any(merge.behind == "concat" for merge in found.merges):
        sentences.append(
            "A LayerNorm over skip and main path follows the concatenation: a coefficient changes their shares, "
            "not the size of the sum."
        )
    if folder is None:
        sentences.append(
            "First weights say how training starts, not how it goes on: measure a run's folder too, or use --probe."
        )
    return sentences


def _flat_sentence(found: Calibration) -> str:
    if found.spec == "none":
        return "No skip brings much more to its merge, against the main path, than another: the gain is flat as is."
    how = (
        f"κ^i is within a factor of {found.misfit:.2f} of them"
        if found.spec.startswith("cs:")
        else f"no κ^i comes near (the best, κ = {found.kappa:.2g}, is {found.misfit:.1f} times off)"
    )
    outwards = (
        " They shrink the outer skips most, the opposite of CS: the main path arrives weakest there, as the merges "
        "before have shrunk it. To keep skips at one size all through training there is skip-norm."
        if found.merges[0].behind == "linear" and found.coefficients[0] == min(found.coefficients)
        else ""
    )
    return (
        f"{found.spec} would hold every skip to {found.balance:.3g} times the variance of its main path; {how}."
        f"{outwards} {CAUTION}"
    )


def _gain_sentence(found: Calibration) -> str:
    plain = found.predicted["none"]
    return (
        f"Small changes of the input are enlarged {found.largest_gain:.3g} times in the worst direction found, "
        f"{found.typical_gain:.3g} times typically. Without scaling the sum of Thm 3.4 estimates "
        f"{plain['with_m0']:.3g} for the worst with M_0 = {found.m0:.3g}, {plain['with_own_gains']:.3g} with each "
        "pair's own gain: estimates and no bounds, as they follow each skip's own path alone."
    )


def _direction_sentence(found: Calibration) -> str:
    """M_0 > 1 does not settle it: where blocks keep the norm M_0 is 4, and reversed has the smaller gain."""
    (cs, forwards), (turned, backwards) = found.directions.items()
    pairs = list(zip(forwards, backwards, strict=True))
    if all(a < b for a, b in pairs):
        so = f"{cs} has the smaller one at every input"
    elif all(a > b for a, b in pairs):
        so = f"{turned} has the smaller one at every input, against Thm 3.4's argument for CS's direction"
    else:
        so = "which is smaller depends on the input"
    means = [sum(gains) / len(gains) for gains in (forwards, backwards)]
    return (
        f"Which way round CS should run M_0 alone does not settle. The typical gain with these weights is "
        f"{means[0]:.3g} with {cs} and {means[1]:.3g} with {turned}: {so}. That is no statement about quality."
    )


def _end(name: str, bound: Bound) -> str:
    return f"{name} (Σκ² = {bound.sum:.3f}) gives {_kappa(bound)}"


def _kappa(bound: Bound) -> str:
    if bound.kappa is not None:
        return f"κ = {bound.kappa:.3f}"
    return "κ → 0, as Σκ² > 1 for every κ > 0" if bound.nearest == 0 else "κ = 1, as Σκ² < N for every κ < 1"
