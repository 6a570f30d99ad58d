import pickle

import pytest
import torch
from torch import nn

from scalelong.training.guard import NonFiniteError, find_culprit
from tests.contracts.zoo import CASES


class Spoil(torch.autograd.Function):
    """The identity forwards, NaN backwards."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * float("nan")


def loss_of(model, case):
    return lambda: case.call(model).square().mean()


@pytest.mark.parametrize("name", ["in_blocks.1.mlp.fc1", "mid_block.attn.proj", "out_blocks.0.norm2"])
def test_a_planted_nan_is_traced_to_its_module(name):
    case = CASES["uvit"]
    model = case.model()
    with torch.no_grad():
        model.get_submodule(name).weight.view(-1)[3] = float("nan")
    assert find_culprit(model, loss_of(model, case)) == f"the first module with a non-finite output is {name}"


def test_a_nan_in_the_backward_pass_is_traced_too():
    case = CASES["uvit"]
    model = case.model()
    fc2 = model.out_blocks[1].mlp.fc2
    plain = fc2.forward
    fc2.forward = lambda x: plain(Spoil.apply(x))
    culprit = find_culprit(model, loss_of(model, case))
    assert culprit == "the first module with a non-finite gradient is out_blocks.1.mlp.fc2"
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._backward_hooks for m in model.modules())


def test_a_bad_target_is_not_blamed_on_a_module():
    model = nn.Linear(2, 1)
    culprit = find_culprit(model, lambda: (model(torch.ones(1, 2)) - float("inf")).square().mean())
    assert "target or the loss itself" in culprit


def test_what_does_not_happen_again_is_said_so():
    model = nn.Linear(2, 1)
    assert "did not happen again" in find_culprit(model, lambda: model(torch.ones(1, 2)).mean())


def test_the_error_arrives_whole_from_another_process():
    error = pickle.loads(pickle.dumps(NonFiniteError(7, "loss", "the first module is x")))
    assert (error.step, error.culprit) == (7, "the first module is x")
    assert "step 7: the loss is not finite; the first module is x" in str(error)
