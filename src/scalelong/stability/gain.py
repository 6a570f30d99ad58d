"""How much a map enlarges small changes: its Jacobian as a pair of products, and its largest singular value.

Both products come from one graph, so any part of a network will do: J^T u is a backward pass, J v the derivative of
J^T u by u, in which it is linear. Samples of a batch are taken as independent, and each has its own gain.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Jacobian:
    """∂output/∂inputs at the point where the graph was made, [B, …] each."""

    def __init__(self, output: Tensor, inputs: Tensor) -> None:
        self.output = output
        self.inputs = inputs
        self._u = torch.zeros_like(output, requires_grad=True)
        (self._pulled,) = torch.autograd.grad(output, inputs, self._u, create_graph=True, materialize_grads=True)

    def push(self, v: Tensor) -> Tensor:
        """J v, in the output's shape."""
        (pushed,) = torch.autograd.grad(self._pulled, self._u, v, retain_graph=True, materialize_grads=True)
        return pushed

    def pull(self, u: Tensor) -> Tensor:
        """J^T u, in the input's shape."""
        (pulled,) = torch.autograd.grad(self.output, self.inputs, u, retain_graph=True, materialize_grads=True)
        return pulled

    def largest_gain(self, iterations: int = 30, seed: int = 0) -> Tensor:
        """‖J‖₂ of each sample, [B], by power iteration on J^T J; from below."""
        v = unit(_normal_like(self.inputs, seed))
        for _ in range(iterations):
            v = unit(self.pull(self.push(v)))
        return norms(self.push(v))

    def typical_gain(self, directions: int = 4, seed: int = 0) -> Tensor:
        """√E‖J v‖²/‖v‖² over random directions v, [B]."""
        squares = [norms(self.push(unit(_normal_like(self.inputs, seed + i)))) ** 2 for i in range(directions)]
        return torch.stack(squares).mean(0).sqrt()


def norms(x: Tensor) -> Tensor:
    """‖·‖ of each sample, [B, …] -> [B], in float64: a deep net's gain has squares beyond float32."""
    return x.flatten(1).norm(dim=1, dtype=torch.float64)


def unit(x: Tensor) -> Tensor:
    """Each sample over its norm; a zero stays one."""
    size = norms(x).clamp(min=torch.finfo(x.dtype).tiny).view(-1, *[1] * (x.dim() - 1))
    return (x / size).to(x.dtype)


def _normal_like(x: Tensor, seed: int) -> Tensor:
    """Normal numbers that do not depend on the device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device)
