"""κ from the model: what skip and main path bring to each merge, and how the gains add up (Thm 3.4).

Works on whatever `find_skips` knows. Where a linear layer reads the concatenation (U-ViT), each path's variance is
taken behind its half of that layer; where a norm follows, at the concatenation. Skip 0 is the outermost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalelong.skips.attach import SkipScaling, adapter_for, attach, attached, detach
from scalelong.skips.scalers import SkipScale
from scalelong.skips.sites import Adapter, LongSkip
from scalelong.skips.spec import CS, ConstantScaling, NoScaling, PerSkip, parse_scaling
from scalelong.skips.summary import undone_in_all, undone_share
from scalelong.stability.gain import Jacobian

COMPARED = ("none", "1/sqrt2", "cs:0.7", "cs:0.5")
DIRECTIONS = ("cs:0.7", "cs-reversed:0.7")
MISFIT = 1.25  # a simpler spec is named where each of its coefficients is within this factor of the flat one


@dataclass(frozen=True, kw_only=True)
class Merge:
    """One merge as it is; variances per channel, over images and positions."""

    index: int
    module: str
    behind: str  # "linear": each path behind its half of the merging layer; "concat": where they are joined
    main_variance: float
    skip_variance: float
    coefficient: float  # what the skip is multiplied by already
    undone_by_norm: float  # share of the skip's channels on which a norm undoes a constant
    pair_gain: float  # ‖b_i∘a_i‖, the skip's own path from encoder to decoder, without its coefficient

    @property
    def gain(self) -> float:
        """How much larger the variance is with the skip than without."""
        return 1 + self.skip_variance / self.main_variance


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was measured, the gains estimated from it, and the coefficients that keep the merges' gain flat."""

    merges: list[Merge]
    undone_by_norm: float  # share of all skip channels on which a norm undoes a constant
    m0: float  # max_i ‖b_i∘a_i‖
    middle_gain: float  # L_0, of the middle path
    largest_gain: float  # of the whole network as it is, by power iteration
    typical_gain: float
    predicted: dict[str, dict[str, float]]  # per scaling: the sum of Thm 3.4, and with each pair's own gain
    directions: dict[str, list[float]]  # the typical gain of each input with CS and with CS reversed, measured
    balance: float  # the most that a skip may bring, over what the main path brings
    coefficients: list[float]
    kappa: float
    misfit: float  # the largest factor between cs:kappa and the coefficients
    spec: str
    spec_per_skip: str
    flat_gains: list[float]  # the merges' gains with these coefficients, measured

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self) | {"merges": [asdict(m) | {"gain": m.gain} for m in self.merges]}


def calibrate(
    model: nn.Module,
    batches: Sequence[Mapping[str, Any]],
    *,
    gain_inputs: Mapping[str, Any] | None = None,
    balance: float | None = None,
    iterations: int = 10,
) -> Calibration:
    """Measure a model on named inputs; it is left as it was.

    The coefficients let no skip bring more than `balance` times the variance of its main path: by default what the
    smallest brings, so that every merge has the same gain and no skip is enlarged. Gains of small changes are
    measured on `gain_inputs` (the first batch, if there are none), in memory for two derivatives.
    """
    if not batches:
        raise ValueError("calibrate needs at least one batch of inputs, got none.")
    if balance is not None and not (math.isfinite(balance) and balance > 0):
        raise ValueError(f"balance is a positive number, got {balance!r}.")
    gain_inputs = batches[0] if gain_inputs is None else gain_inputs
    with probing(model) as probes:
        first = [probe.coefficient for probe in probes.scales]
        variances = measure_variances(probes, batches)
        _check_finite(probes, variances)
        # At 1, as a norm behind the merge undoes another number in part: a gain is not the coefficient's alone.
        set_coefficients(probes, [1.0] * len(first))
        pairs, middle = pair_gains(probes, gain_inputs, iterations)
        set_coefficients(probes, first)
        whole = whole_jacobian(model, gain_inputs)
        largest, typical = whole.largest_gain(iterations).mean().item(), whole.typical_gain().mean().item()
        directions = direction_gains(probes, gain_inputs)
        gains = [*pairs, middle, largest, typical, *chain.from_iterable(directions.values())]
        if not all(map(math.isfinite, gains)):
            raise ValueError("the model cannot be measured: its gains are not finite; its weights are ruined.")
        balance = min(part / main for main, part in variances) if balance is None else balance
        coefficients, flat = flatten(probes, batches, balance)
        merges = [
            Merge(
                index=skip.index,
                module=skip.name,
                behind="linear" if probes.reads_directly(skip) else "concat",
                main_variance=main,
                skip_variance=part,
                coefficient=c,
                undone_by_norm=undone_share(skip),
                pair_gain=pair,
            )
            for skip, (main, part), c, pair in zip(probes.skips, variances, first, pairs, strict=True)
        ]
    return _concluded(
        merges,
        undone_by_norm=undone_in_all(probes.skips),
        middle_gain=middle,
        largest_gain=largest,
        typical_gain=typical,
        directions=directions,
        balance=balance,
        coefficients=coefficients,
        flat_gains=flat,
    )


def _check_finite(probes: Probes, variances: Sequence[tuple[float, float]]) -> None:
    """Of ruined weights nothing can be said: every comparison with a NaN would find the gain flat."""
    bad = [s.index for s, pair in zip(probes.skips, variances, strict=True) if not all(map(math.isfinite, pair))]
    if bad or not all(main > 0 for main, _ in variances):
        what = f"skip {bad[0]}'s merge gets numbers that are not finite" if bad else "a main path brings nothing"
        raise ValueError(f"the model cannot be measured: {what}; its weights are ruined, or its inputs are.")


def _concluded(merges: list[Merge], coefficients: list[float], **measured: Any) -> Calibration:
    kappa, misfit = fit_cs(coefficients)
    spec_per_skip = str(PerSkip(tuple(float(f"{c:.3g}") for c in coefficients)))
    spec = "none" if min(coefficients) * MISFIT >= 1 else f"cs:{kappa:.3g}" if misfit <= MISFIT else spec_per_skip
    pairs = [merge.pair_gain for merge in merges]
    predicted = {
        name: predict_gain(_constants(name, len(pairs)), pairs, measured["middle_gain"])
        for name in (*COMPARED, spec)
    }
    return Calibration(
        merges=merges,
        m0=max(pairs),
        predicted=predicted,
        coefficients=coefficients,
        kappa=kappa,
        misfit=misfit,
        spec=spec,
        spec_per_skip=spec_per_skip,
        **measured,
    )


def predict_gain(coefficients: Sequence[float], pairs: Sequence[float], middle: float) -> dict[str, float]:
    """Σ κ_i M_0^i + L_0 M_0^N of Thm 3.4; and the same with each pair's own gain in the place of the largest.

    Estimates: no bound, as a decoder block treats main path and skip by different weights, and as
    ‖b_1 b_2 a_2 a_1‖ may be larger than ‖b_1 a_1‖·‖b_2 a_2‖ (`robustness.counterexample`).
    """
    m0, found = max(pairs), {"with_m0": 0.0, "with_own_gains": 0.0}
    own = 1.0
    for i, (c, pair) in enumerate(zip(coefficients, pairs, strict=True)):
        own *= pair
        found["with_m0"] += c * m0 ** (i + 1)
        found["with_own_gains"] += c * own
    return {
        "with_m0": found["with_m0"] + middle * m0 ** len(pairs),
        "with_own_gains": found["with_own_gains"] + middle * own,
    }


def fit_cs(coefficients: Sequence[float]) -> tuple[float, float]:
    """The κ whose κ^i is nearest in logarithms, and the largest factor between the two; κ is at most 1."""
    numbers = range(len(coefficients))
    weight = sum(i * i for i in numbers)
    slope = sum(i * math.log(c) for i, c in zip(numbers, coefficients, strict=True)) / weight if weight else 0.0
    kappa = min(1.0, math.exp(slope))
    wanted = CS(kappa).coefficients(len(coefficients))
    return kappa, max(max(a / b, b / a) for a, b in zip(wanted, coefficients, strict=True))


def flatten(
    probes: Probes, batches: Sequence[Mapping[str, Any]], balance: float
) -> tuple[list[float], list[float]]:
    """Coefficients with which no skip brings more than `balance` of the main path's variance, and the gains then.

    A pass settles one more merge, from the innermost on; as many passes as skips settle all.
    """
    for _ in probes.skips:
        changes = []
        for scale, (main, part) in zip(probes.scales, measure_variances(probes, batches), strict=True):
            wanted = min(1.0, scale.coefficient * math.sqrt(balance * main / part)) if part > 0 else 1.0
            changes.append(abs(wanted / scale.coefficient - 1))
            scale.coefficient = wanted
        if max(changes) < 1e-3:
            break
    gains = [1 + part / main for main, part in measure_variances(probes, batches)]
    return [scale.coefficient for scale in probes.scales], gains


class Probe(SkipScale):
    """Multiplies by a number that can be changed, and shows the skip as the encoder made it."""

    reads_skip = True

    def __init__(self, coefficient: float) -> None:
        super().__init__()
        self.coefficient = coefficient
        self.seen: Tensor | None = None

    def forward(self, skip: Tensor) -> float:
        """The coefficient."""
        self.seen = skip
        return self.coefficient


@dataclass(frozen=True)
class Probes:
    """A model whose skips are probed."""

    model: nn.Module
    adapter: Adapter
    skips: list[LongSkip]
    scales: list[Probe]

    def reads_directly(self, skip: LongSkip) -> bool:
        """Whether a linear layer reads skip and main path with nothing between."""
        return bool(self.adapter.merge_weights(skip, "concat"))

    def brought(self, skip: LongSkip, main: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
        """What the two bring to the merge."""
        if not self.reads_directly(skip):
            return main, part
        weight = skip.block.skip_linear.weight
        return F.linear(main, weight[:, : skip.main_channels]), F.linear(part, weight[:, skip.main_channels :])


@contextmanager
def probing(model: nn.Module) -> Iterator[Probes]:
    """Probes in the place of the model's scales; everything is put back at the end."""
    adapter, root = adapter_for(model), attached(model)
    skips, config = adapter.find(model), model._internal_dict  # diffusers' own place for it
    old = [skip.block.skip_scale for skip in skips] if root is not None else []
    if root is not None and root.placement != "concat":
        raise ValueError(
            f"calibration scales at the concatenation, and this model has {str(root.scaling)!r} at "
            f"{root.placement!r}; remove it (scaling_of(model).remove()) to calibrate the plain model."
        )
    numbers = [number for scale in old if (number := scale.number()) is not None] if old else [1.0] * len(skips)
    if root is not None and len(numbers) < len(skips):
        raise ValueError(
            f"calibration multiplies skips by numbers, and what {str(root.scaling)!r} multiplies by depends on the "
            "input; remove it (scaling_of(model).remove()) to calibrate the plain model."
        )
    training = model.training
    if root is not None:
        detach(model)
    scales = [Probe(number) for number in numbers]
    attach(model, adapter, skips, list(scales), SkipScaling(NoScaling(), "concat", False, nn.ModuleDict()))
    model.eval()
    try:
        yield Probes(model, adapter, skips, scales)
    finally:
        detach(model)
        if root is not None:
            root.hook_handles.clear()
            attach(model, adapter, skips, old, root)
        model._internal_dict = config
        model.train(training)


@torch.no_grad()
def measure_variances(probes: Probes, batches: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """(main, skip) of each merge, outermost first: mean over channels of the variance over images and positions."""
    found: list[list[tuple[float, float]]] = [[] for _ in probes.skips]

    def see(skip: LongSkip) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            main, part = probes.adapter.merge_inputs(skip, args, kwargs)
            brought = probes.brought(skip, main, part)
            found[skip.index].append(tuple(_variance(x, skip.shape.channel_dim) for x in brought))  # type: ignore[arg-type]

        return hook

    with ExitStack() as stack:
        for skip in probes.skips:
            stack.callback(skip.block.register_forward_pre_hook(see(skip), with_kwargs=True).remove)
        for inputs in batches:
            probes.model(**inputs)
    return [(_mean(main for main, _ in pairs), _mean(part for _, part in pairs)) for pairs in found]


def pair_gains(probes: Probes, inputs: Mapping[str, Any], iterations: int) -> tuple[list[float], float]:
    """‖b_i∘a_i‖ for each skip, times what its probe multiplies by, and ‖f_N‖ of the middle; means over the batch.

    The main path is cut where it enters a merge. What arrives at the next merge then depends on the encoder through
    one skip alone: its derivative by the skip before is b_i∘a_i.
    """
    arrived: dict[int, Tensor] = {}
    with ExitStack() as stack:
        for skip in probes.skips:
            hook = skip.block.register_forward_pre_hook(_cut(probes.adapter, skip, arrived), with_kwargs=True)
            stack.callback(hook.remove)
        output, sample = _forward(probes.model, inputs)
        seen = [scale.seen for scale in probes.scales]
        for scale in probes.scales:
            scale.seen = None
    last = len(seen) - 1
    starts, ends = [sample, *seen[:-1]], [output, *(arrived[i] for i in range(last))]
    gains = [Jacobian(end, start).largest_gain(iterations) for end, start in zip(ends, starts, strict=True)]  # type: ignore[arg-type]
    middle = Jacobian(arrived[last], seen[last]).largest_gain(iterations)  # type: ignore[arg-type]
    return [gain.mean().item() for gain in gains], middle.mean().item()


def direction_gains(probes: Probes, inputs: Mapping[str, Any]) -> dict[str, list[float]]:
    """The whole network's typical gain at each input, with CS and with CS reversed in the place of its scaling."""
    before, found = [scale.coefficient for scale in probes.scales], {}
    for name in DIRECTIONS:
        set_coefficients(probes, _constants(name, len(before)))
        found[name] = whole_jacobian(probes.model, inputs).typical_gain().tolist()
    set_coefficients(probes, before)
    return found


def set_coefficients(probes: Probes, coefficients: Sequence[float]) -> None:
    """Multiply the skips by these numbers from now on."""
    for scale, coefficient in zip(probes.scales, coefficients, strict=True):
        scale.coefficient = coefficient


def whole_jacobian(model: nn.Module, inputs: Mapping[str, Any]) -> Jacobian:
    """Of the model's output by its noised images."""
    return Jacobian(*_forward(model, inputs))


def _forward(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """(output, input) of one call, with a graph that can be differentiated twice: fused attention cannot."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    name = "hidden_states" if "hidden_states" in inputs else "sample"
    sample = inputs[name].detach().requires_grad_()
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        output: Tensor = model(**{**inputs, name: sample}, return_dict=False)[0]
    return output, sample


def _cut(adapter: Adapter, skip: LongSkip, arrived: dict[int, Tensor]) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        main, part = adapter.merge_inputs(skip, args, kwargs)
        arrived[skip.index] = main
        alone = bool(args) and main is args[0]
        joined = main.detach() if alone else torch.cat([main.detach(), part], skip.shape.channel_dim)
        if not args:
            return args, kwargs | {"input_tensor": joined}
        return (joined, *args[1:]), kwargs

    return hook


def _mean(values: Iterator[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def _variance(x: Tensor, channel_dim: int) -> float:
    per_channel = x.detach().double().movedim(channel_dim, -1).flatten(0, -2)
    return per_channel.var(0, correction=0).mean().item()


def _constants(name: str, num_skips: int) -> tuple[float, ...]:
    parsed = parse_scaling(name)
    assert isinstance(parsed, ConstantScaling)
    return parsed.coefficients(num_skips)
