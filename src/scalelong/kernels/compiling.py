"""`torch.compile` as it is used here: a graph for each shape, in a process that may compile again hours later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled for the shapes it is called with, and not for any batch size once a second one has come by."""
    _keep_compilers_awake()
    return torch.compile(function, dynamic=False)


def _keep_compilers_awake() -> None:
    """Compilers that torch puts to sleep after a minute without work may never answer again.

    A training compiles first for its steps and later for its first judgement: with torch 2.11 such a run stood
    still for good, waiting for a kernel (docs/experiment_log.md; others see it too: pytorch/pytorch#183884). It
    takes effect for compilers not yet started.
    """
    import torch._inductor.config as inductor

    if hasattr(inductor, "quiesce_async_compile_pool"):  # not in older ones
        inductor.quiesce_async_compile_pool = False
