"""Thm 3.4 on the nets of Eq. 3: the gain of small changes, its sum, and which way round CS should run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from scalelong.stability.gain import Jacobian
from scalelong.stability.statements import Check, Row, Statement, told
from scalelong.stability.theorems import NETS, SAMPLES, Settings, coefficients, noised_inputs
from scalelong.stability.toy_net import LongSkipNet

SCALINGS = ("none", "1/sqrt2", "cs:0.7", "cs-reversed:0.7")
_RANDOM = "the weights are these random ones and"
_MADE = "the weights are made to break it"
_APART = "M_0 is max ‖b_i‖·‖a_i‖ instead"


def theorem_3_4(settings: Settings, iterations: int = 20) -> Statement:
    """The largest gain of small changes against Σ κ_i M_0^i + c_0 with c_0 = L_0 M_0^N, M_0 by power iteration.

    In random nets, and in one made by hand; with the paper's M_0, and with the larger one for which it follows.
    """
    rows: list[Row] = []
    for where, block_gain in NETS.items():
        for init, net in enumerate(settings.nets(block_gain, inits=3)):
            x = noised_inputs(settings.width, settings.seed)[0][::SAMPLES]
            pairs, middle = block_gains(net, x, iterations)
            for scaling in SCALINGS:
                kappas = coefficients(scaling, settings.num_skips)
                found = measured_gain(net, x, kappas, pairs, middle, iterations)
                rows.append({"where": f"{_RANDOM} {where}", "init": init, "scaling": scaling, **found})
    net, x = counterexample()
    found = measured_gain(net, x, (1.0, 1.0), *block_gains(net, x, iterations), iterations)
    return judge_gain([*rows, {"where": _MADE, "init": 0, "scaling": "none", **found}])


def measured_gain(
    net: LongSkipNet, x: Tensor, kappas: Sequence[float], pairs: Sequence[Tensor], middle: Tensor, iterations: int
) -> dict[str, float]:
    """The net's gain, the theorem's sum with either M_0, and the skips' part of it; means over the inputs."""
    jacobian = jacobian_of(partial(net, kappas=kappas), x)
    m0, apart = torch.stack(list(pairs)).amax(0), separate_gain(net, x, kappas, iterations)
    found = {
        "m0": m0,
        "sum": predicted_gain(kappas, m0, middle),
        "m0_apart": apart,
        "sum_apart": predicted_gain(kappas, apart, middle),
        "skip_sum": predicted_gain(kappas, m0, torch.zeros(())),
        "largest": jacobian.largest_gain(iterations),
        "typical": jacobian.typical_gain(),
    }
    return {key: value.mean().item() for key, value in found.items()}


def counterexample() -> tuple[LongSkipNet, Tensor]:
    """A linear net that breaks the theorem as printed: the inner pair goes around what the outer one forgets.

    a_1 = 10 (I - P) and b_1 = 10 P have b_1 a_1 = 0; b_2 swaps the two halves of the vector, the rest is I.
    """
    net, one, swap = LongSkipNet(2, width=4, layers=1), torch.eye(4), torch.eye(4).roll(2, 0)
    first_half = torch.diag(torch.tensor([1.0, 1.0, 0.0, 0.0]))
    blocks = [*net.encoder, net.middle, *net.decoder]
    for block, weight in zip(blocks, (10 * (one - first_half), one, one, 10 * first_half, swap), strict=True):
        block[0].weight.data.copy_(weight)
    return net, torch.ones(1, 4)


def predicted_gain(kappas: Sequence[float], m0: Tensor, middle: Tensor) -> Tensor:
    """Σ κ_i M_0^i + L_0 M_0^N, the paper's i counting from 1."""
    skips = torch.stack([kappa * m0 ** (i + 1) for i, kappa in enumerate(kappas)]).sum(0)
    return skips + middle * m0 ** len(kappas)


def block_gains(net: LongSkipNet, x: Tensor, iterations: int) -> tuple[list[Tensor], Tensor]:
    """‖b_i∘a_i‖ for each i at the points that x leads to, and that of the middle block."""
    pairs = []
    for encode, decode in zip(net.encoder, net.decoder, strict=True):
        pairs.append(jacobian_of(nn.Sequential(encode, decode), x).largest_gain(iterations))
        x = encode(x).detach()
    return pairs, jacobian_of(net.middle, x).largest_gain(iterations)


def separate_gain(net: LongSkipNet, x: Tensor, kappas: Sequence[float], iterations: int) -> Tensor:
    """max_i ‖b_i‖·‖a_i‖ at the points that the net comes to."""
    passed = [x]
    for encode in net.encoder:
        passed.append(encode(passed[-1]).detach())
    h, products = net.middle(passed[-1]).detach(), []
    for i in reversed(range(len(kappas))):
        merged = kappas[i] * passed[i + 1] + h
        gains = [jacobian_of(net.encoder[i], passed[i]), jacobian_of(net.decoder[i], merged)]
        products.append(gains[0].largest_gain(iterations) * gains[1].largest_gain(iterations))
        h = net.decoder[i](merged).detach()
    return torch.stack(products).amax(0)


def judge_gain(rows: list[Row]) -> Statement:
    """The sum must bound the gain in every init: with the printed M_0 net by net, with the other one in all."""
    checks, numbers = [], {}
    for where in dict.fromkeys(row["where"] for row in rows):
        mine = [row for row in rows if row["where"] == where]
        numbers[where] = {
            scaling: {
                key: float(np.mean([row[key] for row in mine if row["scaling"] == scaling]))
                for key in ("m0", "sum", "m0_apart", "sum_apart", "skip_sum", "largest", "typical")
            }
            for scaling in dict.fromkeys(row["scaling"] for row in mine)
        }
        checks.append(_bounded(mine, where, "m0", "sum"))
    checks.append(_bounded(rows, _APART, "m0_apart", "sum_apart"))
    return Statement(
        name="Thm 3.4",
        claim="‖UNet(x+δ) - UNet(x)‖ ≤ ‖δ‖ (Σ κ_i M_0^i + c_0), M_0 = max_i ‖b_i∘a_i‖, c_0 = L_0 M_0^N.",
        rule="The largest singular value of the net's Jacobian is below the sum for every init and scaling.",
        checks=checks,
        remark="False in general: ‖b_1 b_2 a_2 a_1‖ is not at most ‖b_1 a_1‖·‖b_2 a_2‖, as what a_1 hides from b_1 "
        "the inner pair may bring back. With M_0 = max ‖b_i‖·‖a_i‖ it follows by the chain rule, as the gain of "
        "f_(i-1) is at most ‖b_i‖·‖a_i‖ (κ_i + that of f_i). In random nets both sums are far from tight: they "
        "multiply worst cases that do not come together. There the middle path c_0 outweighs the skips, so that a "
        "scaling moves sum and gain by little.",
        rows=rows,
        numbers=numbers,
    )


def _bounded(rows: Sequence[Row], where: str, m0: str, total: str) -> Check:
    tightest = min(rows, key=lambda row: row[total] / row["largest"])
    found = (
        f"the sum is at least {tightest[total] / tightest['largest']:.3g} times the largest gain: "
        f"{tightest[total]:.3g} against {tightest['largest']:.3g}, with M_0 = {tightest[m0]:.3g}"
    )
    numbers = [row[key] for row in rows for key in ("largest", total)]
    return Check(where, told(all(row["largest"] <= row[total] for row in rows), *numbers), found)


def direction(settings: Settings, kappa: float = 0.7) -> Statement:
    """The typical gain of CS and of CS reversed, from blocks that keep the norm to those of Eq. 3 as written.

    A pair b∘a of blocks enlarges the root mean square by √(block_gain²), so `block_gain` is the typical M.
    """
    rows: list[Row] = []
    for block_gain in (1.0, 1.05, 1.1, 1.2, 1.4, 1.7, 2.0):
        found: dict[str, list[float]] = {"cs": [], "cs-reversed": []}
        for net in settings.nets(block_gain, inits=6):
            x = noised_inputs(settings.width, settings.seed)[0][::SAMPLES]
            for name, gains in found.items():
                kappas = coefficients(f"{name}:{kappa}", settings.num_skips)
                gains.append(jacobian_of(partial(net, kappas=kappas), x).typical_gain().mean().item())
        rows.append({"pair": block_gain, **{name: float(np.mean(gains)) for name, gains in found.items()}})
    return judge_direction(rows, direction_edge(settings.num_skips, kappa))


def direction_edge(num_skips: int, kappa: float) -> float:
    """The pair gain M where CS and CS reversed are equal in expectation, Σ κ_i² M^(2i); beyond, CS is smaller."""
    forth, back = (coefficients(f"{name}:{kappa}", num_skips) for name in ("cs", "cs-reversed"))

    def excess(gain: float) -> float:
        return sum((f**2 - b**2) * gain ** (2 * i) for i, (f, b) in enumerate(zip(forth, back, strict=True), 1))

    low, high = 1.0, 2.0
    while excess(high) > 0:
        high *= 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high


def judge_direction(rows: list[Row], derived: float) -> Statement:
    """CS is the right way round where its gain is the smaller one; `derived`: where that begins in expectation."""
    rows = sorted(rows, key=lambda row: row["pair"])
    wrong = [row["pair"] for row in rows if row["cs"] >= row["cs-reversed"]]
    edge = max(wrong, default=0.0)
    checks = [
        Check(
            f"a pair of blocks enlarges typical changes by more than {edge:.2f}" if row["pair"] > edge else
            f"a pair of blocks enlarges them by {edge:.2f} or less",
            told(row["cs"] < row["cs-reversed"], row["cs"], row["cs-reversed"]),
            f"pair gain {row['pair']:.2f}: CS {row['cs']:.3g}, reversed {row['cs-reversed']:.3g}",
        )
        for row in rows
    ]  # fmt: skip
    return Statement(
        name="Direction of CS",
        claim="κ^i from the outermost skip inwards gives a smaller gain than the reversed order (§6, Table 4).",
        rule="The typical gain, √E‖J v‖²/‖v‖² over random v, is smaller for cs:0.7 than for cs-reversed:0.7.",
        checks=checks,
        remark="The claim needs blocks that enlarge typical changes, so that inner skips count more. M_0 > 1 is "
        "not enough: M_0 is the largest gain, about 4 where blocks keep the norm (Thm 3.4 above). There every skip "
        "counts the same, and reversed is smaller simply because all its coefficients are. By the expectation, "
        f"Σ κ_i² M^(2i) for a pair gain M, the two change places at M = {derived:.3f}; how far the nets' own edge "
        "is from that is chance.",
        rows=rows,
        numbers={"derived": derived},
    )


def jacobian_of(function: Callable[[Tensor], Tensor], x: Tensor) -> Jacobian:
    """The Jacobian of a function at x."""
    point = x.detach().requires_grad_()
    return Jacobian(function(point), point)
