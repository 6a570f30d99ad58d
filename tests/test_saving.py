import copy
import json
import warnings

import pytest
import torch

import scalelong
from tests.contracts.zoo import CASES


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    model = CASES["unet2d"].make().eval()
    scalelong.apply(model, "ls")
    model.save_pretrained(tmp_path / "unet")
    return model, tmp_path / "unet"


def test_sharded_variants_and_subfolders_load(saved):
    model, folder = saved
    model.save_pretrained(folder.parent / "sharded" / "unet", max_shard_size="200KB", variant="fp16")
    assert len(list((folder.parent / "sharded" / "unet").glob("*.safetensors"))) > 1
    loaded = scalelong.load(folder.parent / "sharded", subfolder="unet", variant="fp16").eval()
    assert torch.equal(CASES["unet2d"].call(loaded), CASES["unet2d"].call(model))


@pytest.mark.parametrize("sharded", [{}, {"max_shard_size": "200KB"}])
def test_the_only_variant_is_taken_where_nothing_else_is_there(saved, sharded):
    model, folder = saved[0], saved[1].parent / "half"
    model.save_pretrained(folder, variant="fp16", **sharded)
    assert torch.equal(CASES["unet2d"].call(scalelong.load(folder).eval()), CASES["unet2d"].call(model))
    model.save_pretrained(folder, variant="ema")
    with pytest.raises(ValueError, match=r"there is one variant, got ema, fp16 in .*; choose with load"):
        scalelong.load(folder)


def test_precision_is_handed_on(saved):
    loaded = scalelong.load(saved[1], torch_dtype=torch.bfloat16)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}


def test_loading_is_quiet_and_plain_loading_is_not(saved, caplog):
    from diffusers import UNet2DModel

    scalelong.load(saved[1])
    assert not caplog.records
    UNet2DModel.from_pretrained(saved[1])
    assert "scalelong" in caplog.text
    assert "skip_scaling.gates" in caplog.text


def test_a_model_saved_without_a_scaling_comes_back_plain(tmp_path):
    model = CASES["unet2d"].make().eval()
    model.save_pretrained(tmp_path)
    loaded = scalelong.load(tmp_path)
    assert scalelong.scaling_of(loaded) is None
    assert torch.equal(CASES["unet2d"].call(loaded), CASES["unet2d"].call(model))


def test_a_folder_that_lacks_gates_is_named(saved):
    from safetensors.torch import load_file, save_file

    file = saved[1] / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    del tensors["skip_scaling.gates.32.layer2.bias"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"'ls', but the weights lack skip_scaling\.gates\.32\.layer2\.bias"):
        scalelong.load(saved[1])


def edit(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no config.json in"),
        (lambda folder: (folder / "config.json").write_text("{"), "is not JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "names no model class"),
        (lambda folder: edit(folder, _class_name="Mystery"), "'Mystery', which is neither"),
        (lambda folder: edit(folder, scalelong={"scaling": "cs:7"}), "'scalelong' in config.json has a scaling"),
        (lambda folder: edit(folder, scalelong="cs:0.7"), "'scalelong' in config.json has a scaling"),
        (
            lambda folder: edit(
                folder, scalelong={"scaling": "cs:7", "placement": "concat", "keep_function": False}
            ),
            "κ lies in",
        ),
        (
            lambda folder: edit(folder, scalelong={"scaling": "cs:0.7", "placement": "x", "keep_function": False}),
            "config.json names the placement 'x'",
        ),
        (
            lambda folder: (folder / "config.json").rename(folder / "model_index.json"),
            "it is a pipeline: name the subfolder",
        ),
    ],
)
def test_spoilt_folders_get_a_sentence(saved, spoil, says):
    spoil(saved[1])
    with pytest.raises(ValueError, match=says):
        scalelong.load(saved[1])


def test_no_folder_is_no_hub_name(tmp_path):
    for path in (tmp_path / "nothing", "./nothing", "nothing"):
        with pytest.raises(ValueError, match="there is no folder"):
            scalelong.load(path)


def test_a_hub_name_goes_to_the_hub(monkeypatch, saved):
    import huggingface_hub

    asked = []

    def snapshot_download(name, **kwargs):
        asked.append((name, kwargs))
        return str(saved[1].parent)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    loaded = scalelong.load("someone/pipeline", subfolder="unet", revision="abc", local_files_only=True)
    assert scalelong.scaling_of(loaded) is not None
    patterns = ["unet/*.json", "unet/*.safetensors"]
    assert asked == [
        ("someone/pipeline", {"allow_patterns": patterns, "revision": "abc", "local_files_only": True})
    ]


def test_a_class_of_ones_own_is_given(saved):
    from diffusers import UNet2DModel

    class MyUNet(UNet2DModel):
        pass

    edit(saved[1], _class_name="MyUNet")
    with pytest.raises(ValueError, match=r"'MyUNet', which is neither.*load\(path, cls=YourClass\)"):
        scalelong.load(saved[1])
    loaded = scalelong.load(saved[1], cls=MyUNet).eval()
    assert isinstance(loaded, MyUNet)
    assert torch.equal(CASES["unet2d"].call(loaded), CASES["unet2d"].call(saved[0]))


def test_loading_info_is_not_returned(saved):
    with pytest.raises(ValueError, match="returns the model alone"):
        scalelong.load(saved[1], output_loading_info=True)


def test_a_folder_of_diffusers_ema_names_the_gates_that_it_left_out(saved):
    from diffusers import UNet2DModel
    from diffusers.training_utils import EMAModel

    model, folder = saved
    EMAModel(model.parameters(), model_cls=UNet2DModel, model_config=model.config).save_pretrained(folder)
    with pytest.raises(ValueError, match=r"EMAModel\.save_pretrained leaves gates out.*ema\.copy_to"):
        scalelong.load(folder)


@pytest.mark.parametrize("spec", ["ls", "ls-per-skip"])
def test_gates_and_their_average_survive_the_hooks_of_a_diffusers_script(tmp_path, spec):
    from accelerate import Accelerator
    from diffusers.training_utils import EMAModel

    def set_gates(model, value):
        for parameter in scalelong.scaling_of(model).parameters():
            torch.nn.init.constant_(parameter, value)

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(CASES["unet2d"].make())
    scalelong.apply(model, spec)
    set_gates(model, 0.5)
    ema = EMAModel(model.parameters())

    def save_hook(models, weights, folder):
        for model in models:
            model.save_pretrained(f"{folder}/unet")
            weights.pop()
        torch.save(ema.state_dict(), f"{folder}/ema.pt")

    def load_hook(models, folder):
        while models:
            models.pop().load_state_dict(scalelong.load(folder, subfolder="unet").state_dict())
        ema.load_state_dict(torch.load(f"{folder}/ema.pt"))

    accelerator.register_save_state_pre_hook(save_hook)
    accelerator.register_load_state_pre_hook(load_hook)
    set_gates(model, 0.125)
    accelerator.save_state(tmp_path)
    set_gates(model, 3.0)
    ema.shadow_params = [torch.zeros_like(p) for p in ema.shadow_params]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*gate")
        accelerator.load_state(tmp_path)
    assert all((p == 0.125).all() for p in scalelong.scaling_of(model).parameters())
    averaged = copy.deepcopy(model)
    ema.copy_to(averaged.parameters())
    averaged.save_pretrained(tmp_path / "averaged")
    loaded = scalelong.load(tmp_path / "averaged")
    assert all((p == 0.5).all() for p in scalelong.scaling_of(loaded).parameters())


def test_a_loaded_models_config_stays_json(saved):
    json.dumps(dict(scalelong.load(saved[1]).config))
