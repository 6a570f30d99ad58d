"""The net of Eq. 3 against the equation written out, and its norms against their expectation."""

import torch

from scalelong.stability.toy_net import Block, LongSkipNet


def test_it_is_equation_3():
    net = LongSkipNet(3, width=8, seed=1, dtype=torch.float64)
    kappas = (0.9, 0.5, 0.2)
    x = torch.randn(2, 8, dtype=torch.float64)

    def f(i, x):
        if i == 3:
            return net.middle(x)
        encoded = net.encoder[i](x)
        return net.decoder[i](kappas[i] * encoded + f(i + 1, encoded))

    torch.testing.assert_close(net(x, kappas), f(0, x))
    encoded = net.encoder[0](x)
    torch.testing.assert_close(net.hidden(x, kappas)[1], f(1, encoded))


def test_a_block_multiplies_the_mean_square_by_its_gain():
    torch.manual_seed(0)
    x, generator = torch.randn(1, 64), torch.Generator().manual_seed(0)
    for gain in (1.0, 1.5, 2.0):
        blocks = [Block(64, 3, gain, generator, torch.float32) for _ in range(150)]
        squares = torch.stack([(block(x) ** 2).mean() for block in blocks])
        assert abs(squares.mean() / (x**2).mean() / gain - 1) < 0.2


def test_norms_add_up_over_the_skips_as_the_expectation_says():
    """E‖h_0‖² = ‖x‖² (Σ κ_j² g^(2j) + g^(2N+1)), j counting from 1."""
    torch.manual_seed(0)
    x, kappas = torch.randn(1, 64), (1.0, 0.7, 0.4)
    for gain in (1.0, 2.0):
        nets = [LongSkipNet(3, width=64, block_gain=gain, seed=s) for s in range(150)]
        found = torch.stack([(net(x, kappas) ** 2).sum() for net in nets]).mean() / (x**2).sum()
        wanted = sum(k**2 * gain ** (2 * j) for j, k in enumerate(kappas, 1)) + gain**7
        assert abs(found / wanted - 1) < 0.25


def test_seeds_decide_the_weights():
    x = torch.randn(1, 16)
    first, again, other = (LongSkipNet(2, width=16, seed=s)(x, (1, 1)) for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
