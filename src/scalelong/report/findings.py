"""What a comparison shows, in one sentence: which scalings differ from none beyond the spread over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scalelong.report.runs import Run, differences_to_none, held_out_loss, spread, training_loss


def finding(groups: dict[str, list[Run]]) -> str:
    """About the held-out loss where every run has it, or else the loss; empty where nothing stands beside none."""
    runs = [run for group in groups.values() for run in group]
    held_out = not any(math.isnan(held_out_loss(run)) for run in runs)
    value_of, loss = (held_out_loss, "held-out loss") if held_out else (training_loss, "loss")
    found = {scaling: differences_to_none(groups, scaling, value_of) for scaling in groups}
    return conclude({scaling: values for scaling, values in found.items() if values}, loss)


def conclude(differences: dict[str, list[float]], loss: str) -> str:
    """The sentence, from each scaling's differences to none, seed by seed.

    >>> conclude({"cs:0.7": [-0.3, -0.2], "ls": [-0.1, 0.1]}, "loss")
    'Against none, cs:0.7 lowers the loss by 0.25 ± 0.05, beyond the spread over 2 seeds; ls does not differ.'
    """
    if not differences:
        return ""
    seeds = min(map(len, differences.values()))
    if seeds == 1:
        return f"Whether a scaling differs from none in {loss} cannot be told from one seed, which has no spread."
    clear = {scaling: values for scaling, values in differences.items() if beyond_spread(values)}
    if not clear:
        return f"No scaling differs from none in {loss} beyond the spread over {seeds} seeds."
    same = [scaling for scaling in differences if scaling not in clear]
    rest = f"; {_listed(same)} {'does' if len(same) == 1 else 'do'} not differ" if same else ""
    changes = _listed([f"{scaling} {_change(values, loss)}" for scaling, values in clear.items()])
    return f"Against none, {changes}, beyond the spread over {seeds} seeds{rest}."


def beyond_spread(differences: Sequence[float]) -> bool:
    """The mean difference is larger than the range of the differences over seeds."""
    return abs(spread(list(differences))[0]) > max(differences) - min(differences)


def _change(differences: list[float], loss: str) -> str:
    mean, half = spread(differences)
    return f"{'lowers' if mean < 0 else 'raises'} the {loss} by {abs(mean):.2g} ± {half:.1g}"


def _listed(parts: list[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
