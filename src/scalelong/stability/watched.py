"""What a monitor's folder holds: its log, and what is watched."""

from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist
from torch import nn

from scalelong.data.files import write_whole
from scalelong.skips.apply import scaling_of
from scalelong.stability.alarm import LEARNING
from scalelong.training.log import METRICS, WATCHED, NoLog, RunLog


def open_log(folder: Path, logger: str, first_step: int, model: nn.Module) -> RunLog | NoLog:
    """The log of the first process; the others have none, and do not mind that it has begun."""
    if dist.is_available() and dist.is_initialized() and dist.get_rank() > 0:
        return NoLog()
    if (folder / METRICS).exists() and not first_step:
        raise ValueError(
            f"{folder} holds the log of another training; give another folder, remove that one, or give "
            "first_step=N to go on from step N of it."
        )
    folder.mkdir(parents=True, exist_ok=True)
    log = RunLog(folder, first_step, logger)
    write_about(folder, model)
    return log


def write_about(folder: Path, model: nn.Module, learnt: int = 0) -> None:
    """Say what is watched, and of how many steps the alarm has learnt."""
    about = {"model": _described(model), "alarm_learns_steps": LEARNING, "alarm_learnt_steps": learnt}
    write_whole(folder / WATCHED, json.dumps(about) + "\n")


def _described(model: nn.Module) -> str:
    """Two pages are to be told apart."""
    handle = scaling_of(model)
    size = sum(p.numel() for p in model.parameters() if p.requires_grad)
    place = f" at {handle.placement}" if handle is not None and handle.placement != "concat" else ""
    scaled = "" if handle is None else f", skips scaled by {handle.scaling}{place}"
    return f"{type(model).__name__}, {size:,} parameters in training{scaled}."
