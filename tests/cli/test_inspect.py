import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import scalelong
from tests.contracts.zoo import CASES

SCALELONG = Path(sys.executable).with_name("scalelong")


def scalelong_command(*args):
    return subprocess.run([SCALELONG, *map(str, args)], capture_output=True, text=True)


def test_a_preset_prints_its_coefficients_outermost_first():
    run = scalelong_command("inspect", "cifar10-uvit-s", "--scaling", "cs:0.5")
    assert run.returncode == 0
    rows = [line.split() for line in run.stdout.splitlines()[3:]]
    assert [row[-1] for row in rows] == ["1", "0.5", "0.25", "0.125", "0.0625", "0.03125"]
    assert rows[0][:3] == ["0", "out_blocks.5", "257×512"]
    assert "44,255,328 parameters" in run.stdout
    assert not run.stderr


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("cifar10-uvit-s", "--scaling", "cs:1.5"), "error: cs: κ lies in (0, 1], got 1.5; try 'cs:0.7'."),
        (("cifar10-uvit",), "neither a folder nor a preset; did you mean cifar10-uvit-s? The presets are digits"),
        (("no-such-thing",), "neither a folder nor a preset; the presets are digits, cifar10-uvit-xs"),
        (("cifar10-uvit-xs", "--scaling", "cs:0.5", "--placement", "norm"), "no norm after the concatenation"),
    ],
)
def test_bad_usage_exits_2_with_a_sentence(args, says, capsys, monkeypatch):
    from scalelong.cli import main

    monkeypatch.setattr(sys, "argv", ["scalelong", "inspect", *args])
    with pytest.raises(SystemExit) as exit_:
        main.main()
    assert exit_.value.code == 2
    err = capsys.readouterr().err
    assert says in err
    assert "Traceback" not in err


def invoke(*args):
    from typer.testing import CliRunner

    from scalelong.cli.main import app

    result = CliRunner().invoke(app, ["inspect", *map(str, args)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_json_is_for_scripts():
    data = json.loads(invoke("cifar10-unet", "--scaling", "ls", "--json"))
    assert data["parameters"] == 35_746_307 + 10_648
    assert data["scaling_parameters"] == 10_648
    assert [skip["index"] for skip in data["skips"]] == list(range(12))
    assert data["skips"][0] | {"undone_by_norm": 1.0} == {
        "index": 0,
        "module": "up_blocks.3.resnets.2",
        "shape": "128×32×32",
        "coefficient": None,
        "undone_by_norm": 1.0,
    }


@pytest.mark.parametrize("name", ["unet2d", "uvit", "sdxl", "hunyuan"])
def test_a_saved_folder_shows_its_own_scaling_or_another(name, tmp_path):
    torch.manual_seed(0)
    model = CASES[name].make()
    scalelong.apply(model, "cs:0.9")
    model.save_pretrained(tmp_path)
    assert "cs:0.9 at concat" in invoke(tmp_path)
    assert "ls-per-skip at concat" in invoke(tmp_path, "--scaling", "ls-per-skip")


def test_a_pipeline_folder_shows_its_unet(tmp_path):
    from diffusers import DDPMPipeline, DDPMScheduler

    DDPMPipeline(CASES["unet2d"].make(), DDPMScheduler()).save_pretrained(tmp_path)
    out = invoke(tmp_path, "--scaling", "cs:0.5", "--placement", "norm")
    assert "cs:0.5 at norm on UNet2DModel: 4 long skips" in out


def test_help_has_an_example_and_the_version_is_there():
    run = scalelong_command("inspect", "--help")
    assert "scalelong inspect cifar10-uvit-s --scaling cs:0.5" in " ".join(run.stdout.split())
    assert scalelong_command("--version").stdout == f"scalelong {scalelong.__version__}\n"
    assert scalelong_command("inspekt").returncode == 2


def test_a_run_shows_its_network_and_its_scaling(tmp_path):
    from scalelong.config import to_dict, with_overrides
    from scalelong.presets import run_preset

    changes = ["model.scaling=cs:0.5", "model.changes.num_layers=4", "model.changes.hidden_size=32"]
    (tmp_path / "config.json").write_text(json.dumps(to_dict(with_overrides(run_preset("digits"), changes))))
    data = json.loads(invoke(tmp_path, "--json"))
    assert data["scaling"] == "cs:0.5"
    assert [skip["coefficient"] for skip in data["skips"]] == [1.0, 0.5]
