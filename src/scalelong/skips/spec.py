"""Scalings as values: frozen dataclasses, and the short strings that name them ("cs:0.7", "ls", ...).

`parse_scaling` reads a string, `str(scaling)` prints the shortest string that reads back as the same value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from numbers import Real
from typing import Any, ClassVar

from scalelong.skips import coefficients

INVERSE_SQRT2 = 2**-0.5
ACTIVATIONS = ("relu", "elu", "mish")
AXES = ("paper", "channel")


@dataclass(frozen=True)
class Scaling:
    """What multiplies the long skips. Skip 0 is the outermost; N is the number of skips."""

    def __str__(self) -> str:
        return min(self._spellings(), key=len)

    def _spellings(self) -> Iterator[str]:
        raise NotImplementedError


@dataclass(frozen=True)
class ConstantScaling(Scaling):
    """A scaling whose coefficients are fixed before training and known from N alone."""

    def coefficients(self, num_skips: int) -> tuple[float, ...]:
        """One number per skip, outermost first."""
        raise NotImplementedError


@dataclass(frozen=True)
class NoScaling(ConstantScaling):
    """`none`: the plain network, κ_i = 1."""

    def coefficients(self, num_skips: int) -> tuple[float, ...]:
        """All ones."""
        return coefficients.uniform(num_skips, 1.0)

    def _spellings(self) -> Iterator[str]:
        yield "none"


@dataclass(frozen=True)
class Uniform(ConstantScaling):
    """`uniform:K`, and `1/sqrt2` for K = 2^-½ (Imagen, SR3): κ_i = K."""

    value: float = INVERSE_SQRT2

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", _kappa(self.value, "uniform"))

    def coefficients(self, num_skips: int) -> tuple[float, ...]:
        """K on every skip."""
        return coefficients.uniform(num_skips, self.value)

    def _spellings(self) -> Iterator[str]:
        yield f"uniform:{_print_number(self.value)}"
        if self.value == INVERSE_SQRT2:
            yield "1/sqrt2"


@dataclass(frozen=True)
class CS(ConstantScaling):
    """`cs:K` (Eq. 8): κ_i = κ^i, from 1 outermost to κ^(N-1) innermost.

    `cs-reversed:K`, the ablation of Table 4: κ_i = κ^(N-i), from κ^N outermost to κ innermost.
    """

    kappa: float
    reverse: bool = False

    def __post_init__(self) -> None:
        _check_bool(self.reverse, "reverse")
        object.__setattr__(self, "kappa", _kappa(self.kappa, "cs-reversed" if self.reverse else "cs"))

    def coefficients(self, num_skips: int) -> tuple[float, ...]:
        """κ^i, or κ^(N-i) reversed."""
        schedule = coefficients.cs_reversed if self.reverse else coefficients.cs
        return schedule(num_skips, self.kappa)

    def _spellings(self) -> Iterator[str]:
        yield f"{'cs-reversed' if self.reverse else 'cs'}:{_print_number(self.kappa)}"


@dataclass(frozen=True)
class PerSkip(ConstantScaling):
    """`per-skip:A/B/…`: coefficients given one by one, outermost first, as `scalelong kappa` proposes them."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if isinstance(self.values, (str, Real)) or not self.values:
            raise ValueError(
                f"per-skip: the values are one number for each skip, got {self.values!r}; try 'per-skip:1/0.7/0.5'."
            )
        object.__setattr__(self, "values", tuple(_kappa(value, "per-skip", "1/0.7") for value in self.values))

    def coefficients(self, num_skips: int) -> tuple[float, ...]:
        """The values; there must be one for each skip."""
        if len(self.values) != num_skips:
            raise ValueError(
                f"per-skip has one value for each of the {num_skips} skips, got {len(self.values)}: {str(self)!r}."
            )
        return self.values

    def _spellings(self) -> Iterator[str]:
        yield f"per-skip:{'/'.join(map(_print_number, self.values))}"


@dataclass(frozen=True)
class LS(Scaling):
    """`ls` (Eq. 9): κ_i = σ(W2 · act(W1 · GAP(x_i))), a squeeze-excite gate fed by the skip itself.

    | over | U-ViT, HunyuanDiT: skip [B, N, D] | conv UNet: skip [B, C, H, W] |
    |---|---|---|
    | `paper` | one value per token, pooled over D; tied to one token count | one per channel, pooled over H, W |
    | `channel` | one value per channel, pooled over the tokens; any resolution | the same as `paper` |

    W1 has width // ratio rows, at least one. `shared`: one gate for all skips of a width; `ls-per-skip`
    gives each skip its own. Both layers keep PyTorch's default init, so gates start near ½.
    """

    ratio: int = 16
    activation: str = "relu"
    shared: bool = True
    over: str = "paper"

    def __post_init__(self) -> None:
        if isinstance(self.ratio, bool) or not isinstance(self.ratio, int) or not 1 <= self.ratio < 10**18:
            raise ValueError(f"ls: the ratio is a whole number from 1 up, got {self.ratio!r}; try ratio=16.")
        _check_one_of(self.activation, ACTIVATIONS, "ls", "activation")
        _check_bool(self.shared, "shared")
        _check_one_of(self.over, AXES, "ls", "over")

    def _spellings(self) -> Iterator[str]:
        yield from _print_options("ls", self)
        if not self.shared:
            yield from _print_options("ls-per-skip", self, implied="shared")
        if self.over == "channel":
            yield from _print_options("ls-channel", self, implied="over")


@dataclass(frozen=True)
class LearnedScalar(Scaling):
    """`scalar`, `scalar:INIT` (Table 2): κ_i = s_i, one learned number per skip, s_i = INIT at the start."""

    init: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "init", _finite(self.init, "scalar", "init", "scalar:1"))

    def _spellings(self) -> Iterator[str]:
        yield f"scalar:{_print_number(self.init)}"
        if self.init == 1:
            yield "scalar"


@dataclass(frozen=True)
class SkipNorm(Scaling):
    """`skip-norm`, `skip-norm:GAIN` (ours): κ_i = g_i / RMS(x_i), g_i a learned number, GAIN at the start.

    Every token of a skip, or every image of a conv net's, then meets the main path with the same size, however
    features grow in training.
    """

    gain: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "gain", _finite(self.gain, "skip-norm", "the gain", "skip-norm:1"))
        if self.gain <= 0:
            raise ValueError(f"skip-norm: the gain is positive, got {self.gain!r}; try 'skip-norm:1'.")

    def _spellings(self) -> Iterator[str]:
        yield f"skip-norm:{_print_number(self.gain)}"
        if self.gain == 1:
            yield "skip-norm"


@dataclass(frozen=True)
class IE(Scaling):
    """`ie` (Table 2): κ_i = σ(γ_c · GAP(x_i)_c + β_c), one (γ, β) per token or channel, on LS's axis.

    γ = 0 and β = -1 at the start, so gates start at σ(-1) = 0.27. `shared` and `over` as in `LS`.
    """

    shared: bool = True
    over: str = "paper"

    def __post_init__(self) -> None:
        _check_bool(self.shared, "shared")
        _check_one_of(self.over, AXES, "ie", "over")

    def _spellings(self) -> Iterator[str]:
        yield from _print_options("ie", self)


def parse_scaling(spec: str | Scaling) -> Scaling:
    """Read a spec string; a `Scaling` passes through.

    >>> parse_scaling("cs:0.7")
    CS(kappa=0.7, reverse=False)
    >>> str(parse_scaling("ls:shared=false"))
    'ls-per-skip'
    """
    if isinstance(spec, Scaling):
        return spec
    if not isinstance(spec, str):
        raise ValueError(f"a scaling is a string or a scaling object, got {spec!r}; try 'cs:0.7' or 'ls'.")
    name, colon, rest = spec.strip().lower().partition(":")
    if "placement" in rest:
        raise ValueError(
            f"the placement is no part of a scaling, got {spec!r}; it is an option of its own, placement='norm' "
            "(in commands --set model.placement=norm)."
        )
    if name not in _READERS and (meant := re.fullmatch(r"(cs|cs-reversed|uniform)?[-=]?(0?\.\d+|1)", name)):
        raise ValueError(f"unknown scaling {spec!r}; did you mean '{meant[1] or 'cs'}:{meant[2]}'?")
    if name not in _READERS:
        near = get_close_matches(name, _READERS, n=1)
        asked = f"did you mean {near[0]}? The" if near else "the"
        raise ValueError(f"unknown scaling {spec!r}; {asked} known ones are {', '.join(KNOWN_SPECS)}.")
    if colon and not rest.strip():
        raise ValueError(f"nothing follows the colon in {spec!r}; write a value, or leave the colon out.")
    return _READERS[name].read(name, rest.strip())


@dataclass(frozen=True)
class _Constant:
    """Reads `name` with no value."""

    scaling: Scaling

    def read(self, name: str, rest: str) -> Scaling:
        if rest:
            raise ValueError(f"{name} takes no value, got {rest!r}; write {name!r}.")
        return self.scaling


@dataclass(frozen=True)
class _Number:
    """Reads `name:NUMBER`."""

    build: Any
    example: str
    default: Scaling | None = None

    # float() alone would also take "1_0", "infinity" and other scripts' digits.
    PATTERN: ClassVar[re.Pattern[str]] = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII)

    def read(self, name: str, rest: str) -> Scaling:
        if not rest and self.default is not None:
            return self.default
        if not rest:
            raise ValueError(f"{name} needs a number after a colon, got none; write {self.example!r}.")
        if not self.PATTERN.fullmatch(rest):
            raise ValueError(f"{name} takes one plain number, got {rest!r}; write {self.example!r}.")
        scaling: Scaling = self.build(float(rest))
        return scaling


@dataclass(frozen=True)
class _Numbers:
    """Reads `name:NUMBER/NUMBER/…`."""

    build: Any
    example: str

    def read(self, name: str, rest: str) -> Scaling:
        parts = [part.strip() for part in rest.split("/")]
        if not all(_Number.PATTERN.fullmatch(part) for part in parts):
            raise ValueError(f"{name} takes plain numbers with / between, got {rest!r}; write {self.example!r}.")
        scaling: Scaling = self.build(tuple(map(float, parts)))
        return scaling


@dataclass(frozen=True)
class _Options:
    """Reads `name:key=value,...`; what the short name already says cannot be said again."""

    build: Any
    implied: Mapping[str, Any]
    allowed: tuple[str, ...]

    def read(self, name: str, rest: str) -> Scaling:
        chosen: dict[str, Any] = dict(self.implied)
        free = [key for key in self.allowed if key not in self.implied]
        for option in rest.split(",") if rest else []:
            key, equals, value = (part.strip() for part in option.partition("="))
            if not equals or key not in free:
                raise ValueError(
                    f"{name} takes the options {', '.join(f'{k}=' for k in free)}, got {option.strip()!r}; "
                    f"write for example '{name}:{_OPTION_EXAMPLES[free[0]]}'"
                    + (", and give a constant κ to 'cs' or 'uniform'." if _Number.PATTERN.fullmatch(key) else ".")
                )
            if key in chosen:
                raise ValueError(f"{name}: the option {key!r} is given twice in {rest!r}; give it once.")
            chosen[key] = _read_option(name, key, value)
        scaling: Scaling = self.build(**{_FIELD_OF_OPTION.get(k, k): v for k, v in chosen.items()})
        return scaling


def _read_option(name: str, key: str, value: str) -> Any:
    if key == "ratio":
        if not re.fullmatch(r"\d{1,18}", value, re.ASCII):
            raise ValueError(f"{name}: the ratio is a whole number from 1 up, got {value!r}; try ratio=16.")
        return int(value)
    if key == "shared":
        if value not in ("true", "false"):
            raise ValueError(f"{name}: shared is true or false, got {value!r}; write shared=false.")
        return value == "true"
    return value


_LS_OPTIONS = ("ratio", "act", "shared", "over")
_IE_OPTIONS = ("shared", "over")
_FIELD_OF_OPTION = {"act": "activation"}
_OPTION_EXAMPLES = {"ratio": "ratio=8", "act": "act=mish", "shared": "shared=false", "over": "over=channel"}


def _print_options(name: str, scaling: LS | IE, implied: str = "") -> Iterator[str]:
    """`name:key=value,...` with the fields that differ from their defaults, less the implied one."""
    option_of_field = {field: option for option, field in _FIELD_OF_OPTION.items()}
    options = [
        f"{option_of_field.get(field.name, field.name)}={str(getattr(scaling, field.name)).lower()}"
        for field in fields(scaling)
        if field.name != implied and getattr(scaling, field.name) != field.default
    ]
    yield f"{name}:{','.join(options)}" if options else name


def _print_number(number: float) -> str:
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


def _kappa(value: Any, name: str, example: str = "0.7") -> float:
    number = _finite(value, name, "κ", f"{name}:{example}")
    if not 0 < number <= 1:
        raise ValueError(f"{name}: κ lies in (0, 1], got {value!r}; try '{name}:{example}'.")
    return number


def _finite(value: Any, name: str, what: str, example: str) -> float:
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name}: {what} is a finite number, got {value!r}; try {example!r}.")
    return number


def _check_one_of(value: Any, known: tuple[str, ...], name: str, what: str) -> None:
    if value not in known:
        raise ValueError(f"{name}: {what} is one of {', '.join(known)}, got {value!r}; try {known[0]!r}.")


def _check_bool(value: Any, what: str) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{what} is True or False, got {value!r}.")


_READERS: dict[str, _Constant | _Number | _Numbers | _Options] = {
    "none": _Constant(NoScaling()),
    "1/sqrt2": _Constant(Uniform(INVERSE_SQRT2)),
    "uniform": _Number(Uniform, "uniform:0.5"),
    "cs": _Number(CS, "cs:0.7"),
    "cs-reversed": _Number(lambda kappa: CS(kappa, reverse=True), "cs-reversed:0.7"),
    "per-skip": _Numbers(PerSkip, "per-skip:1/0.7/0.5"),
    "ls": _Options(LS, {}, _LS_OPTIONS),
    "ls-per-skip": _Options(LS, {"shared": False}, _LS_OPTIONS),
    "ls-channel": _Options(LS, {"over": "channel"}, _LS_OPTIONS),
    "scalar": _Number(LearnedScalar, "scalar:0.5", default=LearnedScalar()),
    "ie": _Options(IE, {}, _IE_OPTIONS),
    "skip-norm": _Number(SkipNorm, "skip-norm:1", default=SkipNorm()),
}

KNOWN_SPECS = (
    "none",
    "1/sqrt2",
    "uniform:K",
    "cs:K",
    "cs-reversed:K",
    "per-skip:A/B/…",
    "ls",
    "ls-per-skip",
    "ls-channel",
    "scalar[:INIT]",
    "ie",
    "skip-norm[:GAIN]",
)
