"""The modules that turn a skip into its coefficient: fixed, learned, or a gate that reads the skip.

Each is called with the skip and returns the coefficient, broadcastable to it; the caller multiplies.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from scalelong.skips.sites import SkipShape
from scalelong.skips.spec import IE, LS, ConstantScaling, LearnedScalar, Scaling, SkipNorm, parse_scaling

_Module = TypeVar("_Module", bound=nn.Module)
_PRECISIONS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_EPS = 1e-6  # a skip of zeros stays one
_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "elu": nn.ELU, "mish": nn.Mish}


class SkipScale(nn.Module):
    """One skip's coefficient. `reads_skip`: whether it depends on the skip, or could be moved into weights."""

    reads_skip = False
    is_linked = False  # whether modules beside the block that owns it hold it too

    def number(self) -> float | None:
        """The coefficient as a number; None where it depends on the skip."""
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if self.is_linked:
            refuse_a_copy_alone(memo)
        return copy_parts(self, memo)


def refuse_a_copy_alone(memo: dict[int, Any]) -> None:
    """Nothing was copied before it: then those who hold the original would go on asking it, not the copy."""
    if not memo:
        raise ValueError(
            "what scales a model's skips is copied with the model, never alone: the blocks would go on asking the "
            "original. With PEFT leave it out of modules_to_save; after get_peft_model, requires_grad_() on each "
            "of scalelong.scaling_of(model).parameters() trains it, and .state_dict() saves it."
        )


def copy_parts(module: _Module, memo: dict[int, Any]) -> _Module:
    """What `copy.deepcopy` does with a module that has no `__deepcopy__`."""
    twin = type(module).__new__(type(module))
    memo[id(module)] = twin
    twin.__dict__.update(copy.deepcopy(module.__dict__, memo))
    return twin


class FixedScale(SkipScale):
    """A constant. It is a Python number, not a buffer: state dicts stay those of the plain model."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def number(self) -> float:
        """The constant."""
        return self.value

    def forward(self, skip: Tensor) -> float:
        """The constant."""
        return self.value

    def extra_repr(self) -> str:
        """The value, for printing the model."""
        return f"{self.value:g}"


class LearnedScale(SkipScale):
    """One learned number (Table 2). Its shape is [1]: FSDP shards along the first dimension, and 0-d has none."""

    def __init__(self, init: float = 1.0, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.init = init
        self.scale = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Back to the first value."""
        nn.init.constant_(self.scale, self.init)

    def number(self) -> float:
        """What it is now; on the meta device, what it starts as."""
        return self.init if self.scale.is_meta else self.scale.item()

    def forward(self, skip: Tensor) -> Tensor:
        """The number, in the skip's own precision."""
        return self.scale.to(skip.dtype)


class NormScale(SkipScale):
    """A learned gain over the skip's root mean square: of each token, or of each image in a conv net."""

    reads_skip = True

    def __init__(
        self, shape: SkipShape, gain: float = 1.0, device: Any = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.init = gain
        self.over = (1, 2, 3) if shape.layout == "nchw" else (2,)
        self.gain = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Back to the first gain."""
        nn.init.constant_(self.gain, self.init)

    def forward(self, skip: Tensor) -> Tensor:
        """[B, N, D] -> [B, N, 1]; [B, C, H, W] -> [B, 1, 1, 1]. Squares of half precision would overflow."""
        wide = skip if skip.dtype == torch.float64 else skip.float()
        return (self.gain * (wide.square().mean(self.over, keepdim=True) + _EPS).rsqrt()).to(skip.dtype)


class Gate(nn.Module):
    """σ(logits(pooled)), [B, width] -> [B, width].

    With `identity_start` the logits are 0 at first and the output is 2σ, so that a trained model which
    gets the gate computes what it computed before.
    """

    def __init__(self, width: int, identity_start: bool = False) -> None:
        super().__init__()
        self.width = width
        self.identity_start = identity_start

    def logits(self, pooled: Tensor) -> Tensor:
        """What goes into the sigmoid."""
        raise NotImplementedError

    def forward(self, pooled: Tensor) -> Tensor:
        """The coefficients."""
        gate = self.logits(pooled).sigmoid()
        return 2 * gate if self.identity_start else gate


class SEGate(Gate):
    """ζ of Eq. 9: Linear(width, width // ratio), activation, Linear(width // ratio, width)."""

    def __init__(
        self,
        width: int,
        ratio: int = 16,
        activation: str = "relu",
        identity_start: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(width, identity_start)
        if width < ratio:
            warnings.warn(
                f"LS with ratio {ratio} on a width of {width} would have no hidden unit; it keeps one. "
                f"A ratio of {max(1, width // 4)} or less gives it more.",
                stacklevel=2,
            )
        hidden = max(1, width // ratio)
        self.layer1 = nn.Linear(width, hidden, device=device, dtype=dtype)
        self.activation = _ACTIVATIONS[activation]()
        self.layer2 = nn.Linear(hidden, width, device=device, dtype=dtype)
        if identity_start:
            self._zero_last_layer()

    def reset_parameters(self) -> None:
        """PyTorch's default init, as the paper's code has it; the last layer 0 with `identity_start`."""
        self.layer1.reset_parameters()
        self.layer2.reset_parameters()
        if self.identity_start:
            self._zero_last_layer()

    def _zero_last_layer(self) -> None:
        nn.init.zeros_(self.layer2.weight)
        nn.init.zeros_(self.layer2.bias)

    def logits(self, pooled: Tensor) -> Tensor:
        """ζ(GAP(x)), in the gate's own precision: it may be trained in float32 in a model of half of it."""
        if (dtype := self.layer1.weight.dtype) in _PRECISIONS:  # 8 bits are unpacked inside of the layer
            pooled = pooled.to(dtype)
        return self.layer2(self.activation(self.layer1(pooled)))


class IEGate(Gate):
    """γ_c · GAP(x)_c + β_c: the instance-enhancement gate of Table 2."""

    def __init__(
        self, width: int, identity_start: bool = False, device: Any = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(width, identity_start)
        self.gamma = nn.Parameter(torch.empty(width, device=device, dtype=dtype))
        self.beta = nn.Parameter(torch.empty(width, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """γ = 0, β = -1; β = 0 with `identity_start`."""
        nn.init.zeros_(self.gamma)
        nn.init.constant_(self.beta, 0.0 if self.identity_start else -1.0)

    def logits(self, pooled: Tensor) -> Tensor:
        """γ · GAP(x) + β."""
        return pooled * self.gamma + self.beta


class GatedScale(SkipScale):
    """Pools a skip, asks a gate, and gives the coefficients back in the skip's shape.

    An own gate is a child module. A shared one belongs to the model, where it is registered once; here it
    is held in a tuple, which `parameters()` does not look into and `copy.deepcopy` follows.
    """

    reads_skip = True

    def __init__(self, gate: Gate, shape: SkipShape, over: str, shared: bool) -> None:
        super().__init__()
        self.shared_gate: tuple[Gate, ...] = (gate,) if shared else ()
        self.gate = None if shared else gate
        self.over_tokens = shape.layout == "tokens" and over == "paper"
        self.layout = shape.layout

    def forward(self, skip: Tensor) -> Tensor:
        """[B, N, D] -> [B, N, 1] or [B, 1, D]; [B, C, H, W] -> [B, C, 1, 1]."""
        gate = self.gate if self.gate is not None else self.shared_gate[0]
        if self.layout == "nchw":
            return self._ask(gate, skip.mean((2, 3)), skip)[:, :, None, None]
        if self.over_tokens:
            return self._ask(gate, skip.mean(2), skip)[:, :, None]
        return self._ask(gate, skip.mean(1), skip)[:, None, :]

    def _ask(self, gate: Gate, pooled: Tensor, skip: Tensor) -> Tensor:
        if pooled.shape[1] != gate.width:
            what = "tokens" if self.over_tokens else "channels"
            fix = " Use 'ls-channel' (or 'ie:over=channel'), which works at any size." if self.over_tokens else ""
            raise ValueError(
                f"the skip's gate was built for {gate.width} {what}, and this skip has {pooled.shape[1]}.{fix}"
            )
        return gate(pooled).to(skip.dtype)


def build_scales(
    scaling: Scaling,
    shapes: Sequence[SkipShape],
    *,
    keep_function: bool = False,
    device: Any = None,
    dtype: torch.dtype | None = None,
) -> tuple[list[SkipScale], nn.ModuleDict]:
    """One `SkipScale` per skip, outermost first, and the gates that several of them share, by width."""
    if isinstance(scaling, ConstantScaling):
        return [FixedScale(value) for value in scaling.coefficients(len(shapes))], nn.ModuleDict()
    if isinstance(scaling, LearnedScalar):
        return [LearnedScale(scaling.init, device, dtype) for _ in shapes], nn.ModuleDict()
    if isinstance(scaling, SkipNorm):
        return [NormScale(shape, scaling.gain, device, dtype) for shape in shapes], nn.ModuleDict()
    if not isinstance(scaling, (LS, IE)):
        raise TypeError(f"no modules are known for {scaling!r}")

    def new_gate(width: int) -> Gate:
        if isinstance(scaling, LS):
            return SEGate(width, scaling.ratio, scaling.activation, keep_function, device, dtype)
        return IEGate(width, keep_function, device, dtype)

    widths = [shape.gate_width(scaling.over) for shape in shapes]
    shared = nn.ModuleDict()
    if scaling.shared:
        shared.update({str(width): new_gate(width) for width in dict.fromkeys(widths)})
    scales: list[SkipScale] = []
    for shape, width in zip(shapes, widths, strict=True):
        gate = shared[str(width)] if scaling.shared else new_gate(width)
        scales.append(GatedScale(gate, shape, scaling.over, scaling.shared))  # type: ignore[arg-type]
    return scales, shared


def scale_skip(skip: Tensor, scale: SkipScale) -> Tensor:
    """The skip times its coefficient; a coefficient of exactly 1 costs nothing."""
    coefficient = scale(skip)
    if isinstance(coefficient, float) and coefficient == 1:
        return skip
    return skip * coefficient


class SkipScales(nn.Module):
    """The scales of a network that you write yourself: one line where it concatenates.

    `widths` are the skips' channels, outermost first, or one number for all. Token networks say
    `layout="tokens"`, and `tokens=` for gates over tokens. `keep_function` makes gates start at 1.

    >>> scales = SkipScales("cs:0.5", num_skips=3)
    >>> scales(torch.ones(1), 2)                    # skip 2 of 0, 1, 2: the innermost
    tensor([0.2500])
    """

    def __init__(
        self,
        scaling: str | Scaling,
        num_skips: int,
        *,
        widths: int | Sequence[int] | None = None,
        layout: str = "nchw",
        tokens: int | None = None,
        keep_function: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.scaling = parse_scaling(scaling)
        if isinstance(num_skips, bool) or not isinstance(num_skips, int) or num_skips < 1:
            raise ValueError(f"num_skips is a whole number from 1 up, got {num_skips!r}.")
        if layout not in ("nchw", "tokens"):
            raise ValueError(f"layout is 'nchw' or 'tokens', got {layout!r}.")
        channels = self._channels(widths, num_skips, layout, tokens)
        starts_at_one = isinstance(self.scaling, (LS, IE)) or starts_at_identity(self.scaling, num_skips)
        if keep_function and not starts_at_one:
            raise ValueError(
                f"keep_function needs coefficients that start at 1, and {str(self.scaling)!r} has others; "
                "use a gate ('ls', 'ie') or 'scalar', or divide the weights that read skip i by its coefficient."
            )
        shapes = [SkipShape(layout, width, tokens) for width in channels]  # type: ignore[arg-type]
        scales, shared = build_scales(self.scaling, shapes, keep_function=keep_function, device=device, dtype=dtype)
        self.scales = nn.ModuleList(scales)
        self.shared = shared

    def _channels(
        self, widths: int | Sequence[int] | None, num_skips: int, layout: str, tokens: int | None
    ) -> list[int]:
        if widths is None:
            by_tokens = layout == "tokens" and tokens is not None and getattr(self.scaling, "over", "") == "paper"
            if isinstance(self.scaling, (LS, IE)) and not by_tokens:
                raise ValueError(
                    f"{str(self.scaling)!r} builds a gate for each width and got none; "
                    "give widths=, the skips' channels, outermost first."
                )
            return [0] * num_skips
        channels = list(widths) if isinstance(widths, Iterable) else [widths] * num_skips
        if len(channels) != num_skips:
            raise ValueError(f"widths has one entry per skip ({num_skips}), got {len(channels)}: {channels}.")
        if any(isinstance(width, bool) or not isinstance(width, Integral) or width < 1 for width in channels):
            raise ValueError(f"widths are the skips' channels, whole numbers from 1 up, got {widths!r}.")
        return [int(width) for width in channels]

    def forward(self, skip: Tensor, index: int) -> Tensor:
        """The skip times its coefficient. `index` counts from the outermost skip, 0."""
        if not 0 <= index < len(self.scales):
            raise IndexError(f"skip index {index} is not in 0 … {len(self.scales) - 1} (0 is the outermost skip).")
        return scale_skip(skip, self.scales[index])  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        """The spec, for printing the model."""
        return str(self.scaling)


def starts_at_identity(scaling: Scaling, num_skips: int) -> bool:
    """Whether every coefficient is 1 before training without any help."""
    coefficients = first_coefficients(scaling, num_skips)
    return coefficients is not None and all(c == 1 for c in coefficients)


def first_coefficients(scaling: Scaling, num_skips: int) -> tuple[float, ...] | None:
    """The coefficients before training, where they do not depend on the input; else None."""
    if isinstance(scaling, ConstantScaling):
        return scaling.coefficients(num_skips)
    if isinstance(scaling, LearnedScalar):
        return (scaling.init,) * num_skips
    return None
