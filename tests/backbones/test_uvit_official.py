"""Published checkpoints, rebuilt here under their published names."""

import pytest
import torch

import scalelong
from scalelong import UViT

SMALL = dict(sample_size=16, patch_size=4, hidden_size=64, num_layers=6, num_attention_heads=4)


def published(gates=None, **changes):
    """(state dict with the published keys, the model that it belongs to). Gates go by `se`."""
    torch.manual_seed(0)
    model = UViT(**{**SMALL, **changes}, scaling={None: "none", "shared": "ls", "per-skip": "ls-per-skip"}[gates])
    state = {}
    for key, tensor in model.state_dict().items():
        parts = key.split(".")
        if "skip_scale" in parts:  # out_blocks.J.skip_scale.gate.layer1.weight; block 0 runs first: innermost
            key = f"se.{parts[1]}.{'.'.join(parts[4:])}"
        elif "skip_scaling" in parts:  # skip_scaling.gates.WIDTH.layer1.weight
            key = f"se.{'.'.join(parts[3:])}"
        state[key] = tensor.clone()
    return state, model.eval()


INPUTS = dict(sample=torch.randn(2, 3, 16, 16), timestep=torch.tensor([1.0, 900.0]))


@pytest.mark.parametrize("gates", [None, "shared", "per-skip"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_class_embeds": 7},
        {"mlp_time_embed": True, "final_conv": False},
        {"qkv_bias": True, "mlp_ratio": 2.0},
    ],
)
def test_everything_follows_from_the_shapes(gates, changes):
    state, model = published(gates, **changes)
    assert any(key.startswith("se.") for key in state) == (gates is not None)
    loaded = UViT.from_official(state, num_heads=4).eval()
    public = {key for key in model.config if not key.startswith("_")}
    assert {key: loaded.config[key] for key in public} == {key: model.config[key] for key in public}
    inputs = INPUTS | ({"class_labels": torch.tensor([0, 6])} if "num_class_embeds" in changes else {})
    assert torch.equal(loaded(**inputs).sample, model(**inputs).sample)


def test_per_skip_gate_0_is_the_innermost():
    state, _ = published("per-skip")
    state["se.0.layer2.bias"] = torch.full_like(state["se.0.layer2.bias"], -50.0)
    coefficients = scalelong.scaling_of(UViT.from_official(state, num_heads=4)).coefficients(**INPUTS)
    assert coefficients[2].max() < 1e-6
    assert min(c.min() for c in coefficients[:2]) > 0.1


def test_text_models():
    state, model = published(cross_attention_dim=24, text_len=77)
    text = torch.randn(2, 77, 24)
    loaded = UViT.from_official(state, num_heads=4)
    assert torch.equal(
        loaded(**INPUTS, encoder_hidden_states=text).sample, model(**INPUTS, encoder_hidden_states=text).sample
    )
    short, model = published(cross_attention_dim=24, text_len=9)
    with pytest.raises(ValueError, match="no square; give sample_size=.*text_len="):
        UViT.from_official(short, num_heads=4)
    assert UViT.from_official(short, num_heads=4, text_len=9).config.text_len == 9


def test_a_constant_scaling_is_said_by_the_caller():
    state, model = published()
    loaded = UViT.from_official(state, num_heads=4, scaling="cs:0.5")
    scalelong.apply(model, "cs:0.5")
    assert torch.equal(loaded(**INPUTS).sample, model(**INPUTS).sample)


@pytest.mark.parametrize("ratio", [4, 8, 16])
def test_the_ratio_is_read_off(ratio):
    torch.manual_seed(0)
    gate = scalelong.UViT(**SMALL, scaling=f"ls:ratio={ratio}").state_dict()
    state = {k.replace("skip_scaling.gates.17", "se"): v for k, v in gate.items()}
    assert UViT.from_official(state, num_heads=4, scaling="ls:act=mish").config.scaling == (
        "ls:act=mish" if ratio == 16 else f"ls:ratio={ratio},act=mish"
    )


def test_a_checkpoint_without_gates_loads_into_ls_and_says_so():
    state, _ = published()
    with pytest.warns(UserWarning, match="made without skip gates"):
        loaded = UViT.from_official(state, num_heads=4, scaling="ls")
    assert str(scalelong.scaling_of(loaded).scaling) == "ls"


def test_every_key_that_does_not_fit_is_named():
    state, _ = published()
    state["extra.weight"] = torch.zeros(1)
    del state["norm.bias"], state["in_blocks.1.mlp.fc2.weight"]
    state["decoder_pred.bias"] = torch.zeros(3)
    with pytest.raises(ValueError, match="not expected: extra.weight") as error:
        UViT.from_official(state, num_heads=4)
    assert "not found: in_blocks.1.mlp.fc2.weight, norm.bias" in str(error.value)
    assert "of another shape: decoder_pred.bias" in str(error.value)


def test_gates_in_a_checkpoint_do_not_vanish_behind_a_constant():
    state, _ = published("shared")
    with pytest.raises(ValueError, match="not expected: skip_scaling.gates.17.layer1.bias"):
        UViT.from_official(state, num_heads=4, scaling="cs:0.7")


def test_something_else_is_told_so():
    with pytest.raises(ValueError, match="no U-ViT state dict: it has no pos_embed"):
        UViT.from_official({"conv.weight": torch.zeros(1)})
