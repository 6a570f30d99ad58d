"""What a run is made of: frozen dataclasses, to JSON and back, with `a.b=c` overrides. Unknown keys are errors."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from typing import Any, TypeVar

from scalelong.skips.sites import check_placement_name
from scalelong.skips.spec import parse_scaling

T = TypeVar("T")
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def unknown(what: str, name: str, known: Iterable[str], such_as: Iterable[str] | None = None) -> str:
    """The sentence: what was given, the known name that is nearest to it, and those that there are.

    `such_as` is what is listed, where that is not all that is known.

    >>> unknown("setting", "train.step", ["train.lr", "train.steps"])
    "unknown setting 'train.step'; did you mean train.steps? The known ones are train.lr, train.steps."
    """
    known = list(known)
    listed = ", ".join(known if such_as is None else such_as)
    return f"unknown {what} {name!r}; {meant(name, known)} known ones are {listed}."


_OTHER_WORDS = {"learning_rate": "train.lr"}  # what others call it, and no likeness of letters finds


def meant(name: str, known: Iterable[str]) -> str:
    """How a sentence that goes on with a list begins: with a question, where a name is near enough to ask."""
    known = list(known)
    other = _OTHER_WORDS.get(name.rpartition(".")[2])
    near = [other] if other in known else get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}? The" if near else "the"


def _require(holds: bool, rule: str, value: Any) -> None:
    if not holds:
        raise ValueError(f"{rule}, got {value!r}.")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model preset by name, changes to its arguments, and the scaling of its skips, as `apply` takes it."""

    preset: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    scaling: str = "none"
    placement: str = "concat"
    keep_function: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "scaling", str(parse_scaling(self.scaling)))
        check_placement_name(self.placement)


SPACES = ("pixels", "latents")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is done to the images. `condition` is "none", "class" or "text"; `label_dropout` is for both. `space` is
    "pixels", or "latents": those of an autoencoder that the store keeps.
    """

    condition: str = "none"
    label_dropout: float = 0.1
    flip: bool = True
    space: str = "pixels"

    def __post_init__(self) -> None:
        known = ("none", "class", "text")
        _require(self.condition in known, "data.condition is none, class or text", self.condition)
        _require(0 <= self.label_dropout < 1, "data.label_dropout lies in [0, 1)", self.label_dropout)
        _require(self.space in SPACES, f"data.space is {' or '.join(SPACES)}", self.space)


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """What a run on latents learns from its store: how they are decoded, to images [height, width, channels]."""

    autoencoder: str
    weights: str
    scaling_factor: float
    shift_factor: float
    image_shape: tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How images are drawn where nothing else is said: in previews, by `sample` and by `evaluate`."""

    sampler: str = "dpm++"
    steps: int = 50
    guidance: float = 1.0


PARALLELS = ("ddp", "fsdp")
PRECISIONS = ("auto", "fp32", "bf16", "fp16")
EXECUTIONS = ("auto", "eager", "compiled", "captured")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The recipe. One step is one update of the weights, over `batch_size` images in `accumulate` pieces.

    `precision` and `execution` decide how fast, not what: "auto" is fp32 and eager on a CPU, bf16 and a captured
    graph of the compiled step on a GPU. `parallel` is what several processes do: each holds all weights (ddp) or a
    part of them (fsdp).
    """

    steps: int
    batch_size: int
    lr: float
    betas: tuple[float, float] = (0.99, 0.999)
    weight_decay: float = 0.03
    warmup_steps: int = 2500
    clip_norm: float | None = None
    accumulate: int = 1
    precision: str = "auto"
    execution: str = "auto"
    parallel: str = "ddp"
    checkpoint_activations: bool = False
    ema_rates: tuple[float, ...] = (0.999, 0.9999)
    ema_warmup: bool = False
    posthoc_every: int = 0
    seed: int = 1234
    log_every: int = 50
    monitor_every: int = 100
    sample_every: int = 5000
    checkpoint_every: int = 5000
    keep_checkpoints: int = 2
    on_nonfinite: str = "stop"

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulate", "log_every", "monitor_every", "sample_every"):
            _require(getattr(self, name) >= 1, f"train.{name} is at least 1", getattr(self, name))
        for name in ("checkpoint_every", "keep_checkpoints"):
            _require(getattr(self, name) >= 1, f"train.{name} is at least 1", getattr(self, name))
        _require(
            self.batch_size % self.accumulate == 0, "train.accumulate divides train.batch_size", self.accumulate
        )
        _require(0 < self.lr < math.inf, "train.lr is positive and finite", self.lr)
        _require(-(2**63) <= self.seed < 2**63, "train.seed is a whole number of 64 bits", self.seed)
        _require(self.posthoc_every >= 0, "train.posthoc_every is at least 0, for never", self.posthoc_every)
        _require(self.warmup_steps >= 0, "train.warmup_steps is at least 0", self.warmup_steps)
        _require(0 <= self.weight_decay < math.inf, "train.weight_decay is finite, at least 0", self.weight_decay)
        _require(all(0 <= b < 1 for b in self.betas), "train.betas lie in [0, 1)", self.betas)
        _require(self.steps < 10**12, "train.steps is below 10^12", self.steps)
        _require(self.precision in PRECISIONS, f"train.precision is one of {', '.join(PRECISIONS)}", self.precision)
        _require(self.parallel in PARALLELS, f"train.parallel is one of {', '.join(PARALLELS)}", self.parallel)
        _require(self.execution in EXECUTIONS, f"train.execution is one of {', '.join(EXECUTIONS)}", self.execution)
        _require(
            (self.precision, self.execution) != ("fp16", "captured"),
            "train.execution=captured takes bf16 or fp32, as fp16 tries a step again when it overflows",
            self.precision,
        )
        _require(all(0 <= r < 1 for r in self.ema_rates), "train.ema_rates lie in [0, 1)", self.ema_rates)
        _require(len(self.ema_rates) >= 1, "train.ema_rates has at least one rate", self.ema_rates)
        _require(
            self.clip_norm is None or self.clip_norm > 0, "train.clip_norm is positive or none", self.clip_norm
        )
        _require(self.on_nonfinite == "stop", "train.on_nonfinite is stop", self.on_nonfinite)


def resolved_for(config: TrainConfig, device: str, processes: int = 1) -> TrainConfig:
    """The recipe with "auto" replaced by what it means on this kind of device."""
    on_gpu = device.startswith("cuda")
    precision = config.precision if config.precision != "auto" else "bf16" if on_gpu else "fp32"
    fastest = "compiled" if precision == "fp16" or processes > 1 else "captured"
    execution = config.execution if config.execution != "auto" else fastest if on_gpu else "eager"
    if execution == "captured" and not on_gpu:
        raise ValueError(f"train.execution=captured needs a GPU, got the device {device!r}; use compiled or eager.")
    if execution == "captured" and processes > 1:
        raise ValueError(f"train.execution=captured takes one process, got {processes}; use compiled.")
    return replace(config, precision=precision, execution=execution)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run. `process` names the noise process, `target` what is predicted of it ("auto": the process's own),
    `weighting` how much each noise level counts: docs/processes.md. `latents` is filled in from the data.
    """

    model: ModelConfig
    data: DataConfig = DataConfig()
    process: str = "vp-sde"
    target: str = "auto"
    weighting: str = "plain"
    train: TrainConfig
    sampling: SamplingConfig = SamplingConfig()
    latents: LatentConfig | None = None


def to_dict(config: Any) -> dict[str, Any]:
    """Plain dicts and lists, ready for JSON."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return plain


def from_dict(cls: type[T], data: Mapping[str, Any], where: str = "") -> T:
    """Rebuild a config; every unknown, missing or mistyped entry is named with its path."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{where.rstrip('.') or 'the config'} is a group of settings, got {data!r}.")
    hints = typing.get_type_hints(cls)
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    for key in data:
        if key not in known:
            raise ValueError(unknown("setting", where + key, _names(known, where)))
    for name, f in known.items():
        if name not in data and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise ValueError(f"the setting {where + name!r} is missing.")
    return cls(**{key: _typed(hints[key], value, where + key) for key, value in data.items()})


def with_overrides(config: T, overrides: Iterable[str]) -> T:
    """Apply `train.steps=100`-like settings in order."""
    every = list(_settings(type(config)))
    for override in overrides:
        check_has_value(override)
        path, _, text = override.partition("=")
        config = _override(config, path.strip().split("."), text.strip(), path.strip(), every)
    return config


def check_has_value(override: str) -> None:
    """Refuse a setting without its value."""
    if "=" not in override:
        raise ValueError(f"a setting is NAME=VALUE, such as train.steps=1000; got {override!r}.")


def _override(config: Any, path: list[str], text: str, whole: str, every: list[str]) -> Any:
    known = {f.name for f in fields(config)}
    if path[0] not in known:
        where = whole.removesuffix(".".join(path))
        raise ValueError(unknown("setting", whole, every, _names(known, where)))
    current = getattr(config, path[0])
    if isinstance(current, Mapping) and len(path) == 2:  # a free-form group: model.changes.hidden_size=64
        return replace(config, **{path[0]: {**current, path[1]: _guess(text)}})
    if is_dataclass(current):
        if len(path) == 1:
            inside = _names([f.name for f in fields(current)], whole + ".")
            raise ValueError(f"{whole!r} is a group; set one of {', '.join(inside)}.")
        return replace(config, **{path[0]: _override(current, path[1:], text, whole, every)})
    if len(path) > 1:
        raise ValueError(f"unknown setting {whole!r}: {path[0]!r} is a single value.")
    hint = typing.get_type_hints(type(config))[path[0]]
    # "none" is a scaling and a condition: texts are taken as they stand.
    return replace(config, **{path[0]: text if hint is str else _typed(hint, _guess(text), whole)})


def _guess(text: str) -> Any:
    """A value typed on the command line: none, true, numbers, comma lists, JSON; else the text itself."""
    if text.lower() in ("none", "null"):
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return [_guess(part) for part in text.split(",")] if "," in text else text


def _typed(hint: Any, value: Any, where: str) -> Any:
    """The value as the annotation wants it, or a sentence."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if is_dataclass(hint):
        return from_dict(hint, value, where + ".")  # type: ignore[arg-type]
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        return _typed(next(a for a in args if a is not type(None)), value, where)
    if origin is tuple:
        items = value if isinstance(value, (list, tuple)) else [value]
        if args[-1] is not Ellipsis and len(items) != len(args):
            raise ValueError(f"{where} is {len(args)} values, got {value!r}.")
        return tuple(_typed(args[0], item, where) for item in items)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)  # 5e4
    wanted = Mapping if origin is not None else hint
    if not isinstance(value, wanted) or (isinstance(value, bool) and hint is not bool):
        raise ValueError(f"{where} is {_KINDS.get(hint, 'a group of settings')}, got {value!r}.")
    return value


def _names(known: Iterable[str], where: str) -> list[str]:
    return [where + name for name in sorted(known)]


def _settings(cls: type[Any], where: str = "") -> Iterator[str]:
    """The path of every setting, those inside of groups too: a typo may be in the name of the group."""
    for name, hint in typing.get_type_hints(cls).items():
        if is_dataclass(hint):
            yield from _settings(hint, f"{where}{name}.")  # type: ignore[arg-type]
        else:
            yield where + name
