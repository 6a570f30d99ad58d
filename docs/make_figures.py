"""Draws the pictures of the pages: where the coefficients act and how large they are (docs/figures/skips.png), and
the runs on CIFAR-10 (results/cifar10/…/curves.png). Run by `make figures`.
"""

import tarfile
import tempfile
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from scalelong import parse_scaling
from scalelong.report.runs import read_run
from scalelong.skips.spec import ConstantScaling

FIGURES = Path(__file__).parent / "figures"
CIFAR10 = Path(__file__).parents[1] / "results" / "cifar10"
BLUE, ORANGE, GREY = "#2b6cb0", "#dd6b20", "#718096"


def main() -> None:
    """Draw and save."""
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (net, curves) = plt.subplots(1, 2, figsize=(11, 4), width_ratios=(1.15, 1))
    draw_net(net, parse_scaling("cs:0.7"), num_skips=4)
    draw_schedules(curves, num_skips=6)
    figure.tight_layout()
    FIGURES.mkdir(exist_ok=True)
    figure.savefig(FIGURES / "skips.png", dpi=130)
    for archive in sorted(CIFAR10.glob("*/runs.tar.xz")):
        draw_runs(archive).savefig(archive.with_name("curves.png"), dpi=110)


def draw_runs(archive: Path) -> plt.Figure:
    """Held-out loss and FID by step, and the samples, of the runs in an archive."""
    with tempfile.TemporaryDirectory() as folder, tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
        runs = {path.name: read_run(path) for path in sorted(Path(folder).iterdir())}
    order = sorted(runs, key=lambda name: (runs[name].scaling != "none", name))
    figure = plt.figure(figsize=(11, 6), layout="constrained")
    above, below = figure.subfigures(2, 1)
    loss, fid = above.subplots(1, 2)
    for name in order:
        loss.plot(*runs[name].series("held out", "loss"), "o-", ms=3, label=runs[name].scaling)
        fid.plot(*runs[name].series("quality", "fid"), "o-", ms=4, label=runs[name].scaling)
    loss.set(xlabel="step", ylabel="loss on held-out images")
    fid.set(xlabel="step", ylabel="FID of 10,000 samples", ylim=(0, None))
    loss.legend(frameon=False)
    for name, axes in zip(order, below.subplots(1, len(order), squeeze=False)[0], strict=True):
        axes.imshow(plt.imread(archive.with_name(f"{name}.png")), interpolation="nearest")
        axes.set_title(f"{runs[name].scaling}, the same noise", fontsize=9)
        axes.axis("off")
    return figure


def draw_net(axes: plt.Axes, scaling: ConstantScaling, num_skips: int) -> None:
    """A U of encoder and decoder blocks; each skip drawn as thick as its coefficient."""
    axes.axis("off")
    axes.set_xlim(-0.6, 6.6)
    axes.set_ylim(-1.35, num_skips)
    axes.set_title("Every long skip is multiplied by its own coefficient", loc="left")
    for i, c in enumerate(scaling.coefficients(num_skips)):
        y, inset = num_skips - 1 - i, 0.38 * i
        for x, name in ((inset, "encoder"), (5 - inset, "decoder")):
            box = FancyBboxPatch((x, y), 1.05, 0.5, boxstyle="round,pad=0.05", fc="#ebf4ff", ec=BLUE)
            axes.add_patch(box)
            axes.text(x + 0.52, y + 0.25, name, ha="center", va="center", fontsize=8)
        arrow = FancyArrowPatch(
            (inset + 1.15, y + 0.25),
            (4.9 - inset, y + 0.25),
            arrowstyle="-|>",
            mutation_scale=12,
            lw=0.6 + 3 * c,
            color=ORANGE,
        )
        axes.add_patch(arrow)
        axes.text(3.03, y + 0.44, f"skip {i}: × {c:.3g}", ha="center", color=ORANGE)
        below = y - 0.5 if i < num_skips - 1 else y - 0.75
        axes.annotate(
            "",
            (inset + 0.6, below + 0.05),
            (inset + 0.45, y - 0.07),
            arrowprops={"arrowstyle": "->", "color": GREY},
        )
        axes.annotate(
            "",
            (5.6 - inset, y - 0.07),
            (5.45 - inset, below + 0.05),
            arrowprops={"arrowstyle": "->", "color": GREY},
        )
    axes.add_patch(FancyBboxPatch((1.75, -1.15), 2.55, 0.4, boxstyle="round,pad=0.05", fc="#edf2f7", ec=GREY))
    axes.text(3.03, -0.95, "middle", ha="center", va="center", fontsize=8)


def draw_schedules(axes: plt.Axes, num_skips: int) -> None:
    """The constant scalings, and where the gates of LS start."""
    index = range(num_skips)
    for spec, style in (
        ("none", "-"),
        ("1/sqrt2", "-"),
        ("cs:0.7", "o-"),
        ("cs:0.5", "o-"),
        ("cs-reversed:0.7", "s--"),
    ):
        axes.plot(index, parse_scaling(spec).coefficients(num_skips), style, label=spec, ms=4)
    axes.axhspan(0.5 - 0.036, 0.5 + 0.036, color=GREY, alpha=0.3, lw=0, label="ls, before training")
    axes.set(xlabel="skip index (0 = outermost)", ylabel="coefficient", ylim=(0, 1.05), xticks=list(index))
    axes.set_title(f"U-ViT-S: {num_skips} skips", loc="left")
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper right", bbox_to_anchor=(1, 0.97))


if __name__ == "__main__":
    main()
