"""Tensors that are shared out over processes, on disk: a folder with a safetensors file from each of them.

torch.distributed.checkpoint writes and reads them; each file says where in the whole tensors its parts belong, so
that any number of processes reads them again, or one without a process group.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def check_available() -> None:
    """Refuse a torch whose checkpoints cannot be written in parts as safetensors."""
    try:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

        known = inspect.signature(HuggingFaceStorageWriter).parameters
    except ImportError:
        known = {}  # type: ignore[assignment]
    if "save_distributed" not in known:
        raise ValueError(
            f"train.parallel=fsdp needs a torch that writes sharded safetensors, got torch {torch.__version__}; "
            "install a newer one, or use train.parallel=ddp."
        )


def write_parts(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write each process' parts to a file of its own. All call it; an error of one is raised in all."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    save({name: tensor.detach() for name, tensor in tensors.items()}, storage_writer=writer)


def files_of(folder: Path, rank: int) -> list[Path]:
    """What one process wrote."""
    return sorted(folder.glob(f"shard-{rank + 1:05d}-*"))


def read_parts(folder: Path, targets: Mapping[str, Tensor]) -> None:
    """Fill whole tensors, or this process' parts of them, by name. Each process reads for itself what it needs."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(dict(targets), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)


def empty_wholes(folder: Path) -> dict[str, Tensor]:
    """Tensors of the whole shapes that the parts make together, not yet filled."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    found: dict[str, Any] = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in found.items()}
