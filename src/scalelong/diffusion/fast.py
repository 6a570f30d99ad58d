"""A network for long sampling on a GPU: bf16, compiled, and replayed as one captured graph."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.kernels.compiling import compiled
from scalelong.kernels.graphs import captured, warm_up


class FastNetwork(nn.Module):
    """Called as the network itself. The first call decides the batch; smaller ones are padded to it.

    Building it takes half a minute, so it pays from some ten thousand images on.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.compiled = compiled(network)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: dict[str, Tensor] = {}
        self.output = torch.empty(0)

    @property
    def config(self) -> Any:
        """The network's."""
        return self.network.config

    @torch.no_grad()
    def forward(self, sample: Tensor, timestep: Tensor, **told: Tensor) -> SimpleNamespace:
        """Predict from [B, C, H, W] at one timestep, or at [B] of them; `told` as the network takes it."""
        count = len(sample)
        given = {"sample": sample, "timestep": timestep.float().expand(count), **told}
        if self.graph is None or count > len(self.inputs["sample"]):
            self.inputs = {name: value.clone() for name, value in given.items()}
            warm_up([self._predict])
            self.graph, self.output = captured(self._predict)
        for name, value in given.items():
            self.inputs[name][:count].copy_(value)
        assert self.graph is not None
        self.graph.replay()
        return SimpleNamespace(sample=self.output[:count].to(torch.float32, copy=True))  # the next replay fills it

    def _predict(self) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            prediction: Tensor = self.compiled(**self.inputs, return_dict=False)[0]
        return prediction
