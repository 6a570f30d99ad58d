"""Where a run's numbers go besides metrics.jsonl: TensorBoard, and Weights & Biases on request."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from scalelong.data.files import write_whole

LOGGERS = ("tensorboard", "wandb", "none")
WANDB_ID = "wandb_id"


class Tracker(Protocol):
    """Takes numbers by name, and is told at the end whether the run failed."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The numbers of one step; a step may come in several calls."""
        ...

    def close(self, failed: bool) -> None:
        """Let the files go."""
        ...


def check_logger(logger: str) -> None:
    """Refuse an unknown logger, or one whose package is missing, before anything is written."""
    if logger not in LOGGERS:
        raise ValueError(f"the logger is one of {', '.join(LOGGERS)}, got {logger!r}.")
    if logger == "wandb":
        try:
            import wandb  # noqa: F401
        except ImportError as error:
            raise ValueError("--logger wandb needs the package wandb: pip install wandb") from error


def trackers(logger: str, folder: Path, resumed_at: int, config: Mapping[str, Any]) -> list[Tracker]:
    """`tensorboard`: TensorBoard alone; `wandb`: both; `none`: neither."""
    check_logger(logger)
    found: list[Tracker] = []
    if logger == "wandb":
        found.append(WandbTracker(folder, config))
    if logger != "none":
        found.append(TensorBoardTracker(folder, resumed_at))
    return found


class TensorBoardTracker:
    """Event files under the run's folder; after a resume, what lies beyond the checkpoint is hidden."""

    def __init__(self, folder: Path, resumed_at: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
        from torch.utils.tensorboard import SummaryWriter

        self._summary = Summary
        self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=resumed_at + 1 if resumed_at else None)
        self.events: Any = self.board.file_writer

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """All in one event: a hundred of them would fill the writer's queue, and the training wait for it."""
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self.events.add_summary(self._summary(value=scalars), step)

    def close(self, failed: bool) -> None:
        """Flush and close."""
        self.board.close()


class WandbTracker:
    """A W&B run whose id lies in the run's folder, so that a resumed run goes on with it.

    Names are drawn over our own `step`: W&B's counter takes no step twice, and a resumed run repeats the
    steps after its checkpoint. WANDB_PROJECT, WANDB_ENTITY and WANDB_MODE work as everywhere.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        try:
            self.run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "scalelong"),
                name=folder.name,
                id=_kept_id(folder),
                resume="allow",
                dir=str(folder),
                config=dict(config),
                allow_val_change=True,  # train.steps may grow from one call to the next
            )
        except wandb.Error as error:
            raise ValueError(
                f"wandb could not start ({error}); run `wandb login`, or set WANDB_MODE=offline to sync later."
            ) from error
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One row."""
        self.run.log({"step": step, **values})

    def close(self, failed: bool) -> None:
        """Upload what is left; a run that failed is shown as failed."""
        self.run.finish(exit_code=int(failed))


def _kept_id(folder: Path) -> str:
    """Written before W&B hears of the run: a kill in between leaves an id without a run, never two runs."""
    file = folder / WANDB_ID
    if not file.is_file():
        write_whole(file, secrets.token_hex(8))
    return file.read_text().strip()
