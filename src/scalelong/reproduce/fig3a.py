"""Fig. 3a: ‖x_t‖²/m over the noise levels, on real images."""

from __future__ import annotations

from typing import Any

import torch

from scalelong.data.store import Store
from scalelong.diffusion.process import process_named
from scalelong.reproduce.drawing import panels
from scalelong.reproduce.plan import Data, Folders, Reproduction
from scalelong.stability.noise_ratio import measured
from scalelong.stability.statements import Check, Statement

COUNT, BINS = 10_000, 40
PAPER_MEAN = 0.8163  # Lemma 3.2 for images of independent U[-1, 1] pixels under the DDPM schedule
_RULE = f"E‖x_t‖²/m, measured, lies within 10 % of the lemma's {PAPER_MEAN} for uniform pixels."


def collect(folders: Folders, store: Store) -> Data:
    """Each image noised once; the times are spread evenly, so neighbours in order are neighbours in time."""
    norms = measured(store, process_named("ddpm"), COUNT).noised
    quantiles = torch.quantile(norms.reshape(BINS, -1), torch.tensor([0.05, 0.5, 0.95]).double(), dim=1)
    return {
        "t": ((torch.arange(BINS) + 0.5) / BINS).tolist(),
        "quantiles": dict(zip(("5 %", "50 %", "95 %"), quantiles.tolist(), strict=True)),
        "mean": norms.mean().item(),
        "data": store.manifest.source,
    }


def draw(data: Data) -> Any:
    """The median and the band of 90 % of the images, over time."""
    figure, (axes,) = panels(1)
    low, median, high = data["quantiles"].values()
    axes.plot(data["t"], median, label="median")
    axes.fill_between(data["t"], low, high, alpha=0.2, lw=0, label="90 % of the images")
    axes.axhline(data["mean"], color="k", lw=0.8, label=f"mean {data['mean']:.4f}")
    axes.axhline(PAPER_MEAN, color="k", ls=":", label=f"uniform pixels {PAPER_MEAN}")
    axes.set(xlabel="t / T", ylabel="‖x_t‖² / m", ylim=(0, None))
    axes.legend(frameon=False, fontsize=8)
    return figure


def judge(data: Data) -> Statement:
    """Against the lemma; what the pixels are like decides, and follows from the same mean."""
    off = data["mean"] / PAPER_MEAN - 1
    found = f"{data['mean']:.4f}, {100 * abs(off):.1f} % {'below' if off < 0 else 'above'} {PAPER_MEAN}"
    mean_square = 1 - 2 / 3 * (1 - data["mean"]) / (1 - PAPER_MEAN)
    return Statement(
        name="fig3a",
        claim=REPRODUCTION.claim,
        rule=_RULE,
        checks=[Check(f"on {data['data']}", abs(off) < 0.1, found)],
        remark="The lemma's ⅔ is 1 less the mean square of uniform pixels in [-1, 1], 1/3; that of the data is "
        f"{mean_square:.2f}.",
    )


REPRODUCTION = Reproduction(
    name="fig3a",
    title="Fig. 3a: the size of the network's input",
    claim="The squared norm of the input is of the order of the dimension: E‖x_t‖² = (1 - ⅔ E ᾱ_t) m.",
    small=None,
    full=None,
    collect=collect,
    draw=draw,
    judge=judge,
)
