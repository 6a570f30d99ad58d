"""A run's folder: begun, checked before a run goes on in it, and read again."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from scalelong.config import RunConfig, from_dict, to_dict
from scalelong.data.contexts import KeptText, check_same_encoder
from scalelong.data.files import write_whole
from scalelong.runs.assembly import build_model, num_classes
from scalelong.runs.data import DATA, RunData, check_same_data
from scalelong.runs.drawing import with_autoencoder
from scalelong.skips.apply import UndoneByNormWarning
from scalelong.training import checkpoint
from scalelong.training.ema import default_rate
from scalelong.training.fit import CHECKPOINTS
from scalelong.training.log import environment
from scalelong.training.posthoc import reconstruct
from scalelong.world import usable_device

CONFIG, ENVIRONMENT, SAMPLES, TEXT = "config.json", "environment.json", "samples", "text.safetensors"
# May differ between a run and its resumption: they change how long, how often and where, not what is computed.
_HOW_OFTEN = ("steps", "log_every", "sample_every", "checkpoint_every", "keep_checkpoints")
_MAY_CHANGE = (*_HOW_OFTEN, "execution", "parallel")


@dataclass(frozen=True)
class LoadedRun:
    """A trained model with averaged weights, and where they come from."""

    config: RunConfig
    model: nn.Module
    step: int
    ema_rate: float | str  # or "post-hoc WIDTH"
    text: KeptText | None = None  # the captions that a text run keeps, and where its encoder is
    class_names: tuple[str, ...] | None = None  # None as well for a run whose folder does not tell them

    @property
    def num_classes(self) -> int | None:
        """How many classes can be asked for; None where the run is unconditional."""
        return num_classes(self.config)

    @property
    def null_class(self) -> int | None:
        """The label that stands for no class; None where the run has none."""
        return self.num_classes if self.config.data.label_dropout > 0 else None


def load_run(
    folder: Path,
    *,
    ema_rate: float | None = None,
    posthoc_width: float | None = None,
    device: str | None = None,
    autoencoder: str | None = None,
) -> LoadedRun:
    """The newest whole checkpoint of a run, with the average of `ema_rate`, or the slowest that has settled.

    `posthoc_width` reconstructs an average of that width from the run's snapshots instead. `autoencoder` says where
    that of a run on latents is now.
    """
    config = with_autoencoder(read_config(folder), autoencoder)
    if missing := [key for key in ("sample_size", "in_channels") if key not in config.model.changes]:
        raise ValueError(f"{folder / CONFIG} is not as train wrote it: model.changes lacks {', '.join(missing)}.")
    found = checkpoint.load_latest(folder / CHECKPOINTS)
    if found is None:
        raise ValueError(
            f"{folder} has no whole checkpoint; give the command that began it again ({ENVIRONMENT} has it)."
        )
    rates = list(config.train.ema_rates)
    if ema_rate is not None and ema_rate not in rates:
        raise ValueError(f"the run keeps the averages {', '.join(map(str, rates))}, got {ema_rate}.")
    rate: float | str = default_rate(rates, found.step) if ema_rate is None else ema_rate
    step, weights = found.step, None
    if posthoc_width is not None:
        if ema_rate is not None:
            raise ValueError(f"an average is chosen by --ema or --posthoc-ema, got {ema_rate} and {posthoc_width}.")
        weights, step = reconstruct(folder, posthoc_width)
        rate = f"post-hoc {posthoc_width}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UndoneByNormWarning)  # said when it was trained
        model = build_model(config, usable_device(device))
    try:
        model.load_state_dict(weights or found.tensors(f"ema-{rate}"))
    except RuntimeError as error:  # torch lists every tensor: the first says enough
        reason = "; ".join(line.strip() for line in str(error).splitlines()[1:2])
        raise ValueError(
            f"{folder / CONFIG} and the checkpoint {found.folder} do not belong together ({reason}); put back the "
            "config that the run was trained with."
        ) from error
    text = KeptText.read(folder / TEXT) if config.data.condition == "text" else None
    data = RunData.read(folder)
    return LoadedRun(config, model.eval(), step, rate, text, data.classes if data else None)


def read_config(folder: Path) -> RunConfig:
    """A run folder's config.json."""
    file = folder / CONFIG
    if not file.is_file():
        raise ValueError(
            f"{folder} is no run folder: it has no {CONFIG}. scalelong train RECIPE --out {folder} makes one."
        )
    try:
        return from_dict(RunConfig, json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: {error}") from error


def run_config(folder: Path) -> RunConfig | None:
    """Of a run's folder; None for another, such as a model's, which has a config.json as well."""
    file = folder / CONFIG
    if not file.is_file():
        return None
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} cannot be read ({error}); copy the folder again.") from error
    return read_config(folder) if isinstance(held, dict) and "train" in held else None


def last_step(folder: Path) -> int:
    """The step of a run's newest whole checkpoint; 0 where there is none."""
    found = checkpoint.load_latest(folder / CHECKPOINTS)
    return found.step if found else 0


def check_folder(config: RunConfig, out: Path, text: KeptText | None = None, data: RunData | None = None) -> None:
    """Refuse a folder that holds another run, or something else; writes nothing."""
    if (out / CONFIG).is_file():
        before, now = to_dict(read_config(out)), to_dict(config)
        for key in _MAY_CHANGE:
            before["train"].pop(key), now["train"].pop(key)
        for settings in (before, now):
            settings.pop("sampling")
            (settings["latents"] or {}).pop("autoencoder", None)
        if before != now:
            raise ValueError(
                f"{out} holds another run: {', '.join(differences(before, now))}. Choose another --out, give the "
                f"same settings to go on with it, or go on from its last step with other ones by --branch {out}."
            )
        if data is not None and (began_with := RunData.read(out)) is not None:
            check_same_data(began_with, data, out)
        if text is not None and (out / TEXT).is_file():
            kept = KeptText.read(out / TEXT)
            check_same_encoder(text.context.null, kept.info, kept.context.null, "the data")
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not empty and holds no run; choose another --out.")


class _Absent:
    def __repr__(self) -> str:
        return "not set"


_ABSENT = _Absent()  # which None is not


def differences(before: Any, now: Any, where: str = "") -> list[str]:
    """What two configs, as dicts, differ in: a sentence for each setting."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = sorted(before.keys() | now.keys())
        return [
            d
            for key in keys
            for d in differences(before.get(key, _ABSENT), now.get(key, _ABSENT), f"{where}.{key}".lstrip("."))
        ]
    return [f"{where} was {before!r} and is {now!r}"] if before != now else []


def open_run(config: RunConfig, out: Path, text: KeptText | None, data: RunData) -> None:
    """Make the run's folder, or go on with the one that is there."""
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / ENVIRONMENT, json.dumps(environment(), indent=2))
    if text is not None and not (out / TEXT).is_file():
        text.write(out / TEXT)
    if not (out / DATA).is_file():
        data.write(out)
    write_whole(out / CONFIG, json.dumps(to_dict(config), indent=2, ensure_ascii=False))
