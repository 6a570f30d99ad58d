import copy
import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import scalelong
from scalelong import UViT
from scalelong.backbones.uvit import PatchEmbed, _patches_by_product, timestep_embedding
from scalelong.presets import MODEL_PRESETS
from tests.contracts import reference
from tests.contracts.zoo import CASES, Case

SMALL = dict(sample_size=8, patch_size=2, hidden_size=32, num_layers=4, num_attention_heads=4)


def small(**changes):
    torch.manual_seed(0)
    return UViT(**{**SMALL, **changes}).eval()


def image(*shape, dtype=torch.float32):
    return torch.randn(
        *(shape or (2, 3, 8, 8)), generator=torch.Generator().manual_seed(1), dtype=torch.float64
    ).to(dtype)


T = torch.tensor([3.0, 700.0])


# The published architecture


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("cifar10-uvit-xs", 11_117_664),
        ("cifar10-uvit-s", 44_255_328),
        ("cifar10-uvit-s-deep", 57_908_320),
        ("celeba64-uvit-s", 44_292_228),
        ("imagenet64-uvit-m", 130_940_292),
        ("imagenet64-uvit-l", 286_827_652),
        ("imagenet256-uvit-l", 286_763_172),
        ("imagenet256-uvit-h", 500_832_016),
        ("imagenet512-uvit-l", 286_861_524),
        ("imagenet512-uvit-h", 500_942_656),
        ("coco-uvit-s", 44_692_644),
        ("coco-uvit-s-deep", 58_345_636),
    ],
)
def test_presets_have_the_published_sizes(name, parameters):
    with torch.device("meta"):
        plain = UViT.from_preset(name)
        gated = scalelong.build(name, scaling="ls")
    assert sum(p.numel() for p in plain.parameters()) == parameters
    width, hidden = plain.num_tokens, plain.num_tokens // 16
    assert sum(p.numel() for p in gated.parameters()) == parameters + 2 * width * hidden + width + hidden


def test_ls_adds_the_published_counts_at_257_tokens():
    with torch.device("meta"):
        counts = [
            sum(p.numel() for p in scalelong.build("cifar10-uvit-s", scaling=spec).parameters()) - 44_255_328
            for spec in ("ls", "ls-per-skip", "cs:0.7")
        ]
    assert counts == [8_497, 50_982, 0]


def test_unet_presets():
    with torch.device("meta"):
        assert sum(p.numel() for p in scalelong.build("cifar10-unet").parameters()) == 35_746_307
        imagenet = sum(p.numel() for p in scalelong.build("imagenet64-unet").parameters())
    assert abs(imagenet / 144e6 - 1) < 0.01


def test_every_preset_builds_with_every_kind_of_scaling():
    with torch.device("meta"):
        for name in MODEL_PRESETS:
            for spec in ("cs:0.7", "ls", "ls-channel"):
                handle = scalelong.scaling_of(scalelong.build(name, scaling=spec))
                assert str(handle.scaling) == spec


def test_unknown_presets_get_the_list():
    with pytest.raises(ValueError, match="unknown preset 'cifar'; the known ones are digits, cifar10-uvit-xs"):
        scalelong.build("cifar")
    with pytest.raises(ValueError, match=r"is a unet, not a U-ViT; use scalelong.build\('cifar10-unet'\)"):
        UViT.from_preset("cifar10-unet")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_class_embeds": 5},
        {"cross_attention_dim": 12, "text_len": 6},
        {"final_conv": False, "in_channels": 4, "mlp_ratio": 2.0},
        {"sample_size": (8, 12)},
    ],
)
def test_agrees_with_a_computation_from_the_state_dict(changes):
    model = small(**changes).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, dtype=p.dtype) * 0.1)
    size = changes.get("sample_size", 8)
    height, width = (size, size) if isinstance(size, int) else size
    inputs = {
        "sample": image(2, model.config.in_channels, height, width, dtype=torch.float64),
        "timestep": T.double(),
    }
    if "num_class_embeds" in changes:
        inputs["class_labels"] = torch.tensor([0, 4])
    if "cross_attention_dim" in changes:
        inputs["encoder_hidden_states"] = image(2, 6, 12, dtype=torch.float64)
    case = Case("uvit", lambda: model, inputs, ("out_blocks.1", "out_blocks.0"), (32, 32), kind="uvit")
    got = model(**inputs).sample
    want = reference.uvit(case, model, inputs, "none", {}, "concat")
    assert (got - want).norm() < 1e-10 * want.norm()


def test_the_time_token_is_cos_then_sin():
    got = timestep_embedding(torch.tensor([0.0, 2.0], dtype=torch.float64), 4)
    want = [
        [1, 1, 0, 0],
        [
            torch.cos(torch.tensor(2.0)),
            torch.cos(torch.tensor(0.02)),
            torch.sin(torch.tensor(2.0)),
            torch.sin(torch.tensor(0.02)),
        ],
    ]
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-6, atol=1e-7)


def test_init_is_the_published_one():
    model = UViT(**{**SMALL, "hidden_size": 256, "mlp_time_embed": True, "num_class_embeds": 200}, scaling="ls")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "skip_scaling" not in name:
            assert abs(module.weight.std().item() - 0.02) < 0.002, name
            assert module.weight.abs().max() <= 2
            assert module.bias is None or not module.bias.any()
    assert abs(model.pos_embed.std().item() - 0.02) < 0.002
    assert abs(model.label_emb.weight.std().item() - 1) < 0.05
    assert model.skip_scaling.gates["18"].layer1.weight.std() > 0.05  # PyTorch's own init, as the paper's gates had


# diffusers' interface


def test_timesteps_are_numbers_scalars_or_a_batch():
    model, x = small(), image()
    want = model(x, torch.tensor([7.0, 7.0])).sample
    for t in (7, 7.0, torch.tensor(7), torch.tensor(7.0), torch.tensor([7]), torch.tensor([7, 7])):
        assert torch.equal(model(x, t).sample, want)
    assert torch.equal(model(x, 7, return_dict=False)[0], want)


def test_timestep_maps():
    identity, continuous, one_based = (small(timestep_map=m) for m in ("identity", "continuous", "one-based"))
    x, k = image(), torch.tensor([0, 999])
    torch.testing.assert_close(continuous(x, k).sample, identity(x, torch.tensor([0.999, 999.0])).sample)
    torch.testing.assert_close(one_based(x, k).sample, identity(x, torch.tensor([1, 1000])).sample)
    assert not torch.allclose(one_based(x, k).sample, identity(x, k).sample)


def test_runs_in_a_stock_pipeline():
    from diffusers import DDPMPipeline, DDPMScheduler

    pipe = DDPMPipeline(small(timestep_map="continuous"), DDPMScheduler())
    pipe.set_progress_bar_config(disable=True)
    images = pipe(batch_size=2, num_inference_steps=2, output_type="np").images
    assert images.shape == (2, 8, 8, 3)


def test_save_and_load_with_the_scaling_built_in(tmp_path):
    for spec in ("none", "cs:0.5", "ls-per-skip", scalelong.LS(over="channel")):
        model = small(scaling=spec)
        model.save_pretrained(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["scaling"] == str(spec)
        for load in (UViT.from_pretrained, scalelong.load):
            assert torch.equal(load(tmp_path)(image(), T).sample, model(image(), T).sample)
        assert UViT.from_config(model.config).state_dict().keys() == model.state_dict().keys()


def test_the_config_of_an_applied_scaling_rebuilds_it():
    model = small()
    scalelong.apply(model, "ls-per-skip")
    again = UViT.from_config(model.config)
    assert again.state_dict().keys() == model.state_dict().keys()
    scalelong.scaling_of(model).remove()
    assert UViT.from_config(model.config).state_dict().keys() == small().state_dict().keys()


def test_weights_without_ls_load_into_ls_and_say_so(tmp_path):
    plain, gated = small(), small(scaling="ls")
    with pytest.warns(UserWarning, match="made without skip gates"):
        gated.load_state_dict(plain.state_dict())
    plain.save_pretrained(tmp_path)
    for load in (UViT.from_pretrained, scalelong.load):
        with pytest.warns(UserWarning, match="saved with the scaling 'none'; 'ls' takes its place.*first values"):
            loaded = load(tmp_path, scaling="ls")
        assert torch.equal(loaded.norm.weight, plain.norm.weight)
        coefficients = torch.cat(scalelong.scaling_of(loaded).coefficients(image(), T))
        assert abs(coefficients.mean() - 0.5) < 0.15


@pytest.mark.parametrize("spec", ["cs:0.5", "scalar:0.5", "ls", "ls-per-skip", "ie"])
def test_a_scaling_given_while_loading_can_keep_the_function(tmp_path, spec):
    trained = CASES["uvit"].model(torch.float64)
    inputs = CASES["uvit"].cast(torch.float64)
    want = trained(**inputs).sample
    trained.save_pretrained(tmp_path)
    load = {"torch_dtype": torch.float64, "scaling": spec}
    with pytest.warns(UserWarning, match="takes its place"):
        kept = UViT.from_pretrained(tmp_path, **load, keep_function=True)
    torch.testing.assert_close(kept(**inputs).sample, want)
    with pytest.warns(UserWarning, match="look trained"):
        changed = UViT.from_pretrained(tmp_path, **load)
    assert not torch.allclose(changed(**inputs).sample, want)
    single = {key: value.float() for key, value in trained.state_dict().items()}
    official = UViT.from_official(single, num_heads=4, scaling=spec, keep_function=True)
    torch.testing.assert_close(official(**CASES["uvit"].inputs).sample, want.float(), rtol=1e-3, atol=1e-4)
    scalelong.scaling_of(kept).remove()
    torch.testing.assert_close(kept(**inputs).sample, want)


def test_another_scaling_replaces_the_saved_one(tmp_path):
    model = small(scaling="ls")
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="'cs:0.5' takes its place"):
        loaded = UViT.from_pretrained(tmp_path, scaling="cs:0.5")
    assert not [key for key in loaded.state_dict() if "skip_scal" in key]
    assert loaded.config.scaling == "cs:0.5"


def test_a_folder_whose_gates_are_gone_is_refused(tmp_path):
    small().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"scaling": "ls"}))
    for load in (UViT.from_pretrained, scalelong.load):
        with pytest.raises(
            ValueError, match=r"names the scaling 'ls', but the weights lack skip_scaling\.gates\.17"
        ):
            load(tmp_path)


@pytest.mark.parametrize(
    "spec", ["none", "cs:0.6", "uniform:0.3", "ls", "ls-per-skip", "ls-channel", "ie", "scalar:0.7"]
)
def test_built_in_and_applied_are_the_same(spec):
    torch.manual_seed(0)
    built = UViT(**SMALL, scaling=spec)
    torch.manual_seed(0)
    applied = UViT(**SMALL)
    scalelong.apply(applied, spec)
    assert built.state_dict().keys() == applied.state_dict().keys()
    assert torch.equal(built(image(), T).sample, applied(image(), T).sample)
    assert dict(built.config)["scaling"] == dict(applied.config)["scaling"] == spec


class CountActivationMultiplications(TorchDispatchMode):
    """Counts elementwise products on tensors of an activation's size."""

    def __init__(self, numel):
        super().__init__()
        self.numel, self.count = numel, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten.mul and args[0].numel() >= self.numel:
            self.count += 1
        return func(*args, **(kwargs or {}))


def test_constants_multiply_no_activation():
    x, counts = image(16, 3, 8, 8), {}
    for spec in ("none", "cs:0.6", "1/sqrt2", "scalar:0.5", "ls"):
        model = small(scaling=spec)
        with torch.no_grad(), CountActivationMultiplications(16 * 17 * 32) as counter:
            model(x, 5)
        counts[spec] = counter.count
    assert counts == {"none": 0, "cs:0.6": 0, "1/sqrt2": 0, "scalar:0.5": 0, "ls": 2}


# Better than the published one


def test_another_resolution_interpolates_the_position_embedding():
    model = small()
    with torch.no_grad():  # a ramp over the columns: it must run along the width of the new grid too
        model.pos_embed[:, 1:] = torch.linspace(0, 1, 4).repeat(4)[None, :, None]
    wide = model._position_embedding(6, 8)
    rows = wide[0, 1:, 0].view(6, 8)
    assert torch.allclose(rows, rows[:1].expand(6, 8), atol=1e-6)
    # Bicubic interpolation reproduces a line between the inner samples: column j sits at (j + ½)/2 - ½.
    torch.testing.assert_close(rows[0, 3:5], (torch.tensor([3.0, 4.0]) / 2 - 0.25) / 3, rtol=0.02, atol=0.01)
    assert torch.equal(wide[:, :1], model.pos_embed[:, :1])
    assert model(image(2, 3, 16, 24), T).sample.shape == (2, 3, 16, 24)


def test_a_token_gate_refuses_another_resolution_and_ls_channel_takes_it():
    with pytest.raises(ValueError, match="built for 17 tokens, and this skip has 65.*ls-channel"):
        small(scaling="ls")(image(2, 3, 16, 16), T)
    assert small(scaling="ls-channel")(image(2, 3, 16, 16), T).sample.shape == (2, 3, 16, 16)


@pytest.mark.parametrize(
    ("channels", "patch", "size"), [(3, 2, (4, 12)), (4, 2, (8, 8)), (3, 4, (16, 8)), (1, 1, (3, 5))]
)
def test_a_gpus_way_to_cut_patches_is_the_convolution(channels, patch, size):
    embed = PatchEmbed(channels, 8, patch).double()
    x = torch.randn(2, channels, *size, dtype=torch.float64, requires_grad=True)
    found, wanted = _patches_by_product(x, embed.proj), embed(x)
    torch.testing.assert_close(found, wanted)
    weights = torch.randn_like(wanted)
    inputs = [x, *embed.parameters()]
    for ours, theirs in zip(
        *(torch.autograd.grad((y * weights).sum(), inputs) for y in (found, wanted)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_non_square_images_keep_their_orientation():
    # Only position matters to a patch's place: a bright patch must come out where it went in.
    model = small(sample_size=(4, 12), final_conv=False)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        model.patch_embed.proj.weight[:12] = torch.eye(12).view(12, 3, 2, 2)
        for block in [*model.in_blocks, model.mid_block, *model.out_blocks]:
            if block.skip_linear is not None:
                block.skip_linear.weight[:, :32] = torch.eye(32)
        model.norm.weight.fill_(1)
        # patch_embed orders a patch (C, p, p), the decoder (p, p, C)
        model.decoder_pred.weight[:, :12] = torch.eye(12).view(3, 2, 2, 12).permute(1, 2, 0, 3).reshape(12, 12)
    x = torch.zeros(1, 3, 4, 12)
    x[0, 1, 2, 9] = 5.0
    out = model(x, 0).sample
    assert out.argmax() == x.argmax()


@pytest.mark.parametrize("spec", ["cs:0.5", "ls", "scalar:0.5"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_pure_precisions(dtype, spec):
    exact = small(scaling=spec).double()
    model = copy.deepcopy(exact).to(dtype)
    x = image(dtype=torch.float64)
    want = exact(x, T).sample
    out = model(x.to(dtype), T).sample
    assert out.dtype == dtype
    assert (out.double() - want).norm() <= (0.03 if dtype == torch.bfloat16 else 1e-15) * want.norm()
    out.square().sum().backward()
    assert all(p.grad.dtype == dtype for p in model.parameters())


def test_autocast():
    model = small(scaling="ls")
    with torch.autocast("cpu", torch.bfloat16):
        out = model(image(), T).sample
    want = model(image(), T).sample
    assert (out.float() - want).norm() < 0.05 * want.norm()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_layers": 7}, "num_layers is even.*got 7, try 8"),
        ({"num_layers": 0}, "got 0, try 2"),
        ({"num_attention_heads": 0}, "num_attention_heads divides hidden_size, got 0"),
        ({"hidden_size": 0}, "hidden_size is at least 1, got 0"),
        ({"mlp_ratio": -1}, "mlp_ratio is a positive number, got -1"),
        ({"qkv_bias": "maybe"}, "qkv_bias is true or false, got 'maybe'"),
        ({"block_scaling": 3}, "block_scaling is 'none', 'rezero' or 'stable:T'"),
        ({"sample_size": 8.0}, r"whole number or \(height, width\), got 8.0"),
        ({"sample_size": (8, 8, 8)}, r"whole number or \(height, width\)"),
        ({"num_attention_heads": 5}, "num_attention_heads divides hidden_size, got 5 and 32"),
        ({"sample_size": 9}, "multiple of patch_size, got sample_size=9 and patch_size=2"),
        ({"sample_size": (8, 7)}, "multiple of patch_size"),
        ({"num_class_embeds": 0}, "at least 1, got 0"),
        ({"num_class_embeds": 5, "cross_attention_dim": 8}, "class labels or text"),
        ({"timestep_map": "log"}, "one of identity, continuous, one-based, got 'log'"),
        ({"scaling": "cs:2"}, r"κ lies in \(0, 1\]"),
        ({"block_scaling": "stable:2"}, "'stable:T' with T in"),
        ({"block_scaling": "dezero"}, "'none', 'rezero' or"),
    ],
)
def test_bad_configurations_get_a_sentence(changes, says):
    with pytest.raises(ValueError, match=says):
        small(**changes)


@pytest.mark.parametrize(
    ("changes", "call", "says"),
    [
        ({}, dict(sample=image(1, 3, 7, 8), timestep=0), "multiples of the patch size 2, got 7×8"),
        (
            {},
            dict(sample=image(), timestep=0, class_labels=torch.tensor([0, 1])),
            "built without a place for class_labels",
        ),
        ({"num_class_embeds": 3}, dict(sample=image(), timestep=0), "needs class_labels, got none"),
        (
            {"cross_attention_dim": 8, "text_len": 4},
            dict(sample=image(), timestep=0),
            "needs encoder_hidden_states",
        ),
        (
            {"cross_attention_dim": 8, "text_len": 4},
            dict(sample=image(), timestep=0, encoder_hidden_states=torch.zeros(2, 5, 8)),
            "takes 4 text tokens, got 5",
        ),
    ],
)
def test_bad_inputs_get_a_sentence(changes, call, says):
    with pytest.raises(ValueError, match=says):
        small(**changes)(**call)


# Block-output scalings (Table 3)


def test_block_scalings_scale_the_residual_branches():
    x = torch.randn(2, 17, 32)
    plain = small().in_blocks[0]

    def block(spec):
        other = small(block_scaling=spec).in_blocks[0]
        other.load_state_dict(plain.state_dict(), strict=False)
        return other

    assert torch.equal(block("rezero")(x), x)
    assert block("rezero").branch_scale.alpha.requires_grad
    mixed = x + 0.1 * plain.attn(plain.norm1(x))
    mixed = mixed + 0.1 * plain.mlp(plain.norm2(mixed))
    torch.testing.assert_close(block("stable:0.1")(x), mixed)


def test_a_final_convolution_that_starts_as_the_identity():
    torch.manual_seed(0)
    model = small(identity_final_conv=True)
    x, t = torch.randn(2, 3, 8, 8), torch.tensor([3, 700])
    through = model(x, t).sample
    model.final_layer = torch.nn.Identity()
    torch.testing.assert_close(through, model(x, t).sample)
    torch.manual_seed(0)
    as_published = small()
    weights = {name: p for name, p in model.named_parameters() if not name.startswith("final_layer")}
    assert all(torch.equal(p, as_published.get_parameter(name)) for name, p in weights.items())
