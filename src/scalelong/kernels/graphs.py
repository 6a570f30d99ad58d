"""Work recorded once and replayed as one CUDA graph."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

_TRIALS = 2  # the first compiles and allocates, the second runs as all that follow


def warm_up(bodies: Iterable[Callable[[], Any]]) -> None:
    """Run what is to be captured, on the stream where it is captured then."""
    side = _side_stream(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for body in bodies:
            for _ in range(_TRIALS):
                body()
    torch.cuda.current_stream().wait_stream(side)


def captured(body: Callable[[], Any], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Record a body that was warmed up, and what it returned: tensors that each replay fills anew.

    Graphs with one `pool` share their memory, as they never run at the same time.
    """
    graph = torch.cuda.CUDAGraph()
    side = _side_stream(torch.cuda.current_device())
    with _no_collection(), torch.cuda.graph(graph, pool=pool, stream=side):
        result = body()
    return graph, result


@functools.cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """One for all that a process warms up and captures: cuBLAS keeps 65 MiB for each stream it was called on."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """To collect a dead graph while another is captured would break the capture."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
