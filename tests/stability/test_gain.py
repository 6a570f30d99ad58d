"""Power iteration against the singular values, in float64; products against the matrix."""

import torch
from torch import nn

from scalelong.stability.gain import Jacobian


def graph(seed=0, batch=3, dtype=torch.float64):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5)).to(dtype)
    x = torch.randn(batch, 7, dtype=dtype, requires_grad=True)
    first, _, last = net  # d tanh = 1 - tanh²
    slopes = 1 - first(x).tanh().detach() ** 2
    matrices = last.weight.detach() @ (slopes[:, :, None] * first.weight.detach())
    return Jacobian(net(x), x), matrices


def test_the_products_are_those_of_the_matrix():
    jacobian, matrices = graph()
    v, u = torch.randn(3, 7, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    torch.testing.assert_close(jacobian.push(v), torch.einsum("boi,bi->bo", matrices, v))
    torch.testing.assert_close(jacobian.pull(u), torch.einsum("boi,bo->bi", matrices, u))


def test_the_largest_gain_of_each_sample_is_its_largest_singular_value():
    jacobian, matrices = graph()
    torch.testing.assert_close(jacobian.largest_gain(300), torch.linalg.matrix_norm(matrices, 2))
    few = jacobian.largest_gain(2)
    assert (few <= torch.linalg.matrix_norm(matrices, 2) + 1e-12).all()  # from below


def test_the_typical_gain_is_the_frobenius_norm_over_the_width():
    jacobian, matrices = graph()
    wanted = torch.linalg.matrix_norm(matrices) / 7**0.5
    torch.testing.assert_close(jacobian.typical_gain(800), wanted, rtol=0.1, atol=0)


def test_inputs_that_do_not_matter_have_no_gain():
    x = torch.ones(2, 3, requires_grad=True)
    assert (Jacobian(torch.ones(2, 4, requires_grad=True) * 2 + 0 * x.sum(), x).largest_gain(3) == 0).all()


def test_a_gain_whose_square_leaves_float32_is_found():
    x = torch.ones(2, 3, requires_grad=True)
    jacobian = Jacobian(x * 1e15, x)
    torch.testing.assert_close(jacobian.largest_gain(3).float(), torch.full((2,), 1e15))
    torch.testing.assert_close(jacobian.typical_gain().float(), torch.full((2,), 1e15))
