"""`run`: all statements of §3 and §4.1 as experiments, in the paper's order. The theorems are in `theorems.py`."""

from __future__ import annotations

from collections.abc import Callable

from scalelong.data.store import Store
from scalelong.diffusion.process import mean_square_norm, process_named
from scalelong.stability.kappa import PAPER_RANGE, PAPER_SUMS, sum_of_squares
from scalelong.stability.noise_ratio import RatioAdvice, advise_from, measure_norms, measured, uniform_images
from scalelong.stability.robustness import direction, theorem_3_4
from scalelong.stability.statements import Check, Row, Statement
from scalelong.stability.theorems import Settings, theorem_3_1, theorem_3_3

SCHEDULES = ("vp-sde", "ddpm", "sd", "cosine")
UNIFORM = "x_0 ~ U[-1, 1]"
_RATIO_OF_MEANS, _MEAN_OF_RATIO = "“mean” is the ratio of means", "“mean” is the mean of the ratio"
TOLERANCE, NEAR_MEAN, LEAST_BELOW_5 = 1e-3, 0.05, 0.967


def run(
    settings: Settings, store: Store | None = None, watch: Callable[[str], None] = lambda name: None
) -> list[Statement]:
    """All statements; `store` adds real images to Lemma 3.2 and to §4.1. `watch` is told what comes next."""
    experiments: dict[str, Callable[[], Statement]] = {
        "Lemma 3.2": lambda: lemma_3_2(settings, store),
        "Thm 3.1": lambda: theorem_3_1(settings),
        "Thm 3.3": lambda: theorem_3_3(settings),
        "Thm 3.4": lambda: theorem_3_4(settings),
        "Direction of CS": lambda: direction(settings),
        "κ from data": lambda: data_range(settings, store),
    }
    found = []
    for name, experiment in experiments.items():
        watch(name)
        found.append(experiment())
    return found


def lemma_3_2(settings: Settings, store: Store | None = None, count: int = 4000) -> Statement:
    """E‖x_t‖²/m for each schedule, on uniform x_0 and on real images."""
    rows: list[Row] = []
    for name in SCHEDULES:
        process = process_named(name)
        closed = mean_square_norm(process, 1 / 3)
        norms = measure_norms(uniform_images((3072,), settings.seed), process, count, settings.seed)
        rows.append(_lemma_row(UNIFORM, name, closed, norms.noised.mean().item()))
        if store is not None:
            norms = measured(store, process, min(50_000, max(count, len(store))), settings.seed)
            rows.append(_lemma_row(f"x_0 is from {store.folder.name}", name, closed, norms.noised.mean().item()))
    return judge_lemma(rows)


def _lemma_row(data: str, process: str, closed: float, found: float) -> Row:
    return {"data": data, "process": process, "closed_form": closed, "measured": found}


def judge_lemma(rows: list[Row]) -> Statement:
    """Real images are not uniform: the ⅔ in the lemma is 1 minus the second moment of x_0."""
    checks = [
        Check(
            row["data"],
            abs(row["measured"] - row["closed_form"]) <= TOLERANCE,
            f"{row['process']}: measured {row['measured']:.4f}, closed form {row['closed_form']:.4f}",
        )
        for row in rows
    ]
    return Statement(
        name="Lemma 3.2",
        claim="For x_0 ~ U[-1, 1], E‖x_t‖² = (1 - ⅔ E ᾱ_t) m.",
        rule=f"Measured and closed form agree to {TOLERANCE:g}.",
        checks=checks,
        remark="For data of second moment s the ⅔ becomes 1 - s: the order m stays, the constant is the data's.",
        rows=rows,
    )


def data_range(settings: Settings, store: Store | None = None) -> Statement:
    """The ratio ‖ε‖²/‖x_t‖² under DDPM's schedule: which mean is 1.22, what lies below 5, what κ follows."""
    process = process_named("ddpm")
    if store is None:
        norms = measure_norms(uniform_images((3072,), settings.seed), process, 4000, settings.seed)
    else:
        norms = measured(store, process, min(50_000, max(4000, len(store))), settings.seed)
    return judge_data_range(
        advise_from(norms, "ddpm", settings.num_skips), UNIFORM if store is None else store.folder.name
    )


def judge_data_range(found: RatioAdvice, data: str) -> Statement:
    """Both readings of “mean”; the upper end is judged with the one that can be meant."""
    mean, upper = PAPER_SUMS
    at_upper = sum_of_squares(PAPER_RANGE[1], found.num_skips)
    checks = [
        Check(
            _RATIO_OF_MEANS,
            abs(found.ratio_of_means - mean) <= NEAR_MEAN,
            f"{data}: E‖ε‖²/E‖x_t‖² = {found.ratio_of_means:.3f}",
        ),
        Check(_MEAN_OF_RATIO, abs(found.mean - mean) <= NEAR_MEAN, f"{data}: E[‖ε‖²/‖x_t‖²] = {found.mean:.3f}"),
        Check(
            _RATIO_OF_MEANS,
            found.share_below_5 >= LEAST_BELOW_5,
            f"{data}: {found.share_below_5:.2%} below 5",
        ),
        Check(
            _RATIO_OF_MEANS,
            at_upper <= upper,
            f"Σκ² = {at_upper:.2f} for κ = 0.95 over {found.num_skips} skips",
        ),
    ]
    return Statement(
        name="κ from data",
        claim="‖ε‖²/‖x_t‖² has mean about 1.22 and upper bound about 5, so κ lies in [0.5, 0.95] (§4.1).",
        rule=f"1.22 to {NEAR_MEAN}; at least 96.7 % below 5; Σκ² of κ = 0.95 at most 5.",
        checks=checks,
        remark="Σκ² = 1.22 gives κ = 0.425, not 0.5, and κ = 0.95 passes Σκ² = 5 from 7 skips on.",
        rows=[],
        numbers=found.as_dict(),
    )
