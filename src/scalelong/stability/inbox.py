"""Numbers on their way from the device to the host: sent without waiting, read when they have arrived."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Inbox:
    """Keeps the order of steps. On a CPU everything has arrived at once; on a GPU a step or two later."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[int, Tensor, Any, torch.cuda.Event | None]] = deque()

    def send(self, step: int, values: Tensor, note: Any) -> None:
        """Start the copy of a step's values; the note goes with them."""
        if not values.is_cuda:
            self._under_way.append((step, values, note, None))
            return
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(values.device))
        self._under_way.append((step, host, note, arrived))

    def arrived(self, *, wait: bool = False) -> Iterator[tuple[int, NDArray[np.float32], Any]]:
        """What is here, oldest first; with `wait` all that was sent."""
        while self._under_way:
            step, host, note, event = self._under_way[0]
            if event is not None and wait:
                event.synchronize()
            if event is not None and not event.query():
                return
            self._under_way.popleft()
            yield step, host.numpy(), note
