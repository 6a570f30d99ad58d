"""Our attention kernels launched in other ways, and torch's, side by side: `python -m benchmarks.kernels`.

Each is first compared with softmax(q kᵀ/√d) v in float32; one that is wrong, or does not fit the GPU, is left out
and named. The best goes into `FORWARD`, `BACKWARD_QUERIES` and `BACKWARD_KEYS` of
scalelong/kernels/attention_op.py.
"""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import torch.nn.functional as F
import typer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.measure import hardware, time_steps
from benchmarks.profile import PROFILES
from scalelong.kernels import attention_op as ours

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "plain": SDPBackend.MATH,
}
TOLERANCE = 0.02  # of half precision
Attend = Callable[[Tensor], Tensor]


def main(
    batch: Annotated[int, typer.Option(help="Images.")] = 128,
    tokens: Annotated[int, typer.Option(help="64, 128 or 256, and one or two more.")] = 257,
    heads: Annotated[int, typer.Option(help="Heads.")] = 8,
    dim: Annotated[int, typer.Option(help="32 or 64 numbers a head.")] = 64,
    rounds: Annotated[int, typer.Option(help="How often each has its turn.")] = 7,
    only: Annotated[str, typer.Option(help="A part of the names of those that race ours; by default all.")] = "",
    out: Annotated[Path, typer.Option(help="Where the result file goes.")] = PROFILES,
) -> None:
    """Time attention forward, and forward with backward, print a table and write a dated result file."""
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    torch.manual_seed(0)
    qkv = torch.randn(batch, tokens, 3 * heads * dim, device=device, dtype=dtype)
    grad = torch.randn(batch, tokens, heads * dim, device=device, dtype=dtype)
    want = _gradient(partial(_by_torch, heads), qkv.float(), grad.float())
    ready = []
    for contender in contenders(heads, tokens, on_gpu=device == "cuda"):
        name = contender.name
        if only not in name and name != "ours":
            continue
        try:
            with contender.launched():
                error = _difference(_gradient(contender.attend, qkv, grad), want)
        except Exception as refused:  # whatever a backend or the compiler says
            typer.echo(f"{name}: left out ({type(refused).__name__}: {str(refused).splitlines()[0]})")
            continue
        if error <= TOLERANCE:
            ready.append(contender)
        else:
            typer.echo(f"{name}: left out (wrong by {error:.3f})")
    rows = race(ready, qkv, grad, rounds)
    for row in rows:
        typer.echo(f"{row['name']:40} forward {row['forward_ms']:.4f} ms, backward {row['backward_ms']:.4f} ms")
    about = {"shape": [batch, tokens, heads, dim], "hardware": hardware(), "torch": torch.__version__}
    out.mkdir(parents=True, exist_ok=True)
    shape = f"{batch}x{tokens}-{heads}x{dim}"
    file = out / f"{date.today().isoformat()}-attention-{shape}.json"
    file.write_text(json.dumps([row | about for row in rows], indent=1) + "\n")
    typer.echo(f"written: {file}")


@dataclass(frozen=True)
class Contender:
    """Attention over packed [B, N, 3·D], and how our kernels are launched for it, where it is not as usual."""

    name: str
    attend: Attend
    launch: Mapping[str, dict[str, int]] = field(default_factory=dict)

    def launched(self) -> Any:
        """For as long as the block lasts."""
        return mock.patch.multiple(ours, **self.launch) if self.launch else contextlib.nullcontext()


def contenders(heads: int, tokens: int, *, on_gpu: bool) -> Iterator[Contender]:
    """torch's, and where it can run our kernels as they are launched and in other ways, one changed at a time."""
    for name, backend in BACKENDS.items():
        yield Contender(f"torch, {name}", partial(_by_torch, heads, backend=backend))
    if not on_gpu:
        return

    def attend(qkv: Tensor) -> Tensor:
        return ours.attend(qkv, heads)[0]

    yield Contender("ours", attend)
    blocks = [block for block in (32, 64, 128) if block <= tokens]
    for queries, stages, warps in product(blocks, (1, 2, 3), (4, 8)):
        launch = {"BQ": queries, "STAGES": stages, "num_warps": warps}
        yield Contender(f"ours, forward {queries}/{stages}/{warps}", attend, {"FORWARD": launch})
    for queries, keys, stages, warps in product(blocks, blocks, (1, 2, 3), (4, 8)):
        launch = {"BQ": queries, "BK": keys, "STAGES": stages, "num_warps": warps}
        for kernel in ("BACKWARD_QUERIES", "BACKWARD_KEYS"):
            name = f"ours, {kernel.lower().replace('_', ' ')} {queries}/{keys}/{stages}/{warps}"
            yield Contender(name, attend, {kernel: launch})


def race(ready: list[Contender], qkv: Tensor, grad: Tensor, rounds: int) -> list[dict[str, Any]]:
    """Forward passes, and both passes, in turns; the backward one is the difference of their medians."""
    forward: list[list[float]] = [[] for _ in ready]
    both: list[list[float]] = [[] for _ in ready]
    for _ in range(rounds):
        for contender, alone, together in zip(ready, forward, both, strict=True):
            with contender.launched():
                with torch.no_grad():
                    alone.append(time_steps(partial(contender.attend, qkv), 10))
                together.append(time_steps(partial(_gradient, contender.attend, qkv, grad), 10))
    rows = []
    for contender, alone, together in zip(ready, forward, both, strict=True):
        first, whole = statistics.median(alone), statistics.median(together)
        rows.append({"name": contender.name, "forward_ms": round(first, 5), "backward_ms": round(whole - first, 5)})
    return sorted(rows, key=lambda row: row["forward_ms"] + row["backward_ms"])


def _by_torch(heads: int, qkv: Tensor, backend: SDPBackend = SDPBackend.MATH) -> Tensor:
    q, k, v = qkv.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def _gradient(attend: Attend, qkv: Tensor, grad: Tensor) -> Tensor:
    qkv = qkv.detach().requires_grad_()
    attend(qkv).backward(grad)
    assert qkv.grad is not None
    return qkv.grad


def _difference(found: Tensor, want: Tensor) -> float:
    """Of the token where it is largest: one that is wrong by itself hardly shows in all."""
    return float(((found.float() - want).norm(dim=(0, 2)) / want.norm(dim=(0, 2))).max())


if __name__ == "__main__":
    typer.run(main)
