"""Thm 3.4 on the nets of Eq. 3: the gain of small changes, its bound, and which way round CS should run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from scalelong.stability.gain import Jacobian
from scalelong.stability.statements import Check, Row, Statement
from scalelong.stability.theorems import NETS, SAMPLES, Settings, coefficients, noised_inputs
from scalelong.stability.toy_net import LongSkipNet

SCALINGS = ("none", "1/sqrt2", "cs:0.7", "cs-reversed:0.7")


def theorem_3_4(settings: Settings, iterations: int = 20) -> Statement:
    """The largest gain of small changes against Σ κ_i M_0^i + c_0 with c_0 = L_0 M_0^N, M_0 by power iteration."""
    rows: list[Row] = []
    for where, block_gain in NETS.items():
        for init, net in enumerate(settings.nets(block_gain, inits=3)):
            x = noised_inputs(settings.width, settings.seed)[0][::SAMPLES]
            pairs, middle = block_gains(net, x, iterations)
            m0 = torch.stack(pairs).amax(0)
            for scaling in SCALINGS:
                kappas = coefficients(scaling, settings.num_skips)
                jacobian = jacobian_of(partial(net, kappas=kappas), x)
                rows.append(
                    {
                        "where": where,
                        "scaling": scaling,
                        "init": init,
                        "m0": m0.mean().item(),
                        "bound": predicted_gain(kappas, m0, middle).mean().item(),
                        "skip_sum": predicted_gain(kappas, m0, torch.zeros(())).mean().item(),
                        "largest": jacobian.largest_gain(iterations).mean().item(),
                        "typical": jacobian.typical_gain().mean().item(),
                    }
                )
    return judge_gain(rows)


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


def judge_gain(rows: list[Row]) -> Statement:
    """The bound must hold in every init; how far it is from the truth is said too."""
    checks, numbers = [], {}
    for where in dict.fromkeys(row["where"] for row in rows):
        mine = [row for row in rows if row["where"] == where]
        numbers[where] = {
            scaling: {
                key: float(np.mean([row[key] for row in mine if row["scaling"] == scaling]))
                for key in ("m0", "bound", "skip_sum", "largest", "typical")
            }
            for scaling in dict.fromkeys(row["scaling"] for row in mine)
        }
        m0, slack = np.mean([row["m0"] for row in mine]), min(row["bound"] / row["largest"] for row in mine)
        holds = all(row["largest"] <= row["bound"] for row in mine)
        checks.append(
            Check(where, holds, f"M_0 = {m0:.2f}; the bound is at least {slack:.3g} times the largest gain")
        )
    return Statement(
        name="Thm 3.4",
        claim="‖UNet(x+δ) - UNet(x)‖ ≤ ‖δ‖ (Σ κ_i M_0^i + c_0), M_0 = max_i ‖b_i∘a_i‖, c_0 = L_0 M_0^N.",
        rule="The largest singular value of the net's Jacobian is below the bound for every init and scaling.",
        checks=checks,
        remark="True, and far from tight: the bound multiplies worst cases that do not come together. In both nets "
        "the middle path c_0 outweighs the skips, so that a scaling moves bound and gain by little.",
        rows=rows,
        numbers=numbers,
    )


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
    return judge_direction(rows)


def judge_direction(rows: list[Row]) -> Statement:
    """CS is the right way round where its gain is the smaller one."""
    rows = sorted(rows, key=lambda row: row["pair"])
    wrong = [row["pair"] for row in rows if row["cs"] >= row["cs-reversed"]]
    edge = max(wrong, default=0.0)
    checks = [
        Check(
            f"a pair of blocks enlarges typical changes by more than {edge:.2f}" if row["pair"] > edge else
            f"a pair of blocks enlarges them by {edge:.2f} or less",
            row["cs"] < row["cs-reversed"],
            f"pair gain {row['pair']:.2f}: CS {row['cs']:.3g}, reversed {row['cs-reversed']:.3g}",
        )
        for row in rows
    ]  # fmt: skip
    return Statement(
        name="Direction of CS",
        claim="κ^i from the outermost skip inwards gives a smaller gain than the reversed order (§6, Table 4).",
        rule="The typical gain, √E‖J v‖²/‖v‖² over random v, is smaller for cs:0.7 than for cs-reversed:0.7.",
        checks=checks,
        remark="The claim needs M_0 > 1, as the terms κ_i M_0^i must grow with i. Where blocks keep the norm every "
        "skip counts the same, and reversed is smaller simply because all its coefficients are.",
        rows=rows,
    )


def jacobian_of(function: Callable[[Tensor], Tensor], x: Tensor) -> Jacobian:
    """The Jacobian of a function at x."""
    point = x.detach().requires_grad_()
    return Jacobian(function(point), point)
