"""A folded model is a plain one: other people's code runs it without scalelong."""

import subprocess
import sys

import pytest
import torch

import scalelong
from tests.contracts.zoo import CASES


def test_uvit_columns_are_multiplied():
    plain, folded = CASES["uvit"].make(), CASES["uvit"].make()
    folded.load_state_dict(plain.state_dict())
    scalelong.apply(folded, "cs:0.5").fold()
    for block, factor in ((2, 1.0), (1, 0.5), (0, 0.25)):
        key = f"out_blocks.{block}.skip_linear.weight"
        before, after = plain.state_dict()[key], folded.state_dict()[key]
        assert torch.equal(after[:, 64:], before[:, 64:] * factor)
        assert torch.equal(after[:, :64], before[:, :64])


@pytest.mark.slow  # tests/test_export.py draws from such a UNet in a process of its own
def test_a_folded_unet_runs_in_a_process_without_scalelong(tmp_path):
    case = CASES["unet2d"]
    model = case.model(torch.float64)
    with pytest.warns(UserWarning, match="look trained"):
        handle = scalelong.apply(model, "cs:0.6", placement="norm")
    want = case.call(model, torch.float64)
    handle.fold().save_pretrained(tmp_path / "unet")
    torch.save((case.cast(torch.float64), want), tmp_path / "io.pt")
    code = """
import sys, torch, warnings
sys.modules["scalelong"] = None
from diffusers import UNet2DModel
folder, how = sys.argv[1], dict(output_loading_info=True, torch_dtype=torch.float64)
model, unused = UNet2DModel.from_pretrained(folder + "/unet", **how)
assert not any(unused[k] for k in ("missing_keys", "unexpected_keys")), unused
inputs, want = torch.load(folder + "/io.pt")
with torch.no_grad():
    got = model.eval()(**inputs).sample
print(((got - want).norm() / want.norm()).item())
"""
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert float(run.stdout) < 1e-12


def test_folding_says_why_it_refuses():
    with pytest.raises(ValueError, match="depend on the input, as a gate's do.*scalelong.load"):
        scalelong.apply(CASES["uvit"].make(), "ls").fold()
    with pytest.raises(ValueError, match="normalisation stands between.*placement='norm'"):
        scalelong.apply(CASES["unet2d"].make(), "cs:0.7").fold()


def test_cs_equals_a_scaled_half_under_adamw():
    """PAPER §1: CS is the same as that half's init and learning rate times κ and its decay over κ."""
    from torch.optim import AdamW

    torch.manual_seed(0)
    kappa, lr, decay = 0.3, 1e-3, 0.03
    scaled = torch.randn(8, 8, dtype=torch.float64).requires_grad_()
    plain = (scaled.detach() * kappa).requires_grad_()
    ours = AdamW([scaled], lr=lr, weight_decay=decay, eps=1e-30)
    theirs = AdamW([plain], lr=lr * kappa, weight_decay=decay / kappa, eps=1e-30)
    for _ in range(50):
        skip, target = torch.randn(16, 8, dtype=torch.float64), torch.randn(16, 8, dtype=torch.float64)
        for weight, factor, optimiser in ((scaled, kappa, ours), (plain, 1.0, theirs)):
            optimiser.zero_grad()
            (skip @ (weight * factor).T - target).square().mean().backward()
            optimiser.step()
    torch.testing.assert_close(scaled * kappa, plain, rtol=1e-9, atol=1e-12)
