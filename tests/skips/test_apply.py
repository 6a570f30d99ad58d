"""What `apply` refuses, warns of and works under; what holds for every model is in tests/contracts."""

import copy
import gc
import json
import warnings

import pytest
import torch
from torch import nn

import scalelong
from scalelong.skips import UnsupportedModelError
from scalelong.skips.apply import UndoneByNormWarning
from tests.contracts.test_contract import fingerprint
from tests.contracts.zoo import CASES

UNETS = [CASES["unet2d"], CASES["sd15"]]


def fresh(name="unet2d"):
    torch.manual_seed(0)
    return CASES[name].make().eval()


def refused(model, says, *args, **kwargs):
    before = fingerprint(model)
    with pytest.raises(ValueError, match=says):
        scalelong.apply(model, *(args or ("cs:0.7",)), **kwargs)
    assert fingerprint(model) == before


# Refusals


@pytest.mark.parametrize("spec", ["cs:0.5", "scalar:0.5"])
def test_weights_that_are_offloaded_are_not_pretended_to_be_changed(spec):
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_submodules

    case, model = CASES["unet2d"], fresh()
    plain = case.call(model, torch.float32)
    scaling = scalelong.apply(model, spec, placement="norm", keep_function=True)
    cpu_offload(model, execution_device=torch.device("cpu"))
    for change, name in ((scaling.fold, "fold"), (scaling.remove, "remove")):
        with pytest.raises(ValueError, match=rf"{name}\(\) needs the weights, and .* are offloaded"):
            change()
    torch.testing.assert_close(case.call(model, torch.float32), plain, rtol=1e-4, atol=1e-5)
    remove_hook_from_submodules(model)
    scaling.remove()
    cpu_offload(model, execution_device=torch.device("cpu"))
    for arguments in ({"scaling": spec, "placement": "norm", "keep_function": True}, {"scaling": "ls"}):
        with pytest.raises(ValueError, match="are offloaded"):
            scalelong.apply(model, **arguments)
    assert scalelong.scaling_of(model) is None
    scalelong.apply(model, "cs:0.5")  # needs no weights
    assert not torch.allclose(case.call(model, torch.float32), plain)


def test_a_part_of_a_network_that_is_called_module_is_no_wrapper():
    unet = fresh()
    scalelong.apply(unet, "cs:0.5")
    mine = nn.Module()
    mine.module, mine.head = unet, nn.Linear(2, 2)
    assert scalelong.scaling_of(mine) is None
    assert scalelong.scaling_of(nn.DataParallel(unet)).model is unet
    mine = nn.Module()
    mine.skip_scaling = scalelong.SkipScales("cs:0.5", num_skips=2)
    assert scalelong.scaling_of(mine) is None


@pytest.mark.parametrize("make", [lambda: nn.Conv2d(3, 3, 1), lambda: nn.Sequential(nn.Linear(2, 2))])
def test_a_model_without_long_skips_is_told_what_was_looked_for(make):
    for call in (scalelong.find_skips, lambda model: scalelong.apply(model, "cs:0.7")):
        with pytest.raises(UnsupportedModelError, match="looked for one of UNet2DModel.*SkipScales"):
            call(make())


def test_a_diffusers_model_without_long_skips_is_refused():
    from diffusers import UVit2DModel

    with torch.device("meta"):
        model = UVit2DModel(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, block_out_channels=64)
    with pytest.raises(UnsupportedModelError, match="no long skips were found in UVit2DModel"):
        scalelong.apply(model, "cs:0.7")


def test_a_namesake_of_somebody_else_is_refused():
    namesake = type("UNet2DModel", (nn.Module,), {})
    with pytest.raises(UnsupportedModelError, match="no long skips"):
        scalelong.apply(namesake(), "cs:0.7")


def test_a_pipeline_is_told_to_give_its_unet():
    from diffusers import DDPMPipeline, DDPMScheduler

    with pytest.raises(UnsupportedModelError, match=r"apply takes a model, got DDPMPipeline.*\.unet"):
        scalelong.apply(DDPMPipeline(fresh(), DDPMScheduler()), "cs:0.7")


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        (dict(up_block_types=("UpBlock2D", "SkipUpBlock2D")), "SkipUpBlock2D"),
        (dict(up_block_types=("AttnSkipUpBlock2D", "UpBlock2D")), "AttnSkipUpBlock2D"),
        (dict(down_block_types=("SkipDownBlock2D", "DownBlock2D")), "SkipDownBlock2D"),
    ],
)
def test_untested_blocks_are_refused_by_name_and_the_model_is_untouched(changes, name):
    from diffusers import UNet2DModel

    config = dict(
        sample_size=8,
        block_out_channels=(32, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    refused(UNet2DModel(**{**config, **changes}), f"{name} is not a block that skip scaling was tested with")


def test_k_blocks_are_refused_by_name():
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 32),
        layers_per_block=1,
        down_block_types=("KDownBlock2D", "KDownBlock2D"),
        up_block_types=("KUpBlock2D", "KUpBlock2D"),
        mid_block_type=None,
        cross_attention_dim=8,
        norm_num_groups=None,
        resnet_time_scale_shift="ada_group",
    )
    refused(model, "KDownBlock2D is not a block")


def test_a_hunyuan_of_odd_depth_is_refused():
    from diffusers import HunyuanDiT2DModel

    config = dict(CASES["hunyuan"].model().config) | {"num_layers": 5}
    refused(HunyuanDiT2DModel.from_config(config), "even number of layers")


def test_a_unet_whose_widths_do_not_pair_up_is_refused():
    model = fresh()
    model.up_blocks[0].resnets[0].in_channels += 8
    refused(model, r"up_blocks\.0\.resnets\.0 reads 104 channels, but the main path brings 48 and skip 3 brings 48")


def test_a_merge_without_a_shortcut_has_no_norm_placement():
    model = fresh()
    model.up_blocks[1].resnets[0].conv_shortcut = None
    refused(model, r"up_blocks\.1\.resnets\.0 adds its input without a shortcut", "cs:0.7", placement="norm")
    scalelong.apply(model, "cs:0.7")


def test_placements_that_are_not_there():
    refused(fresh(), "placement is one of 'concat', 'norm', got 'middle'", "cs:0.7", placement="middle")
    refused(fresh("uvit"), "UViT has no norm after the concatenation.*'concat'", "cs:0.7", placement="norm")


def compile_the_forward(model):
    model.forward = torch.compile(model.forward)
    return model


@pytest.mark.parametrize(
    "compile_",
    [
        torch.compile,
        lambda model: (model.compile(), model)[1],
        lambda model: nn.DataParallel(torch.compile(model)),
        compile_the_forward,
    ],
    ids=["wrapper", "in place", "wrapped wrapper", "forward"],
)
def test_compiled_models_are_refused(compile_):
    with pytest.raises(ValueError, match="the model is compiled; apply to the plain model"):
        scalelong.apply(compile_(fresh()), "cs:0.7")


def test_data_parallel_models_are_refused():
    with pytest.raises(ValueError, match="nn.DataParallel; that is not supported.*DistributedDataParallel"):
        scalelong.apply(nn.DataParallel(fresh()), "cs:0.7")


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_ddp_and_fsdp_models_are_refused_and_take_a_scaled_one(process_group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with pytest.raises(ValueError, match="DistributedDataParallel; it synchronises.*then wrap it"):
        scalelong.apply(nn.parallel.DistributedDataParallel(fresh()), "cs:0.7")
    mesh = init_device_mesh("cpu", (1,))
    sharded = fully_shard(fresh("uvit"), mesh=mesh)
    with pytest.raises(ValueError, match="sharded by FSDP; apply before"):
        scalelong.apply(sharded, "cs:0.7")

    case = CASES["uvit"]
    for spec in ("cs:0.7", "ls", "ls-per-skip"):
        model = fresh("uvit")
        torch.manual_seed(1)
        scalelong.apply(model, spec)
        want = case.call(model)
        ddp = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
        torch.testing.assert_close(case.call(ddp), want)
        assert scalelong.scaling_of(ddp).model is ddp.module
        for block in [*model.in_blocks, *model.out_blocks]:
            fully_shard(block, mesh=mesh)
        torch.testing.assert_close(case.call(fully_shard(model, mesh=mesh)), want)


def test_peft_models_are_refused_but_a_scaled_one_takes_lora():
    import peft

    lora = peft.LoraConfig(target_modules=["to_q", "skip_linear", "conv_shortcut"], r=2)
    adapted = fresh("sd15")
    adapted.add_adapter(lora)
    refused(adapted, "PEFT adapters; apply to the base model")
    with pytest.raises(ValueError, match="PEFT adapters"):
        scalelong.apply(peft.get_peft_model(fresh("sd15"), lora), "cs:0.7")

    random_start = peft.LoraConfig(target_modules=["to_q", "skip_linear"], r=2, init_lora_weights=False)
    for name, spec, placement in (
        ("sd15", "ls", "norm"),
        ("sd15", "cs:0.7", "concat"),
        ("uvit", "cs:0.5", "concat"),
        ("uvit", "ls", "concat"),
        ("hunyuan", "cs:0.5", "norm"),
    ):
        case, model = CASES[name], fresh(name).double()
        scalelong.apply(model, spec, placement=placement)
        plain = case.call(model, torch.float64)
        adapted = peft.get_peft_model(model, random_start)
        assert scalelong.scaling_of(adapted).model is model
        assert scalelong.scaling_of(nn.DataParallel(adapted)).model is model  # one wrapper in another
        want = case.call(adapted, torch.float64)
        assert not torch.allclose(want, plain)
        # Merged into the weights LoRA reads the scaled skip; so it must before.
        torch.testing.assert_close(case.call(adapted.merge_and_unload(), torch.float64), want, rtol=1e-5, atol=1e-6)


def test_lora_on_the_first_layer_hides_no_skip():
    import peft

    model = fresh()
    before = scalelong.find_skips(model)
    scaling = scalelong.apply(model, "ls")
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["conv_in"], r=2))
    assert [skip.shape for skip in scaling.skips] == [skip.shape for skip in before]


@pytest.mark.parametrize("spec", ["ls", "ls-per-skip", "ls-channel", "ie", "scalar", "skip-norm"])
@pytest.mark.parametrize("name", ["unet2d", "uvit"])
def test_what_a_half_precision_model_learns_may_be_float32(name, spec):
    """As diffusers' LoRA scripts have it: cast_training_params."""
    case, model = CASES[name], fresh(name).bfloat16()
    scaling = scalelong.apply(model, spec)
    before = case.call(model, torch.bfloat16)
    for p in scaling.parameters():
        p.data = p.data.float()
    after = case.call(model, torch.bfloat16)
    assert after.dtype == torch.bfloat16
    torch.testing.assert_close(after, before, rtol=0.1, atol=0.05)


@pytest.mark.parametrize(
    ("name", "placement", "target"),
    [("uvit", "concat", "skip_linear"), ("hunyuan", "norm", "skip_linear"), ("sd15", "norm", "conv_shortcut")],
)
def test_weights_with_lora_beside_them_are_neither_folded_nor_given_back(name, placement, target):
    import peft

    elsewhere = {"uvit": "proj"}.get(name, "to_q")

    def adapted(lora, **more):
        model = fresh(name).double()
        handle = scalelong.apply(model, "cs:0.5", placement=placement, **more)
        return handle, peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **lora))

    beside, copied = {"target_modules": [target]}, {"target_modules": [elsewhere], "modules_to_save": [target]}
    for lora in (beside, copied):
        for more, change in (({}, "fold"), ({"keep_function": True}, "remove")):
            handle, model = adapted(lora, **more)
            before = CASES[name].call(model, torch.float64)
            with pytest.raises(ValueError, match=rf"{target} carries a PEFT adapter.*merge_and_unload"):
                getattr(handle, change)()
            assert torch.equal(CASES[name].call(model, torch.float64), before)
    handle, model = adapted({"target_modules": [elsewhere]})  # elsewhere LoRA does not disturb
    want = CASES[name].call(model, torch.float64)
    handle.fold()
    torch.testing.assert_close(CASES[name].call(model, torch.float64), want)


@pytest.mark.parametrize(
    ("spec", "placement", "copied"),
    [("ls", "concat", "skip_scaling"), ("ls", "norm", "skip_scaling"), ("ls-per-skip", "norm", "skip_scale")],
)
def test_peft_is_refused_a_copy_of_gates_that_nobody_would_ask(spec, placement, copied):
    import peft

    model = fresh("sd15")
    scalelong.apply(model, spec, placement=placement)
    lora = peft.LoraConfig(target_modules=["to_q"], modules_to_save=[copied], r=2)
    with pytest.raises(ValueError, match=r"copied with the model.*modules_to_save.*requires_grad_.*state_dict\(\)"):
        peft.get_peft_model(model, lora)


def test_peft_may_copy_a_gate_that_its_block_alone_asks():
    import peft

    model = fresh("sd15")
    scalelong.apply(model, "ls-per-skip")
    lora = peft.LoraConfig(target_modules=["to_q"], modules_to_save=["skip_scale"], r=2)
    adapted = peft.get_peft_model(model, lora)
    CASES["sd15"].call(adapted).square().sum().backward()
    gates = [p for name, p in adapted.named_parameters() if "modules_to_save" in name]
    assert gates
    assert all(gate.grad.any() for gate in gates)


@pytest.mark.parametrize("spec", ["ls", "ls-per-skip", "scalar"])
@pytest.mark.parametrize("placement", ["concat", "norm"])
def test_gates_train_and_are_saved_beside_lora(tmp_path, spec, placement):
    import peft

    def adapt(model):
        handle = scalelong.apply(model, spec, placement=placement, keep_function=True)
        return handle, peft.get_peft_model(model, peft.LoraConfig(target_modules=["to_q"], r=2))

    case = CASES["sd15"]
    handle, adapted = adapt(fresh("sd15"))
    assert not any(p.requires_grad for p in handle.parameters())  # PEFT freezes all but its own
    for parameter in handle.parameters():
        parameter.requires_grad_()
    case.call(adapted).square().sum().backward()
    torch.optim.SGD(handle.parameters(), 1e-2).step()
    adapted.save_pretrained(tmp_path)
    again, loaded = adapt(fresh("sd15"))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*gate")
        loaded.load_adapter(tmp_path, "default")
    assert not torch.equal(case.call(loaded), case.call(adapted))
    again.load_state_dict(handle.state_dict())
    assert torch.equal(case.call(loaded), case.call(adapted))


# Warnings


@pytest.mark.parametrize("spec", ["cs:0.7", "ls", "ie", "scalar:0.5"])
@pytest.mark.parametrize("name", ["unet2d", "uvit", "hunyuan"])
def test_trained_weights_are_noticed_after_one_step(name, spec):
    model = fresh(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", UndoneByNormWarning)
        scalelong.apply(model, "scalar:0.9").remove()
    optimiser = torch.optim.AdamW(model.parameters(), 1e-4)
    CASES[name].call(model).square().mean().backward()
    optimiser.step()
    with pytest.warns(UserWarning, match="look trained.*keep_function=True"):
        scalelong.apply(model, spec)


@pytest.mark.parametrize("spec", ["none", "cs:1", "scalar"])
def test_scale_one_on_trained_weights_is_no_reason_to_warn(spec):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scalelong.apply(CASES["unet2d"].model(), spec)


def test_plain_from_pretrained_runs_unscaled_and_apply_says_what_to_call(tmp_path):
    from diffusers import UNet2DModel

    case, model = CASES["unet2d"], fresh()
    scalelong.apply(model, "ls", placement="norm")
    model.save_pretrained(tmp_path)
    entry = json.loads((tmp_path / "config.json").read_text())["scalelong"]
    assert entry == {"scaling": "ls", "placement": "norm", "keep_function": False}
    plain = UNet2DModel.from_pretrained(tmp_path)
    assert scalelong.scaling_of(plain) is None
    scalelong.scaling_of(model).remove()
    assert torch.equal(case.call(plain), case.call(model))
    with pytest.warns(UserWarning, match=r"saved with the scaling 'ls' at 'norm'.*scalelong\.load"):
        scalelong.apply(plain, "cs:0.7")
    assert plain.config["scalelong"]["scaling"] == "cs:0.7"


def test_removal_and_folding_clear_the_config(tmp_path):
    model = fresh()
    scalelong.apply(model, "scalar", placement="norm").remove()
    scalelong.apply(model, "cs:0.7", placement="norm").fold()
    model.save_pretrained(tmp_path)
    assert "scalelong" not in json.loads((tmp_path / "config.json").read_text())


def test_a_checkpoint_without_gates_loads_into_a_model_with_them_and_says_so():
    plain, gated = fresh(), fresh()
    scalelong.apply(gated, "ls")
    gates = {k: v.clone() for k, v in gated.state_dict().items() if "skip_scaling" in k}
    says = r"none of the 8 gate tensors.*made without skip gates, or .* from_pretrained.*scalelong\.load\(folder\)"
    with pytest.warns(UserWarning, match=says) as caught:
        gated.load_state_dict(plain.state_dict())
    assert caught[0].filename == __file__
    assert all(torch.equal(gated.state_dict()[k], v) for k, v in gates.items())
    whole = nn.ModuleDict({"unet": gated, "other": nn.Linear(1, 1)})
    with pytest.warns(UserWarning, match="made without skip gates") as caught:
        whole.load_state_dict({k: v for k, v in whole.state_dict().items() if "skip_scaling" not in k})
    assert caught[0].filename == __file__
    half = gated.state_dict()
    half.pop("skip_scaling.gates.32.layer1.bias")
    with pytest.raises(RuntimeError, match=r"Missing key.*skip_scaling\.gates\.32\.layer1\.bias"):
        gated.load_state_dict(half)


# The handle


def test_with_removes_at_the_end_even_after_an_error():
    model, before = fresh(), fingerprint(fresh())[1:]
    with scalelong.apply(model, "ls") as scaling:
        assert scaling.scaling == scalelong.LS()
    assert fingerprint(model)[1:] == before
    with pytest.raises(ZeroDivisionError), scalelong.apply(model, "cs:0.7"):
        1 / 0  # noqa: B018
    assert scalelong.scaling_of(model) is None
    with scalelong.apply(model, "cs:0.7") as scaling:
        scaling.remove()


def test_a_removed_handle_says_so():
    handle = scalelong.apply(fresh(), "cs:0.7")
    handle.remove()
    assert "removed" in repr(handle)
    for use in (handle.summary, handle.fold, handle.coefficients):
        with pytest.raises(ValueError, match="has no scaling any more"):
            use()


def test_a_state_of_another_scaling_is_refused_and_changes_nothing():
    model, other = fresh(), fresh()
    handle, state = scalelong.apply(model, "ls"), scalelong.apply(other, "ls:ratio=4").state_dict()
    before = fingerprint(model)
    with pytest.raises(ValueError, match=r"the state of 'ls' .* has 8 tensors.*gates\.32\.layer1\.bias"):
        handle.load_state_dict(state)
    with pytest.raises(ValueError, match=r"differs in skip_scaling\.gates\.32\.layer1\.bias, "):
        handle.load_state_dict({})
    assert fingerprint(model) == before


def test_removing_twice_is_removing_once():
    model = CASES["uvit"].model()
    handle = scalelong.apply(model, "cs:0.5", keep_function=True)
    handle.remove()
    once = fingerprint(model)
    handle.remove()
    assert fingerprint(model) == once


def test_summary_has_a_row_per_skip_with_shape_and_coefficient():
    text = scalelong.apply(fresh("uvit"), "cs:0.5").summary().splitlines()
    assert text[0] == "cs:0.5 at concat on UViT: 3 long skips, outermost first"
    assert text[2].split() == ["0", "out_blocks.2", "66×64", "1"]
    assert text[4].split() == ["2", "out_blocks.0", "66×64", "0.25"]
    with pytest.warns(UserWarning, match="GroupNorm groups of their own"):
        lines = scalelong.apply(fresh(), "cs:0.5").summary().splitlines()
    assert lines[2].split() == ["0", "up_blocks.1.resnets.1", "32×8×8", "1", "100%"]
    assert lines[4].split()[:3] == ["2", "up_blocks.0.resnets.1", "32×4×4"]


def test_summary_counts_pure_groups_as_one_would_by_hand():
    from scalelong.skips.summary import undone_share

    for name in ("unet2d", "sd15"):
        for skip in scalelong.find_skips(fresh(name)):
            total = skip.main_channels + skip.shape.channels
            group_of = [channel * skip.norm.num_groups // total for channel in range(total)]
            main_groups = set(group_of[: skip.main_channels])
            pure = sum(group not in main_groups for group in group_of[skip.main_channels :])
            assert undone_share(skip) == pure / skip.shape.channels


def test_summary_measures_what_the_norm_undoes():
    model = CASES["unet2d"].make()
    handle = scalelong.apply(model, "uniform:0.3")
    lines = handle.summary(**CASES["unet2d"].inputs).splitlines()
    assert "placement='norm' scales behind the norm" in lines[-1]
    assert lines[1].split()[-3:] == ["by", "norm", "measured"]
    for line in lines[2:-1]:
        computed, measured = (float(cell.rstrip("%")) for cell in line.split()[-2:])
        assert measured >= 99 if computed == 100 else 50 < measured < computed  # a mixed group lets some through
    assert model.training


def test_summary_of_gates_shows_their_values_where_inputs_are_given():
    case = CASES["uvit"]
    handle = scalelong.apply(fresh("uvit"), "ls")
    assert handle.summary().splitlines()[2].split()[-1] == "gate"
    row = handle.summary(**case.inputs).splitlines()[2].split()
    assert abs(float(row[-3]) - 0.5) < 0.1
    assert row[-2] == "±"
    with pytest.raises(ValueError, match="depend on the input"):
        handle.coefficients()


def test_skip_norm_before_a_group_norm_is_warned_of_like_a_constant():
    with pytest.warns(UserWarning, match=r"undoes .*skip-norm.*another scaling with placement='norm'") as caught:
        handle = scalelong.apply(fresh(), "skip-norm")
    assert caught[0].filename == __file__
    lines = handle.summary(**CASES["unet2d"].inputs).splitlines()
    assert lines[-1].startswith("! 97% of the skip channels")
    for line in lines[2:-1]:
        computed, measured = (float(cell.rstrip("%")) for cell in line.split()[-2:])
        assert measured >= 99 if computed == 100 else 50 < measured < computed
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "!" not in scalelong.apply(fresh("uvit"), "skip-norm").summary()


def test_of_gates_before_a_group_norm_the_summary_tells_and_nobody_warns():
    """The paper has them there. What they have in common in a group is undone, and that is most at first."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for spec in ("none", "cs:1", "scalar"):
            assert "!" not in scalelong.apply(fresh(), spec).summary()
        for spec in ("ls", "ie"):
            text = scalelong.apply(fresh(), spec).summary()
            assert "! 97% of the skip channels" in text
            assert "what the gates of a group have in common" in text
            assert "in part" in text
        assert "!" not in scalelong.apply(fresh(), "ls", placement="norm").summary()
        assert "undone" not in scalelong.apply(fresh(), "cs:0.5", placement="norm").summary()
        assert "0%" in scalelong.apply(fresh("hunyuan"), "cs:0.5").summary()


def test_the_scalings_parameters_are_in_the_models_once():
    for name in ("unet2d", "uvit"):
        for spec in ("ls", "ls-per-skip", "ie", "scalar"):
            model = fresh(name)
            before = {id(p) for p in model.parameters()}
            handle = scalelong.apply(model, spec)
            added = [id(p) for p in model.parameters() if id(p) not in before]
            assert sorted(added) == sorted(map(id, handle.parameters()))
            assert added


# What it works under


@pytest.mark.parametrize(
    ("name", "spec", "backend"),
    [
        ("uvit", "ls", "aot_eager"),
        ("unet2d", "ls", "aot_eager"),
        *(
            pytest.param(name, spec, "eager", marks=[] if spec == "ls-per-skip" else [pytest.mark.slow])
            for name in ("uvit", "unet2d", "sd15", "hunyuan")
            for spec in ("cs:0.7", "ls", "ls-per-skip")
        ),
    ],
)
def test_compiles_without_graph_breaks(name, spec, backend):
    case = CASES[name]
    for placement in case.placements:
        model = fresh(name)
        scalelong.apply(model, spec, placement=placement)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        assert scalelong.scaling_of(compiled).model is model
        out = case.call(compiled)
        torch.testing.assert_close(out, case.call(model))
        out.square().sum().backward()
        assert all(p.grad is not None for p in scalelong.scaling_of(model).parameters())


@pytest.mark.slow
def test_compiles_with_inductor():
    case, model = CASES["uvit"], fresh("uvit")
    scalelong.apply(model, "ls")
    torch._dynamo.reset()
    torch.testing.assert_close(
        case.call(torch.compile(model, fullgraph=True)), case.call(model), rtol=1e-4, atol=1e-5
    )


def test_controlnet_residuals_are_added_before_scaling():
    case = CASES["sd15"]
    inputs = case.cast(torch.float64)
    shapes = [(32, 8), (32, 8), (32, 4), (64, 4)]
    residuals = [torch.randn(2, c, s, s, dtype=torch.float64) for c, s in shapes]
    mid = torch.zeros(2, 64, 4, 4, dtype=torch.float64)

    def run(model, residuals):
        return model(**inputs, down_block_additional_residuals=residuals, mid_block_additional_residual=mid).sample

    scaled, plain = case.model(torch.float64), case.model(torch.float64)
    with pytest.warns(UserWarning, match="look trained"):
        scalelong.apply(scaled, "uniform:0.5")

    # κ·(skip + r) computed by a plain model whose up blocks get halved skips.
    def halve(_, args, kwargs):
        return args, kwargs | {"res_hidden_states_tuple": tuple(s / 2 for s in kwargs["res_hidden_states_tuple"])}

    for block in plain.up_blocks:
        block.register_forward_pre_hook(halve, with_kwargs=True)
    torch.testing.assert_close(run(scaled, residuals), run(plain, residuals))
    assert not torch.allclose(run(scaled, residuals), run(scaled, [r / 2 for r in residuals]))


def test_an_ema_copy_follows_only_itself():
    model = fresh()
    scalelong.apply(model, "ls-per-skip")
    ema = copy.deepcopy(model)
    output = CASES["unet2d"].call(ema)
    optimiser = torch.optim.SGD(scalelong.scaling_of(model).parameters(), 10.0)
    CASES["unet2d"].call(model).square().mean().backward()
    optimiser.step()
    assert torch.equal(CASES["unet2d"].call(ema), output)
    assert not torch.equal(CASES["unet2d"].call(model), output)


def test_a_whole_model_survives_pickling(tmp_path):
    for placement in ("concat", "norm"):
        model = fresh()
        scalelong.apply(model, "ls", placement=placement)
        torch.save(model, tmp_path / "model.pt")
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        assert torch.equal(CASES["unet2d"].call(loaded), CASES["unet2d"].call(model))
        scalelong.scaling_of(loaded).remove()
        assert fingerprint(loaded)[1] == fingerprint(fresh())[1]


def test_gates_follow_the_models_precision_and_device():
    model = fresh().to(torch.bfloat16)
    scalelong.apply(model, "ls")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert CASES["unet2d"].call(model, torch.bfloat16).dtype == torch.bfloat16
    with torch.device("meta"):
        assert all(p.is_meta for p in scalelong.build("cifar10-unet", scaling="ls").parameters())


def test_keep_function_refuses_a_coefficient_without_an_inverse():
    refused(fresh("uvit"), "has a 0", "scalar:0", keep_function=True)
    refused(fresh("uvit"), "has a 0", "cs:1e-320", keep_function=True)


def test_keep_function_refuses_an_overflow_in_half_precision():
    model = fresh("uvit").half()
    says = r"out_blocks\.0 times .* overflow torch\.float16; convert the model to float32"
    refused(model, says, "cs:0.001", keep_function=True)


def test_a_failure_in_the_middle_leaves_the_model_alone():
    with torch.inference_mode():
        model = fresh("uvit")
    with pytest.raises(RuntimeError, match="[Ii]nference"):
        scalelong.apply(model, "cs:0.5", keep_function=True)
    assert scalelong.scaling_of(model) is None
    assert model.config.scaling == "none"


def test_coefficients_of_a_model_compiled_in_place():
    case, model = CASES["uvit"], fresh("uvit")
    handle = scalelong.apply(model, "ls")
    want = handle.coefficients(**case.inputs)
    model.compile(backend="aot_eager")
    case.call(model)
    assert all(torch.equal(a, b) for a, b in zip(handle.coefficients(**case.inputs), want, strict=True))


@pytest.mark.parametrize("placement", ["concat", "norm"])
def test_hooks_keep_no_activations(placement):
    case, model = CASES["sd15"], fresh("sd15")
    scalelong.apply(model, "ls", placement=placement)

    def living():
        gc.collect()
        return sum(isinstance(o, torch.Tensor) for o in gc.get_objects())

    with torch.no_grad():
        case.call(model)
        before = living()
        case.call(model)
        assert living() == before


def test_keep_function_is_true_or_false():
    refused(fresh(), "keep_function is True or False, got 'yes'", "ls", keep_function="yes")


def test_the_warning_about_trained_weights_asks_for_nothing_that_is_refused():
    model = scalelong.UViT(sample_size=8, patch_size=4, hidden_size=16, num_layers=2, num_attention_heads=2)
    torch.nn.init.constant_(model.norm.weight, 1.5)
    with pytest.warns(UserWarning, match="look trained.*'ls' with keep_function=True"):
        scalelong.apply(model, "skip-norm")


def test_a_gate_per_channel_is_not_said_to_be_undone():
    """What a norm of several channels divides out is one number for all of them."""
    summary = scalelong.apply(CASES["unet2d"].make(), "ls").summary()
    assert "undone by norm" in summary
    assert "100%" not in summary
