"""One model over many processes, each with a part of every weight: torch's FSDP2 (`train.parallel=fsdp`).

The parts are DTensors. Gradients, Adam's moments and the averages are made from them, so they are parts too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from scalelong.config import TrainConfig
from scalelong.world import World


def is_sharded(config: TrainConfig, world: World) -> bool:
    """Whether a run's weights are shared out; one process holds them all."""
    return config.parallel == "fsdp" and world.size > 1


def shard(model: nn.Module, device: torch.device, compute: torch.dtype | None) -> None:
    """Share out the weights in place: each block is gathered when it runs, what stands outside blocks at the start.

    `compute` is autocast's precision, where it is on. What multiplies matrices in a block is then gathered in it:
    the rounding that autocast would do, and half the traffic. Norms, single numbers and inputs stay in float32, as
    autocast leaves them.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    reduced = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in blocks(model):
        if compute is not None and (vectors := list(_vector_modules(block))):
            # Gathered from forward to backward: they are small, and a learned scale returns its number itself.
            fully_shard(vectors, mesh=mesh, reshard_after_forward=False)
        fully_shard(block, mesh=mesh, reshard_after_forward=True, mp_policy=reduced)
    # Left to itself, torch would keep these whole after a forward pass without a backward one.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)


def _vector_modules(block: nn.Module) -> Iterator[nn.Module]:
    """Those whose own weights are all vectors: norms, and scales that are single numbers."""
    for module in block.modules():
        own = list(module.parameters(recurse=False))
        if own and all(p.ndim == 1 for p in own):
            yield module


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """What is gathered at once: the members of a network's lists of blocks, and its middle block."""
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList):
            yield from child
        elif name == "mid_block":
            yield child


def allow_a_graph_per_block(model: nn.Module) -> None:
    """Compiled, a sharded model is a graph per block, and blocks with constants of their own (cs) share none.

    torch would leave what is beyond eight uncompiled.
    """
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, 8 + len(list(blocks(model))))


def let_go(model: nn.Module) -> None:
    """Free what a forward pass without a backward one left gathered: the parameters are the parts again."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()  # type: ignore[operator]


def part(tensor: Tensor) -> Tensor:
    """This process' part of a tensor, in place; the tensor itself where it is not shared out."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor; all processes ask together."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def fill(target: Tensor, value: Tensor) -> None:
    """Copy a whole tensor into one that may be this process' part."""
    if hasattr(target, "to_local"):
        from torch.distributed.tensor import distribute_tensor

        value = value.to(target.device)
        target.copy_(distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None))  # type: ignore[attr-defined]
    else:
        target.copy_(value)


@torch.no_grad()
def gather_into(model: nn.Module | None, weights: Mapping[str, Tensor]) -> None:
    """Give a plain model the whole weights, one by one. All call it: those without a model lend their parts."""
    targets = dict(model.named_parameters()) if model is not None else {}
    for name, weight in weights.items():
        full = whole(weight)
        if name in targets:
            targets[name].copy_(full)
