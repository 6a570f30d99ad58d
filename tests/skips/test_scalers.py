import copy
import math

import numpy as np
import pytest
import torch

from scalelong import SkipScales, parse_scaling
from scalelong.skips.scalers import IEGate, SEGate, build_scales
from scalelong.skips.sites import SkipShape


def test_ls_starts_as_the_papers_code_did():
    # Default init: gates near 0.4985 ± 0.034 at 257 tokens, whose averages over 512 numbers are near 0.
    torch.manual_seed(0)
    values = torch.cat([SEGate(257)(0.05 * torch.randn(8, 257)) for _ in range(40)])
    assert abs(values.mean().item() - 0.4985) < 0.01
    assert abs(values.std().item() - 0.034) < 0.006


def test_gate_sizes_are_the_papers():
    def count(spec, shapes):
        scales, shared = build_scales(parse_scaling(spec), shapes)
        modules = torch.nn.ModuleList([*scales, shared])
        return sum(p.numel() for p in modules.parameters())

    uvit = [SkipShape("tokens", 512, 257)] * 6
    assert count("ls", uvit) == 8_497
    assert count("ls-per-skip", uvit) == 50_982
    unet = [SkipShape("nchw", c) for c in (128, 128, 128, 128, 256, 256, 256, 256, 256, 256, 256, 256)]
    assert count("ls", unet) == 10_648
    assert count("ls-per-skip", unet) == 76_448
    assert count("scalar", unet) == 12
    assert count("ie", uvit) == 2 * 257
    assert count("cs:0.7", uvit) == 0


def test_ie_starts_at_sigmoid_of_minus_one_whatever_the_input():
    gate = IEGate(5)
    assert torch.allclose(gate(torch.randn(3, 5) * 100), torch.full((3, 5), 1 / (1 + math.e)))


@pytest.mark.parametrize("gate", [SEGate(32, identity_start=True), IEGate(32, identity_start=True)])
def test_identity_start_is_exactly_one(gate):
    assert torch.equal(gate(torch.randn(4, 32)), torch.ones(4, 32))
    gate.reset_parameters()
    assert torch.equal(gate(torch.randn(4, 32)), torch.ones(4, 32))


@pytest.mark.parametrize(("width", "ratio"), [(3, 16), (15, 16), (1, 4)])
def test_narrow_gates_keep_one_hidden_unit_and_warn(width, ratio):
    with pytest.warns(UserWarning, match=f"ratio {ratio} on a width of {width} would have no hidden unit"):
        gate = SEGate(width, ratio)
    assert gate.layer1.out_features == 1
    assert gate(torch.randn(2, width)).shape == (2, width)


def test_gates_pool_and_spread_on_their_axis():
    torch.manual_seed(0)
    tokens = torch.randn(2, 20, 32, dtype=torch.float64)
    pixels = torch.randn(2, 32, 4, 6, dtype=torch.float64)

    def coefficients(spec, shape, skip):
        scales, _ = build_scales(parse_scaling(spec), [shape], dtype=torch.float64)
        return scales[0](skip)

    assert coefficients("ls", SkipShape("tokens", 32, 20), tokens).shape == (2, 20, 1)
    assert coefficients("ls-channel", SkipShape("tokens", 32), tokens).shape == (2, 1, 32)
    assert coefficients("ls", SkipShape("nchw", 32), pixels).shape == (2, 32, 1, 1)
    # What is pooled away does not matter: shuffle it and the coefficient stays.
    for spec, shape, skip, dim in (
        ("ls", SkipShape("tokens", 32, 20), tokens, 2),
        ("ls-channel", SkipShape("tokens", 32), tokens, 1),
        ("ls", SkipShape("nchw", 32), pixels, 3),
    ):
        scales, _ = build_scales(parse_scaling(spec), [shape], dtype=torch.float64)
        torch.testing.assert_close(scales[0](skip.flip(dim)), scales[0](skip))


@pytest.mark.parametrize(("shape", "sizes"), [(("tokens", 32), (2, 20, 32)), (("nchw", 32), (2, 32, 4, 6))])
@pytest.mark.parametrize(("dtype", "grown"), [(torch.float64, 1e6), (torch.float32, 1e-2), (torch.float16, 1e3)])
def test_skip_norm_brings_every_skip_to_its_gain(shape, sizes, dtype, grown):
    """Whatever a skip grows to: the squares of float16 numbers of 1,000 would overflow."""
    scales = SkipScales("skip-norm:0.5", 1, layout=shape[0], dtype=dtype)
    skip = (grown * torch.randn(sizes, dtype=torch.float64)).to(dtype)
    scaled = scales(skip, 0).double()
    size = scaled.square().mean(-1 if shape[0] == "tokens" else (1, 2, 3)).sqrt()
    tolerance = {torch.float64: 1e-9, torch.float32: 2e-2, torch.float16: 2e-3}[dtype]  # 1e-6 counts beside 1e-4
    torch.testing.assert_close(size, torch.full_like(size, 0.5), rtol=tolerance, atol=0)
    assert scaled.sub(scaled.mean()).sign().eq(skip.double().sub(skip.double().mean()).sign()).float().mean() > 0.99
    assert not scales(torch.zeros(sizes, dtype=dtype), 0).any()


def test_a_token_gate_refuses_another_size_and_names_ls_channel():
    scales, _ = build_scales(parse_scaling("ls"), [SkipShape("tokens", 32, 20)])
    with pytest.raises(ValueError, match="built for 20 tokens, and this skip has 21.*ls-channel"):
        scales[0](torch.randn(1, 21, 32))


def test_gates_keep_the_skips_precision():
    scales, _ = build_scales(parse_scaling("ls"), [SkipShape("nchw", 32)])
    with torch.autocast("cpu", torch.bfloat16):
        assert scales[0](torch.randn(1, 32, 2, 2)).dtype == torch.float32


# SkipScales


def test_skip_scales_multiplies_by_the_schedule():
    scales = SkipScales("cs:0.5", num_skips=4)
    assert [scales(torch.ones(1), i).item() for i in range(4)] == [1, 0.5, 0.25, 0.125]
    assert not scales.state_dict()


def test_skip_scales_shares_one_gate_per_width_and_copies_deeply():
    scales = SkipScales("ls", num_skips=3, widths=np.array([32, 32, 64]))
    assert sorted({key.split(".")[1] for key in scales.state_dict()}) == ["32", "64"]
    skip = torch.randn(2, 32, 3, 3)
    twin = copy.deepcopy(scales)
    before = scales(skip, 0)
    with torch.no_grad():
        twin.shared["32"].layer2.bias.add_(5)
    assert torch.equal(scales(skip, 0), before)
    assert not torch.equal(twin(skip, 0), before)
    assert torch.equal(twin(skip, 0), twin(skip, 1))


def test_skip_scales_on_tokens():
    scales = SkipScales("ls", num_skips=2, layout="tokens", tokens=17)
    assert scales(torch.randn(2, 17, 8), 1).shape == (2, 17, 8)


def test_skip_scales_can_keep_a_trained_function():
    skip = torch.randn(2, 32, 3, 3)
    assert torch.equal(SkipScales("ls", 1, widths=32, keep_function=True)(skip, 0), skip)
    with pytest.raises(ValueError, match="coefficients that start at 1, and 'cs:0.5' has others"):
        SkipScales("cs:0.5", 2, keep_function=True)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: SkipScales("ls", 3), "give widths=, the skips' channels"),
        (lambda: SkipScales("ls", 3, widths=(1, 2)), r"one entry per skip \(3\), got 2"),
        (lambda: SkipScales("ls", 3, widths=(32, 0, 64)), r"whole numbers from 1 up, got \(32, 0, 64\)"),
        (lambda: SkipScales("ls", 3, widths=3.5), r"whole numbers from 1 up, got 3\.5"),
        (lambda: SkipScales("cs:0.7", 0), "whole number from 1 up, got 0"),
        (lambda: SkipScales("cs:0.7", 3, layout="nhwc"), "'nchw' or 'tokens', got 'nhwc'"),
        (lambda: SkipScales("ls", 3, widths=8, layout="tokens"), "give the token count, or use 'ls-channel'"),
    ],
)
def test_skip_scales_refuses(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_skip_scales_names_the_wrong_index():
    with pytest.raises(IndexError, match="skip index 3 is not in 0 … 2"):
        SkipScales("cs:0.7", 3)(torch.ones(1), 3)
