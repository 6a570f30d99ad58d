"""The calibration pass against computations by hand, in float64, and on every family of models."""

import math
import warnings

import pytest
import torch

import scalelong
from scalelong.stability.calibration import calibrate, fit_cs, measure_variances, pair_gains, predict_gain, probing
from scalelong.stability.gain import Jacobian
from scalelong.stability.models import batches_for, model_inputs, open_model
from scalelong.stability.noise_ratio import uniform_images
from tests.contracts.zoo import CASES


@pytest.fixture
def uvit():
    torch.manual_seed(0)
    model = scalelong.UViT(
        sample_size=4, in_channels=2, patch_size=2, hidden_size=12, num_layers=6, num_attention_heads=2
    )
    return model.double().eval()


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(1)
    sample = torch.randn(3, 2, 4, 4, dtype=torch.float64, generator=generator)
    return {"sample": sample, "timestep": torch.tensor([10.0, 400.0, 900.0])}


def by_hand(model, inputs, coefficients):
    """(skips, what arrives at each merge), outermost first: U-ViT's forward pass written out."""
    seen = []
    hooks = [model.in_blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))]
    model(**inputs)
    hooks[0].remove()
    x, skips = seen[0].detach(), []
    for block in model.in_blocks:
        x = block(x)
        skips.append(x)
    x, mains = model.mid_block(x), []
    for block, skip, c in list(zip(model.out_blocks, skips[::-1], coefficients[::-1], strict=True)):
        mains.append(x)
        x = block(x, c * skip)
    return skips, mains[::-1]


@torch.no_grad()
@pytest.mark.parametrize("coefficients", [(1.0, 1.0, 1.0), (1.0, 0.5, 0.3)])
def test_variances_behind_the_two_halves_of_the_merge(uvit, inputs, coefficients):
    skips, mains = by_hand(uvit, inputs, coefficients)
    with probing(uvit) as probes:
        for scale, c in zip(probes.scales, coefficients, strict=True):
            scale.coefficient = c
        found = measure_variances(probes, [inputs])
    for i in range(3):
        weight = uvit.out_blocks[2 - i].skip_linear.weight
        main = (mains[i] @ weight[:, :12].T).reshape(-1, 12)
        skip = coefficients[i] * (skips[i] @ weight[:, 12:].T).reshape(-1, 12)
        wanted = [((y - y.mean(0)) ** 2).mean().item() for y in (main, skip)]
        assert found[i] == pytest.approx(wanted, rel=1e-12)


def matrix(function, x):
    """The Jacobian, column by column."""
    size = x.numel()
    steps = torch.eye(size, dtype=x.dtype).view(size, *x.shape) * 1e-6
    columns = [(function(x + step) - function(x - step)).flatten() / 2e-6 for step in steps]
    return torch.stack(columns, 1)


@torch.no_grad()
def test_gains_of_pairs_are_norms_of_their_jacobians(uvit, inputs):
    one = {name: value[:1] for name, value in inputs.items()}
    skips, mains = by_hand(uvit, one, (1.0, 1.0, 1.0))
    with probing(uvit) as probes, torch.enable_grad():
        pairs, middle = pair_gains(probes, one, 60)
    wanted = [matrix(uvit.mid_block, skips[2])]
    for i in (1, 2):  # b_i∘a_i: from the skip before, through encoder block i, skip i and its merge
        encode, decode = uvit.in_blocks[i], uvit.out_blocks[2 - i]
        wanted.append(matrix(lambda x, a=encode, b=decode, i=i: b(mains[i], a(x)), skips[i - 1]))
    for found, jacobian in zip((middle, *pairs[1:]), wanted, strict=True):
        exact = torch.linalg.matrix_norm(jacobian, 2).item()
        assert 0.98 * exact < found < (1 + 1e-6) * exact  # from below; the largest values lie close together


def test_the_estimate_is_no_bound():
    """A merging layer reads the main path by weights that no pair has: with small skips these decide."""
    torch.manual_seed(0)
    model = scalelong.build("digits", scaling="uniform:0.01", identity_final_conv=True).eval()
    scalelong.scaling_of(model).fold()
    found = calibrate(model, batches_for(model, "vp-sde", None, [2]), iterations=5)
    assert found.largest_gain > 2 * found.predicted["none"]["with_m0"]


def test_both_directions_are_measured_in_the_whole_network(uvit, inputs):
    found = calibrate(uvit, [inputs], iterations=1).directions
    for spec, gains in found.items():
        handle = scalelong.apply(uvit, spec)
        sample = inputs["sample"].clone().requires_grad_()
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            output = uvit(sample, inputs["timestep"]).sample
        assert gains == pytest.approx(Jacobian(output, sample).typical_gain().tolist())
        handle.remove()
    assert list(found) == ["cs:0.7", "cs-reversed:0.7"]


def test_the_proposal_is_flat_when_it_is_applied(uvit, inputs):
    found = calibrate(uvit, [inputs], iterations=2)
    assert found.balance == pytest.approx(min(merge.gain - 1 for merge in found.merges))
    assert found.flat_gains == pytest.approx([1 + found.balance] * 3, rel=1e-3)
    assert all(0 < c <= 1 for c in found.coefficients)
    scalelong.apply(uvit, found.spec_per_skip)
    again = calibrate(uvit, [inputs], iterations=1)
    assert [merge.gain for merge in again.merges] == pytest.approx(found.flat_gains, rel=0.02)  # three digits
    assert [merge.coefficient for merge in again.merges] == pytest.approx(found.coefficients, rel=5e-3)
    assert str(scalelong.scaling_of(uvit).scaling) == found.spec_per_skip  # it is left as it was


def test_no_skip_is_enlarged_whatever_balance_is_asked_for(uvit, inputs):
    found = calibrate(uvit, [inputs], iterations=1, balance=1e9)
    assert (found.coefficients, found.spec) == ([1.0] * 3, "none")


@pytest.mark.parametrize("name", ["unet2d", "hunyuan", *(pytest.param(n, marks=pytest.mark.slow) for n in CASES)])
def test_every_family_is_measured_and_left_as_it_was(name):
    case = CASES[name]
    model = case.model()
    before, config, hooks = case.call(model), dict(model.config), _hooks(model)
    model.train()
    found = calibrate(model, [case.inputs], iterations=2)
    assert model.training
    model.eval()
    assert torch.equal(case.call(model), before)
    assert (dict(model.config), _hooks(model)) == (config, hooks)
    assert tuple(merge.module for merge in found.merges) == case.merges
    assert all(merge.pair_gain > 0 and merge.main_variance > 0 for merge in found.merges)
    assert found.largest_gain >= found.typical_gain > 0
    assert {merge.behind for merge in found.merges} == {"linear" if name == "uvit" else "concat"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the zoo's norms look trained
        scalelong.apply(model, found.spec_per_skip)  # what it proposes can be pasted


def _hooks(model):
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


def test_variances_at_a_concatenation_are_those_of_its_two_parts():
    case = CASES["unet2d"]
    model, seen = case.model(), []
    model.up_blocks[1].resnets[1].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    found = calibrate(model, [case.inputs], iterations=1).merges[0]
    joined = seen[0].detach().double()
    main, skip = joined[:, :-32], joined[:, -32:]
    for part, variance in ((main, found.main_variance), (skip, found.skip_variance)):
        assert variance == pytest.approx(part.var((0, 2, 3), correction=0).mean().item(), rel=1e-6)


def test_cs_is_recognised_in_coefficients():
    assert fit_cs([0.8**i for i in range(6)]) == pytest.approx((0.8, 1))
    kappa, misfit = fit_cs([1, 1, 0.25])
    assert kappa == pytest.approx(math.exp(2 * math.log(0.25) / 5))
    assert misfit == pytest.approx(max(1 / kappa, kappa**2 / 0.25))
    assert fit_cs([1.0]) == (1.0, 1.0)


def test_the_predicted_gain_by_hand():
    found = predict_gain((1.0, 0.5), (2.0, 3.0), 0.1)
    assert found["with_m0"] == pytest.approx(1 * 3 + 0.5 * 9 + 0.1 * 9)
    assert found["with_own_gains"] == pytest.approx(1 * 2 + 0.5 * 6 + 0.1 * 6)


@pytest.mark.parametrize(
    ("spec", "placement", "says"), [("ls", "concat", "depends on the input"), ("cs:0.7", "norm", "at 'norm'")]
)
def test_what_cannot_be_calibrated_is_refused_and_kept(spec, placement, says):
    case = CASES["unet2d"]
    model = case.model()
    with pytest.warns(UserWarning, match="trained"):
        scalelong.apply(model, spec, placement=placement)
    before = case.call(model)
    with pytest.raises(ValueError, match=says):
        calibrate(model, [case.inputs])
    assert torch.equal(case.call(model), before)


def test_bad_requests(uvit, inputs):
    with pytest.raises(ValueError, match="at least one batch"):
        calibrate(uvit, [])
    with pytest.raises(ValueError, match="positive number, got -1"):
        calibrate(uvit, [inputs], balance=-1)


@pytest.mark.parametrize("name", ["uvit", "unet2d", "sd15", "sdxl", "deepfloyd", "hunyuan"])
def test_made_up_inputs_fit_every_family(name):
    from scalelong.diffusion.process import process_named

    model = CASES[name].model()
    channels = model.config["in_channels"]
    images = uniform_images((channels, *next(iter(CASES[name].inputs.values())).shape[2:]))
    inputs = model_inputs(model, process_named("ddpm"), images, 2)
    assert torch.isfinite(model(**inputs).sample).all()


def test_models_are_opened_by_preset_and_by_folder(tmp_path, uvit):
    uvit.float().save_pretrained(tmp_path / "saved")
    opened = open_model(str(tmp_path / "saved"))
    assert (opened.num_skips, opened.folder, opened.process) == (3, opened.name, "ddpm")
    (tmp_path / "saved" / "diffusion_pytorch_model.safetensors").unlink()
    assert open_model(str(tmp_path / "saved")).folder is None  # a config alone: fresh weights
    preset = open_model("digits")
    assert (preset.num_skips, preset.folder, preset.process) == (6, None, "vp-sde")
    assert len(batches_for(preset.model, "vp-sde", None, [2, 3])[1]["sample"]) == 3
    with pytest.raises(ValueError, match="neither a folder nor a preset"):
        open_model("nothing")


@pytest.mark.parametrize("name", ["uvit", "unet2d"])
def test_a_pairs_gain_hardly_depends_on_the_models_own_coefficient(name):
    """A norm behind the merge undoes the coefficient: the pair's gain may not be divided by it."""
    gains = []
    for spec in ("none", "cs:0.1"):
        torch.manual_seed(0)
        model = CASES[name].make().eval()
        scalelong.apply(model, spec)
        found = calibrate(model, [CASES[name].inputs], iterations=5)
        gains.append([merge.pair_gain for merge in found.merges])
    assert gains[1] == pytest.approx(gains[0], rel=0.5)
    with probing(model) as probes:
        assert [probe.coefficient for probe in probes.scales] == pytest.approx(
            [0.1**i for i in range(len(gains[0]))]
        )


@pytest.mark.parametrize(
    "told", [{"class_embed_type": "timestep"}, {"encoder_hid_dim_type": "image_proj", "encoder_hid_dim": 8}]
)
def test_conditions_that_cannot_be_made_up_are_named(told):
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 8),
        norm_num_groups=2,
        cross_attention_dim=8,
        attention_head_dim=2,
        down_block_types=("DownBlock2D",) * 2,
        up_block_types=("UpBlock2D",) * 2,
        **told,
    )
    with pytest.raises(ValueError, match=f"no made-up inputs are known for {next(iter(told))}="):
        batches_for(model, "sd", None, [2])


@pytest.mark.parametrize("name", ["patch_embed.proj", "mid_block.mlp.fc1", "in_blocks.2.attn.qkv"])
def test_ruined_weights_are_not_called_flat(uvit, inputs, name):
    with torch.no_grad():
        uvit.get_submodule(name).weight.view(-1)[0] = math.nan
    with pytest.raises(ValueError, match="the model cannot be measured: .* its weights are ruined"):
        calibrate(uvit, [inputs])
