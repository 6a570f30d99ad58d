"""How a run begins: by itself, with the weights of a model, or as a branch of another run.

Each is a run of its own in a folder of its own. `began.json` there says where it comes from, so that it goes on as
it began, also where what it came from is gone.
"""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from scalelong.backbones.build import CLASS_NAMES
from scalelong.config import RunConfig, from_dict, to_dict
from scalelong.data.contexts import KeptText, check_same_encoder
from scalelong.data.files import write_whole
from scalelong.presets import model_preset
from scalelong.runs.assembly import build_model, drawn_by, placed
from scalelong.runs.data import RunData
from scalelong.runs.folder import CONFIG, TEXT, differences, last_step, load_run, read_config, run_config
from scalelong.saving import load, local_folder, model_class, recorded_scaling
from scalelong.saving import read_config as read_model_config
from scalelong.skips.apply import apply
from scalelong.training import checkpoint
from scalelong.training.fit import CHECKPOINTS

BEGAN = "began.json"
# Decided by what is trained on.
_OF_THE_DATA = ("sample_size", "in_channels", "num_class_embeds", "cross_attention_dim", "text_len")
_OF_THE_SCALING = ("scaling", "placement", "keep_function")
_CLASS_TABLES = ("label_emb.weight", "class_embedding.weight")  # of U-ViT and of diffusers' UNets
# What a checkpoint's tensors and steps are of; all else may differ between a run and its branch.
_STAY = ("model", "process", "target")
_STAY_IN_TRAINING = ("batch_size", "ema_rates", "ema_warmup", "posthoc_every")
_STAY_IN_DATA = ("condition", "space")


@dataclass(frozen=True)
class Beginning:
    """By itself: the weights are drawn by the seed."""

    how: ClassVar[str] = "itself"

    @property
    def place(self) -> str:
        """What it begins with, wherever it is asked from."""
        return ""

    def fitted(self, config: RunConfig) -> RunConfig:
        """The config with what the beginning decides."""
        return config

    def check(self, config: RunConfig, text: KeptText | None, data: RunData | None) -> None:
        """Refuse a config, fitted to its data, that cannot begin so; writes nothing."""

    def model(self, config: RunConfig, device: str) -> nn.Module:
        """The network at its first step, or one that a checkpoint is read into."""
        return build_model(config, device)

    def record(self, out: Path, preset: str) -> None:
        """Say in a new folder how it begins: before its config, without which it is no run yet."""

    def enter(self, out: Path) -> int:
        """Put what the run needs into its new folder; the step that it begins at."""
        return 0

    def told(self) -> str | None:
        """How, for people; None where there is nothing to tell."""
        return None


@dataclass(frozen=True, kw_only=True)
class Decided:
    """What the weights that a run begins with say of its network: arguments, and a scaling if they have one."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    scaling: str | None = None
    placement: str = "concat"
    keep_function: bool = False


@dataclass(frozen=True)
class Weights(Beginning):
    """At step 0 with the weights of a run (its average), or of a model's or pipeline's folder or name on the hub:
    what `scalelong.load` opens.
    """

    source: str
    decided: Decided | None = None  # kept in the folder of a run that goes on

    how: ClassVar[str] = "weights"

    @property
    def place(self) -> str:
        """The folder, or the name on the hub."""
        return str(Path(self.source).resolve()) if Path(self.source).is_dir() else self.source

    def fitted(self, config: RunConfig) -> RunConfig:
        """With the network's arguments where none were given, and its scaling."""
        decided = self.decided or _origin(self.source).decided(config.model.preset)
        model = replace(config.model, changes={**decided.changes, **config.model.changes})
        if decided.scaling is None:
            return replace(config, model=model)
        own = {name: getattr(decided, name) for name in _OF_THE_SCALING}
        if model.scaling not in ("none", decided.scaling) or model.placement not in ("concat", decided.placement):
            raise ValueError(
                f"{self.source} was trained with the scaling {decided.scaling!r} at {decided.placement!r}, and "
                f"{model.scaling!r} at {model.placement!r} is asked for; leave --scaling out to keep its own, or "
                "give weights that have none (scalelong export --fold)."
            )
        return replace(config, model=replace(model, **own))

    def model(self, config: RunConfig, device: str) -> nn.Module:
        """With these weights in it; what they do not know of, gates or other classes, is drawn."""
        origin = _origin(self.source)
        given = origin.open().state_dict()
        if origin.scaling is not None:
            model = build_model(config, device)
            _fill(model, given, self.source)
            return model
        plain = replace(config.model, scaling="none", placement="concat", keep_function=False)
        # Gates are drawn where the weights are: on the CPU, whose numbers the seed decides.
        model = build_model(replace(config, model=plain), "meta" if device == "meta" else "cpu")
        _fill(model, given, self.source)
        if config.model.scaling != "none":
            with drawn_by(config.train.seed):
                apply(model, **{name: getattr(config.model, name) for name in _OF_THE_SCALING})
        return placed(model, config, device)

    def told(self) -> str:
        """How, for people."""
        return f"with the weights of {self.source}"

    def record(self, out: Path, preset: str) -> None:
        """Remember where the weights came from, and what they decided."""
        origin = _origin(self.source)
        decided = self.decided or origin.decided(preset)
        _Began(how=self.how, source=self.place, step=origin.step(), decided=decided).write(out)


@dataclass(frozen=True)
class Branch(Beginning):
    """At another run's newest checkpoint, with its optimiser and averages, and other settings of training."""

    run: Path

    how: ClassVar[str] = "branch"

    @property
    def place(self) -> str:
        """The run's folder."""
        return str(self.run.resolve())

    def check(self, config: RunConfig, text: KeptText | None, data: RunData | None) -> None:
        """Refuse what the run's checkpoint cannot go on with; other data are told."""
        before, now = (_staying(to_dict(c)) for c in (read_config(self.run), config))
        if before != now:
            raise ValueError(
                "a branch keeps its run's model, process, batch size and averages: in "
                f"{self.run} {', '.join(differences(before, now))}. Leave these as they were, or begin with its "
                "weights alone (--init)."
            )
        if config.train.steps <= (step := self._checkpoint().step):
            raise ValueError(
                f"{self.run} is at step {step:,}, and train.steps is {config.train.steps:,}; a branch takes more."
            )
        if text is not None and (self.run / TEXT).is_file():
            kept = KeptText.read(self.run / TEXT)
            check_same_encoder(text.context.null, kept.info, kept.context.null, "the data")
        had = RunData.read(self.run)
        if had is not None and data is not None and had.sha256 != data.sha256:
            warnings.warn(
                f"{self.run} was trained on {had.source} ({had.count:,} images), and its branch goes on with other "
                f"data: {data.source} ({data.count:,} images, in {data.folder}).",
                stacklevel=2,
            )

    def told(self) -> str:
        """How, for people."""
        return f"as a branch of {self.run}"

    def record(self, out: Path, preset: str) -> None:
        """Remember whose the checkpoint is."""
        _Began(how=self.how, source=self.place).write(out)

    def enter(self, out: Path) -> int:
        """Copy the checkpoint, and remember which it is."""
        found = self._checkpoint()
        _Began(how=self.how, source=self.place, step=found.step).write(out)
        checkpoint.copy(found, out / CHECKPOINTS)
        return found.step

    def _checkpoint(self) -> checkpoint.Checkpoint:
        found = checkpoint.load_latest(self.run / CHECKPOINTS)
        if found is None:
            raise ValueError(f"{self.run} has no whole checkpoint to branch from; let it train to its first one.")
        return found


def beginning_in(out: Path, asked: Beginning) -> Beginning:
    """How the run in a folder begins or began: as it is asked for where there is none."""
    if not (out / CONFIG).is_file():
        return asked
    began = _Began.read(out)
    begin = _begun(began)
    places = (asked.place, str(Path(asked.place).resolve()))  # a folder that is gone is told by its path, too
    if asked.how != Beginning.how and (asked.how != begin.how or begin.place not in places):
        option = "--init" if asked.how == Weights.how else "--branch"
        raise ValueError(
            f"{out} holds a run that began {begin.told() or 'by itself'}; leave {option} out to go on with it, or "
            "choose another --out."
        )
    return begin


def _begun(began: _Began | None) -> Beginning:
    if began is None:
        return Beginning()
    return Weights(began.source, began.decided) if began.how == Weights.how else Branch(Path(began.source))


def as_begun(begin: Beginning, out: Path) -> Beginning:
    """Once a run has a checkpoint of its own, what it began with is not asked any more."""
    return Beginning() if begin.how != Beginning.how and last_step(out) else begin


@dataclass(frozen=True, kw_only=True)
class _Began:
    """What is kept in a run's folder: of what source, and at which of its steps."""

    how: str
    source: str
    step: int | None = None
    decided: Decided | None = None

    @classmethod
    def read(cls, out: Path) -> Self | None:
        file = out / BEGAN
        if not file.is_file():
            return None
        try:
            return from_dict(cls, json.loads(file.read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{file} is not as train wrote it ({error}); put it back.") from error

    def write(self, out: Path) -> None:
        write_whole(out / BEGAN, json.dumps(asdict(self), indent=2, ensure_ascii=False))


@dataclass(frozen=True)
class _Origin:
    """Where weights come from. Its network's class, arguments and scaling are known without reading them."""

    source: str
    folder: Path
    network: str
    arguments: Mapping[str, Any]
    scaling: Mapping[str, Any] | None

    def decided(self, preset_name: str) -> Decided:
        """What is other than in the recipe, which has to be of the same class."""
        preset = model_preset(preset_name)
        network = CLASS_NAMES[preset.backbone]
        if self.network != network:
            raise ValueError(
                f"{self.source} is a {self.network}, and {preset_name} trains a {network}; choose a recipe of the "
                "same kind."
            )
        self._check_calls()
        known = {name: p.default for name, p in inspect.signature(model_class(network)).parameters.items()}
        as_recipe = {**known, **preset.config}
        changes = {
            name: value
            for name, value in self.arguments.items()
            if name in known
            and name not in (*_OF_THE_DATA, *_OF_THE_SCALING)
            and _plain(value) != _plain(as_recipe[name])
        }
        return Decided(changes=_plain(changes), **(self.scaling or {}))

    def _check_calls(self) -> None:
        """A run asks its network for the noise, or what stands for it, and feeds it class numbers or texts."""
        taken, given = (self.arguments.get(f"{side}_channels") for side in ("in", "out"))
        if None not in (taken, given) and taken != given:
            raise ValueError(
                f"a run trains networks that give as many channels as they take, and {self.source} takes {taken} "
                f"and gives {given}, as with a learned variance; begin with other weights."
            )
        if (kind := self.arguments.get("class_embed_type")) is not None:
            raise ValueError(
                f"a run feeds its network the numbers of classes, and {self.source} has class_embed_type={kind!r}; "
                "begin with other weights."
            )

    def open(self) -> nn.Module:
        """The model, on the CPU."""
        return load_run(self.folder, device="cpu").model if run_config(self.folder) else load(self.folder)

    def step(self) -> int | None:
        """That of a run; nobody knows a model's."""
        return last_step(self.folder) if run_config(self.folder) else None


def _origin(source: str) -> _Origin:
    folder = local_folder(source)
    if (run := run_config(folder)) is not None:
        model = run.model
        preset = model_preset(model.preset)
        scaling = None if model.scaling == "none" else {name: getattr(model, name) for name in _OF_THE_SCALING}
        arguments: Mapping[str, Any] = {**preset.config, **model.changes}
        return _Origin(source, folder, CLASS_NAMES[preset.backbone], arguments, scaling)
    if (folder / "model_index.json").is_file():
        folder = next((folder / name for name in ("unet", "transformer") if (folder / name).is_dir()), folder)
    config = read_model_config(folder)
    return _Origin(source, folder, config["_class_name"], config, recorded_scaling(config))


def _fill(model: nn.Module, given: Mapping[str, Tensor], source: str) -> None:
    """Copy all weights, but for a table of other classes."""
    own = model.state_dict()
    shapes, theirs = ({name: list(t.shape) for name, t in state.items()} for state in (own, given))
    other = [name for name in sorted(own.keys() | given.keys()) if shapes.get(name) != theirs.get(name)]
    if wrong := [name for name in other if name not in _CLASS_TABLES]:
        there, here = (of.get(wrong[0], "missing") for of in (theirs, shapes))
        raise ValueError(
            f"the weights of {source} do not fit: {wrong[0]} is {there} there and {here} here. Give data of the "
            "same size and condition, and no model.changes of its shape."
        )
    for name in other:
        if name in own:
            warnings.warn(f"{name} is of other classes in {source}: it begins anew, {shapes[name]}.", stacklevel=3)
    if not any(tensor.is_meta for tensor in own.values()):  # a plan asks no more than whether they fit
        model.load_state_dict({name: own[name] if name in other else given[name] for name in own})


def _staying(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that a branch has from its run."""
    return {
        **{name: settings[name] for name in _STAY},
        "train": {name: settings["train"][name] for name in _STAY_IN_TRAINING},
        "data": {name: settings["data"][name] for name in _STAY_IN_DATA},
    }


def _plain(value: Any) -> Any:
    """As JSON has it: tuples are lists."""
    return json.loads(json.dumps(value, default=str))
