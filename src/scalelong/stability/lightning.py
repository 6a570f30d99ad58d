"""The monitor as a callback of Lightning, under either of its names (`lightning`, `pytorch_lightning`)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from scalelong.stability.monitor import StabilityMonitor


def callback_for(monitor: StabilityMonitor) -> Any:
    """A callback that hands each step to the monitor: its loss, when gradients are unscaled and not yet clipped."""
    base = _callback_class()

    class MonitorCallback(base):  # type: ignore[misc, valid-type]
        """Of one training; the monitor closes with it."""

        def __init__(self) -> None:
            super().__init__()
            self.loss: Any = None

        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
            """Lightning divides the loss by the pieces of an accumulated batch, and in fp16 multiplies it for the
            sake of its gradients; here it is as it was."""
            monitor.scaler = monitor.scaler or _scaler_of(trainer)
            self.loss = _unscaled(loss.detach(), _scaler_of(trainer)) * trainer.accumulate_grad_batches

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            """Gradients are there."""
            monitor.step(self.loss)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            """Done."""
            monitor.close()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            """Ctrl-C, or an error: what was seen is kept."""
            monitor.__exit__(type(exception), exception, None)

        def state_dict(self) -> dict[str, Any]:
            """Into Lightning's checkpoints."""
            return monitor.state_dict()

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            """Out of them."""
            monitor.load_state_dict(state_dict)

    return MonitorCallback()


def _scaler_of(trainer: Any) -> Any:
    """The GradScaler of a training in fp16; else None."""
    plugin = getattr(trainer, "precision_plugin", None)
    return getattr(plugin, "scaler", None)


def _unscaled(loss: Tensor, scaler: Any) -> Tensor:
    # Its scale as a tensor on the device: get_scale() would wait for a GPU.
    return loss if scaler is None else loss / scaler.scale(torch.ones((), device=loss.device))


def _callback_class() -> type:
    for package in ("lightning.pytorch", "pytorch_lightning"):
        try:
            found: type = importlib.import_module(package).Callback
            return found
        except ImportError:
            continue
    raise ValueError("lightning_callback() needs Lightning: pip install lightning")
