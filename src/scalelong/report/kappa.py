"""What `scalelong kappa` found, as sections of a page."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from scalelong.report.compared import show
from scalelong.report.figures import drawn
from scalelong.report.page import Section
from scalelong.report.theory import ratio_figure


def data_section(found: dict[str, Any], advice: list[str]) -> Section:
    """The distribution of ‖ε‖²/‖x_t‖² and the range of κ."""
    return Section("κ from the data", " ".join(advice), ratio_figure(found), rows=range_rows(found))


def range_rows(found: dict[str, Any]) -> list[dict[str, str]]:
    """The range that the data implies, the paper's beside it."""
    rows = []
    for end, what in (("low", "ratio of means"), ("high", "97 % quantile")):
        mine, paper = found[end], found[f"paper_{end}"]
        rows.append(
            {
                "end": f"{end}: {what}",
                "Σκ²": f"{mine['sum']:.3f}",
                "κ": _number(mine),
                "paper's Σκ²": f"{paper['sum']:.3g}",
                "its κ here": _number(paper),
                "its range": str(found["paper_range"][end == "high"]),
            }
        )
    return rows


def model_section(found: dict[str, Any], advice: list[str]) -> Section:
    """What skip and main path bring to each merge, and the coefficients."""

    def variances(axes: Any) -> None:
        for name, marker in (("main_variance", "s-"), ("skip_variance", "o-")):
            axes.plot([merge[name] for merge in found["merges"]], marker, ms=4, label=name.replace("_", " "))
        axes.set(xlabel="skip (0 = outermost)", ylabel="variance at the merge", yscale="log")
        axes.locator_params(axis="x", integer=True)

    def gains(axes: Any) -> None:
        axes.plot([merge["gain"] for merge in found["merges"]], "o-", ms=4, label="gain of the merge as it is")
        axes.plot(found["flat_gains"], "s-", ms=4, label=f"with {found['spec'].partition(':')[0]}")
        axes.plot(found["coefficients"], "k.--", label="coefficient")
        axes.set(xlabel="skip (0 = outermost)", ylabel="gain, coefficient", yscale="log")
        axes.locator_params(axis="x", integer=True)

    svg = drawn([variances, gains])
    estimates = "; ".join(", ".join(row.values()) for row in gain_rows(found))
    note = f"What the sum of Thm 3.4 estimates for a scaling, with M_0 and with each pair's own gain: {estimates}."
    return Section("κ from the model", " ".join(advice), svg, panels=True, rows=merge_rows(found), note=note)


def merge_rows(found: dict[str, Any]) -> list[dict[str, str]]:
    """One row per skip."""
    normed = any(merge["undone_by_norm"] for merge in found["merges"])
    return [
        {
            "i": str(merge["index"]),
            "module": merge["module"],
            "main": f"{merge['main_variance']:.3g}",
            "skip": f"{merge['skip_variance']:.3g}",
            "gain": f"{merge['gain']:.3g}",
            **({"undone by norm": f"{merge['undone_by_norm']:.0%}"} if normed else {}),
            "‖b∘a‖": f"{merge['pair_gain']:.3g}",
            "flat": f"{coefficient:.3g}",
            "gain then": f"{flat:.3g}",
        }
        for merge, coefficient, flat in zip(
            found["merges"], found["coefficients"], found["flat_gains"], strict=True
        )
    ]


def gain_rows(found: dict[str, Any]) -> list[dict[str, str]]:
    """What the sum of Thm 3.4 estimates per scaling."""
    return [
        {
            "scaling": name,
            "Σ κ_i M_0^i + c_0": f"{value['with_m0']:.3g}",
            "with each pair's own gain": f"{value['with_own_gains']:.3g}",
        }
        for name, value in found["predicted"].items()
    ]


def probe_section(found: dict[str, Any]) -> Section:
    """Loss and oscillation of every round, with the spread over seeds."""

    def panel(key: str, ylabel: str) -> Callable[[Any], None]:
        def draw(axes: Any) -> None:
            for scores in found["rounds"]:
                finite = [score for score in scores if all(map(math.isfinite, score[key]))]  # the rest diverged
                means = [sum(score[key]) / len(score[key]) for score in finite]
                below = [max(0.0, mean - min(score[key])) for mean, score in zip(means, finite, strict=True)]
                above = [max(0.0, max(score[key]) - mean) for mean, score in zip(means, finite, strict=True)]
                kappas, steps = [score["kappa"] for score in finite], scores[0]["steps"]
                axes.errorbar(kappas, means, [below, above], fmt="o-", ms=4, capsize=2, label=f"{steps} steps")
            axes.set(xlabel="κ (1 = no scaling)", ylabel=ylabel)

        return draw

    text = "Means over the second half of each round's steps; bars are the range over seeds."
    if any(not math.isfinite(loss) for scores in found["rounds"] for score in scores for loss in score["losses"]):
        text += " A κ of which a run diverged has no point."
    svg = drawn([panel("losses", "loss"), panel("oscillations", "oscillation of the gradient norm")])
    return Section(
        "κ from short runs", text, svg, panels=True, verdict=f"{found['verdict']}.", rows=probe_rows(found)
    )


def probe_rows(found: dict[str, Any]) -> list[dict[str, str]]:
    """One row per κ and round."""
    return [
        {
            "steps": str(score["steps"]),
            "scaling": score["spec"],
            "loss": show(score["losses"], lost="diverged"),
            "minus none's": "–" if score["spec"] == "none" else show(score["differences"], lost="diverged"),
            "oscillation": show(score["oscillations"], lost="diverged"),
            "beyond the spread": "yes" if score["beyond_spread"] and score["spec"] != "none" else "no",
        }
        for scores in found["rounds"]
        for score in scores
    ]


def _number(bound: dict[str, Any]) -> str:
    if bound["kappa"] is None:
        return "none below 1" if bound["sum"] > 1 else "none above 0"
    return f"{bound['kappa']:.3f}"
