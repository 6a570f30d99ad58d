"""Shapes that a UNet's config tells or does not tell."""

import pytest
import torch

import scalelong
from tests.contracts.zoo import CASES


def shapes(**changes):
    from diffusers import UNet2DModel

    config = dict(CASES["unet2d"].model().config) | changes
    return [skip.shape_text for skip in scalelong.find_skips(UNet2DModel.from_config(config))]


def test_sizes_follow_the_config_where_they_can_be_known():
    assert shapes() == ["32×8×8", "32×8×8", "32×4×4", "48×4×4"]
    assert shapes(sample_size=(8, 16)) == ["32×8×16", "32×8×16", "32×4×8", "48×4×8"]
    assert shapes(sample_size=9) == ["32×9×9", "32×9×9", "32×?×?", "48×?×?"]
    assert shapes(sample_size=None) == ["32×?×?", "32×?×?", "32×?×?", "48×?×?"]


def test_without_a_middle_block():
    from diffusers import UNet2DModel

    config = dict(CASES["unet2d"].model().config) | {"mid_block_type": None}
    model = UNet2DModel.from_config(config)
    scalelong.apply(model, "cs:0.5")
    assert CASES["unet2d"].call(model).isfinite().all()


@pytest.mark.parametrize("placement", ["concat", "norm"])
def test_odd_latents_and_channels_last(placement):
    model = CASES["sd15"].make().to(memory_format=torch.channels_last)
    scalelong.apply(model, "ls", placement=placement)
    out = model(torch.randn(1, 4, 9, 11), 3, torch.randn(1, 7, 24)).sample
    assert out.shape == (1, 4, 9, 11)
    out.square().mean().backward()
    assert all(p.grad is not None for p in scalelong.scaling_of(model).parameters())
