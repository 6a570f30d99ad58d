"""Thms 3.1 and 3.3 on the nets of Eq. 3: each measures, then a pure `judge_…` turns rows into a statement.

Two nets (`toy_net.py`): Eq. 3 as written, where a block doubles the mean square, and one whose blocks keep it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from scalelong.diffusion.process import NUM_TIMESTEPS, process_named
from scalelong.skips.spec import ConstantScaling, parse_scaling
from scalelong.stability.statements import Check, Row, Statement, fit_line, told
from scalelong.stability.toy_net import AS_WRITTEN, NORM_PRESERVING, LongSkipNet

SCALINGS = tuple(
    [
        "none",
        "uniform:0.85",
        "1/sqrt2",
        "uniform:0.5",
        "cs:0.9",
        "cs:0.7",
        "cs:0.5",
        "cs-reversed:0.9",
        "cs-reversed:0.7",
        "cs-reversed:0.5",
    ]
)
NETS = {"Eq. 3 is taken as written": AS_WRITTEN, "blocks keep the norm": NORM_PRESERVING}
SMALL_OUTPUT = 0.05
MIN_R2, MAX_EPSILON = 0.9, 0.5
_KINDS = {"a": "encoder", "b": "decoder"}
_TIMES, SAMPLES = 4, 4


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The size of the experiments; the defaults take well under a minute on two cores."""

    num_skips: int = 6
    width: int = 256
    layers: int = 2
    inits: int = 24
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("num_skips", 2), ("width", 16), ("layers", 1), ("inits", 2), ("seed", 0)):
            if (value := getattr(self, name)) < least:
                raise ValueError(f"{name} is at least {least}, got {value}.")

    def nets(self, block_gain: float, inits: int | None = None, width: int | None = None) -> Iterator[LongSkipNet]:
        """Nets with different first weights."""
        for init in range(inits or self.inits):
            yield LongSkipNet(
                self.num_skips,
                width=width or self.width,
                layers=self.layers,
                block_gain=block_gain,
                seed=self.seed + init,
            )


def theorem_3_1(settings: Settings) -> Statement:
    """‖h_i‖² against ‖x_t‖² Σ_{j≥i} κ_j², per coordinate, for every scaling, decoder block, time and init."""
    rows: list[Row] = []
    for where, block_gain in NETS.items():
        for width in (max(16, settings.width // 4), settings.width):
            values = [_features(net, width, settings) for net in settings.nets(block_gain, width=width)]
            for points in zip(*values, strict=True):
                y = [value for point in points for value in point["y"]]
                rows.append({**points[0], "where": where, "width": width, "y": y})
    return judge_features(rows)


@torch.no_grad()
def _features(net: LongSkipNet, width: int, settings: Settings) -> list[Row]:
    x, _ = noised_inputs(width, settings.seed)
    found = []
    for scaling in SCALINGS:
        kappas = coefficients(scaling, settings.num_skips)
        for i, h in enumerate(net.hidden(x, kappas)):
            for size, y in zip(by_time(mean_square(x)), by_time(mean_square(h)), strict=True):
                found.append(
                    {"scaling": scaling, "skip": i, "x": float(np.mean(size)) * tail(kappas, i), "y": y.tolist()}
                )
    return found


def judge_features(rows: list[Row]) -> Statement:
    """A line must explain the means over inits, and the single values must lie in a band around it."""
    checks, numbers = [], {}
    for where in NETS:
        fits = {}
        for width in sorted({row["width"] for row in rows}):
            mine = [row for row in rows if (row["where"], row["width"]) == (where, width)]
            line = fit_line([row["x"] for row in mine], [float(np.mean(row["y"])) for row in mine])
            ratios = np.concatenate([np.asarray(row["y"]) / line.at(np.asarray(row["x"])) for row in mine])
            epsilon = float(np.quantile(np.abs(np.sqrt(ratios.clip(0)) - 1), 0.9))
            fits[width] = {"c1": line.slope, "c2": line.offset, "r2": line.r2, "epsilon": epsilon}
        narrow, wide = fits[min(fits)], fits[max(fits)]
        numbers[where] = {str(width): fit for width, fit in fits.items()}
        holds = told(wide["r2"] >= MIN_R2 and wide["epsilon"] <= MAX_EPSILON, wide["r2"], wide["epsilon"])
        checks.append(
            Check(
                where,
                holds,
                f"c1 = {wide['c1']:.3g}, c2 = {wide['c2']:.3g}, R² = {wide['r2']:.3f}; 90 % within (1 ∓ ε)² for "
                f"ε = {wide['epsilon']:.2f} at width {max(fits)} ({narrow['epsilon']:.2f} at {min(fits)})",
            )
        )
    return Statement(
        name="Thm 3.1",
        claim="‖h_i‖² lies in (1 ∓ ε)² [c1 ‖x_t‖² Σ_{j≥i} κ_j² + c2] with high probability over Kaiming inits.",
        rule=f"A line through the means over inits has R² ≥ {MIN_R2}, and 90 % of the values lie in the band of an "
        f"ε ≤ {MAX_EPSILON}.",
        checks=checks,
        remark="As written, Eq. 3 has no ReLU before a block's first matrix, so that N(0, 2/m) doubles the norm in "
        "every block: skip j comes in with weight 4^j, and depth, not Σκ², decides.",
        rows=[
            {**row, "y": float(np.mean(row["y"])), "band": np.quantile(row["y"], (0.05, 0.95)).tolist()}
            for row in rows
        ],
        numbers=numbers,
    )


def theorem_3_3(settings: Settings) -> Statement:
    """‖∇_W ℓ‖² of every block against ℓ ‖x_t‖² Σ_{j≥i} κ_j²; ℓ is the mean square error of the noise."""
    places = [(where, block_gain, 1.0) for where, block_gain in NETS.items()]
    places.append(("blocks keep the norm and the output starts small", NORM_PRESERVING, SMALL_OUTPUT))
    rows: list[Row] = []
    for where, block_gain, output_scale in places:
        values = [_gradients(net, settings, output_scale) for net in settings.nets(block_gain)]
        rows += [{**row, "where": where} for row in _mean_over(values)]
    values = [_uvit_gradients(settings.seed + init) for init in range(3)]
    rows += [{**row, "where": "the net is a U-ViT before its first step"} for row in _mean_over(values)]
    return judge_gradients(rows)


def _gradients(net: LongSkipNet, settings: Settings, output_scale: float) -> list[Row]:
    x, noise = noised_inputs(settings.width, settings.seed)
    found = []
    for scaling in SCALINGS:
        kappas = coefficients(scaling, settings.num_skips)
        losses, squares = gradient_squares(net, x, noise, kappas, output_scale)
        for block, values in squares.items():
            size = losses * mean_square(x) * tail(kappas, int(block.split("_")[1]))
            for xs, ys in zip(by_time(size), by_time(values), strict=True):
                found.append({"scaling": scaling, "block": block, "x": float(np.mean(xs)), "y": float(np.mean(ys))})
    return found


def _uvit_gradients(seed: int) -> list[Row]:
    """The same of a real net: a small U-ViT, all its weights together, so that i is the outermost skip."""
    from scalelong.backbones.build import build

    generator = torch.Generator().manual_seed(seed)
    images = 2 * torch.rand(32, 1, 8, 8, generator=generator) - 1
    noise = torch.randn(32, 1, 8, 8, generator=generator)
    process = process_named("vp-sde")
    k = process.timesteps((torch.arange(32) + 0.5) / 32)
    x = process.noised(images, noise, k).float()
    found = []
    for scaling in SCALINGS:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = build("digits", scaling=scaling)
        loss = (model(x, k).sample - noise).square().mean()
        squares = [g.square().sum().item() for g in torch.autograd.grad(loss, list(model.parameters()))]
        size = loss.item() * x.square().mean().item() * tail(coefficients(scaling, 6), 0)
        found.append({"scaling": scaling, "block": "all", "x": size, "y": sum(squares)})
    return found


def _mean_over(values: Sequence[list[Row]]) -> list[Row]:
    """Rows of several inits, x and y averaged."""
    return [
        {**points[0], **{key: float(np.mean([point[key] for point in points])) for key in ("x", "y")}}
        for points in zip(*values, strict=True)
    ]


def gradient_squares(
    net: LongSkipNet, x: Tensor, noise: Tensor, kappas: Sequence[float], output_scale: float = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """ℓ of each sample, and ‖∇_W ℓ‖² of each sample and block, mean over the block's matrices, over output_scale².

    A sample's gradient of a matrix is the outer product of what goes in and what comes back, so its norm is theirs.
    """
    seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}
    layers = [module for module in net.modules() if isinstance(module, nn.Linear)]
    hooks = [layer.register_forward_hook(lambda m, args, out: seen.update({m: (args[0], out)})) for layer in layers]
    losses = (output_scale * net(x, kappas) - noise).square().mean(1)
    for hook in hooks:
        hook.remove()
    returned = torch.autograd.grad(losses.sum(), [seen[layer][1] for layer in layers])
    squares = {
        layer: (seen[layer][0].detach().square().sum(1) * back.square().sum(1)) / output_scale**2
        for layer, back in zip(layers, returned, strict=True)
    }
    blocks = {f"{kind}_{i}": block for kind in _KINDS for i, block in enumerate(getattr(net, _KINDS[kind]))}
    mine = {name: [squares[m] for m in block if isinstance(m, nn.Linear)] for name, block in blocks.items()}
    return losses.detach(), {name: torch.stack(values).mean(0) for name, values in mine.items()}


def judge_gradients(rows: list[Row]) -> Statement:
    """One line for all blocks, scalings and inputs."""
    checks, numbers = [], {}
    for where in dict.fromkeys(row["where"] for row in rows):
        mine = [row for row in rows if row["where"] == where]
        line = fit_line([row["x"] for row in mine], [row["y"] for row in mine])
        ratios = [row["y"] / line.slope / row["x"] for row in mine] if line.slope > 0 else [float("inf")]
        numbers[where] = {"c": line.slope, "c3": line.offset, "r2": line.r2, "largest_over_line": max(ratios)}
        found = f"slope {line.slope:.3g}, c3 = {line.offset:.3g}, R² = {line.r2:.3f}"
        checks.append(Check(where, told(line.r2 >= MIN_R2 and line.slope > 0, line.r2, line.slope), found))
    return Statement(
        name="Thm 3.3",
        claim="‖∇_W ℓ‖² ≲ O(ℓ ‖x_t‖² Σ_{j≥i} κ_j² + c3) for the weights of a_i and b_i.",
        rule="More than the claim, which with free constants could not fail: one line over all blocks, scalings "
        f"and inputs rises and has R² ≥ {MIN_R2}.",
        checks=checks,
        remark="A residual that is mostly the net's own output goes back through the matrices that made it, and "
        "grows on the way: E‖W^T W x‖² > E‖W x‖². Where the output starts small, as in nets whose last layer "
        "starts near zero, the residual is the noise and the line is there. All of it is about first weights, "
        "not about training.",
        rows=rows,
        numbers=numbers,
    )


def noised_inputs(width: int, seed: int) -> tuple[Tensor, Tensor]:
    """x_t and ε for x_0 ~ U[-1, 1], `SAMPLES` at each of some times of DDPM's schedule: [times · samples, m]."""
    generator = torch.Generator().manual_seed(seed)
    images = 2 * torch.rand(_TIMES * SAMPLES, width, generator=generator) - 1
    noise = torch.randn(_TIMES * SAMPLES, width, generator=generator)
    k = torch.linspace(0, NUM_TIMESTEPS - 1, _TIMES).round().long().repeat_interleave(SAMPLES)
    return process_named("ddpm").noised(images, noise, k).float(), noise


def by_time(values: Tensor) -> np.ndarray[Any, Any]:
    """[times · samples] -> [times, samples]."""
    return values.view(_TIMES, SAMPLES).double().numpy()


def coefficients(scaling: str, num_skips: int) -> tuple[float, ...]:
    """A constant scaling's κ_i."""
    parsed = parse_scaling(scaling)
    assert isinstance(parsed, ConstantScaling)
    return parsed.coefficients(num_skips)


def tail(kappas: Sequence[float], i: int) -> float:
    """Σ_{j≥i} κ_j²."""
    return sum(kappa**2 for kappa in kappas[i:])


def mean_square(x: Tensor) -> Tensor:
    """‖·‖²/m of each sample."""
    return x.square().mean(1)
