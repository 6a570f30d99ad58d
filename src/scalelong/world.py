"""The processes that train one model together: those of torchrun or accelerate launch, or this one alone."""

from __future__ import annotations

import contextlib
import gc
import os
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_PATIENCE = timedelta(hours=2)  # how long the others wait while the first draws and judges samples


class World:
    """One of `size` processes, and what they say to each other. Each takes an equal part of every batch."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    @property
    def is_first(self) -> bool:
        """The first one writes, logs and draws."""
        return self.rank == 0

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean over all processes, on each of them."""
        return self.sum(tensor) / self.size

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, on each of them."""
        if self.size == 1:
            return tensor
        total = tensor.detach().clone()
        dist.all_reduce(total)
        return total

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether the flag is up in any process."""
        return bool(flag) if self.size == 1 else bool(self.sum(torch.tensor(float(flag), device=device)) > 0)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Each process' tensor, in their order, on each of them; their first sizes may differ."""
        if self.size == 1:
            return [tensor]
        sizes = [torch.zeros((), dtype=torch.int64, device=tensor.device) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor(len(tensor), device=tensor.device))
        longest = max(int(size) for size in sizes)
        padded = torch.cat([tensor, tensor.new_zeros((longest - len(tensor), *tensor.shape[1:]))])
        found = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(found, padded)
        return [part[: int(size)] for part, size in zip(found, sizes, strict=True)]

    def gather_objects(self, thing: Any) -> list[Any]:
        """Each process' names, numbers and the like, in their order, on each of them."""
        if self.size == 1:
            return [thing]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, thing)
        return found

    def share(self, total: int) -> range:
        """This process' numbers among 0 … total - 1: equal parts one after the other, but for a remainder."""
        first, last = (total * i // self.size for i in (self.rank, self.rank + 1))
        return range(first, last)

    def wait(self) -> None:
        """Until all are here."""
        if self.size > 1:
            dist.barrier()

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model as it is called in training: its gradients are averaged over the processes."""
        if self.size == 1:
            return model
        on_gpu = next(model.parameters()).is_cuda
        return nn.parallel.DistributedDataParallel(
            model, device_ids=[torch.cuda.current_device()] if on_gpu else None, gradient_as_bucket_view=True
        )

    def part(self, batch: int, accumulate: int) -> int:
        """How many images of a batch one process takes."""
        if batch % (self.size * accumulate):
            raise ValueError(
                f"train.batch_size is a multiple of the processes times train.accumulate, "
                f"{self.size} × {accumulate}; got {batch}."
            )
        return batch // self.size


def rank_and_size() -> tuple[int, int]:
    """This process' number and how many there are, as torchrun and accelerate launch tell it."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def local_device(kind: str) -> str:
    """The GPU that belongs to this process, where there are several processes on a machine."""
    if kind == "cuda" and rank_and_size()[1] > 1:
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    return kind


@contextlib.contextmanager
def joined(device: str) -> Iterator[World]:
    """The world of this process, for as long as the block lasts."""
    rank, size = rank_and_size()
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)  # graphs, streams and kernels of our own go to the current one
    if size == 1:
        yield World()
        return
    how: dict[str, Any] = {"backend": "gloo"}
    if device.startswith("cuda"):
        how = {"backend": "nccl", "device_id": torch.device(device)}
    already = dist.is_initialized()
    if not already:
        dist.init_process_group(**how, timeout=_PATIENCE)
    yield World(rank, size)
    # A wrapped model lives on in a cycle, and where it is found after the group is gone, now and then aborts.
    gc.collect()
    # After an error the process just ends: taking leave would wait for the others, who wait for it.
    if not already:
        dist.destroy_process_group()


def usable_device(device: str | None) -> str:
    """The device asked for, if it is there; by default the GPU where there is one."""
    if device is None:
        return default_device()
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ValueError(f"the device is cpu, cuda or cuda:N, got {device!r}.")
    count = torch.cuda.device_count()
    if device != "cpu" and int(device.removeprefix("cuda").lstrip(":") or 0) >= count:
        raise ValueError(f"this machine has {count} GPUs that torch can use, got {device!r}; try cpu.")
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)
    return device


def default_device() -> str:
    """The GPU, where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"
