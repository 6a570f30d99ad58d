"""`scalelong theory` and `scalelong kappa` as a user types them."""

import json
import re
import sys

import diffusers
import pytest
import torch
from typer.testing import CliRunner

import scalelong
from scalelong.cli import main
from scalelong.cli.main import app
from scalelong.cli.theory import statement_text
from scalelong.data.prepare import prepare
from scalelong.data.sources import digits
from scalelong.report.kappa import probe_section
from scalelong.report.page import write_page
from scalelong.report.theory import read_theory, theory_sections
from scalelong.stability.models import open_model
from scalelong.stability.probe import judge
from scalelong.stability.robustness import judge_direction
from scalelong.stability.theory import judge_lemma
from tests.contracts.zoo import CASES
from tests.stability.test_probe import NONE, score


def invoke(*args):
    result = CliRunner().invoke(app, [*map(str, args)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_sum_is_solved():
    found = json.loads(invoke("kappa", "--sum", 5, "--skips", 6, "--json"))
    assert found["kappa"] == pytest.approx(0.96256, abs=1e-5)
    assert found["spec"] == "cs:0.963"
    assert "κ = 0.9625" in invoke("kappa", "--sum", 5, "--skips", 6)
    assert json.loads(invoke("kappa", "digits", "--sum", 5, "--json")) == found  # which has six skips


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small U-ViT for digits as a saved folder, and the digits."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("small")
    scalelong.UViT(
        sample_size=8, in_channels=1, patch_size=4, hidden_size=16, num_layers=4, num_attention_heads=2
    ).save_pretrained(folder / "model")
    prepare(digits(), folder / "digits")
    return folder


def test_kappa_writes_a_page_where_it_is_asked_for_alone(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("scalelong.report.kappa.data_section", lambda *_: pytest.fail("drawn"))
    args = ["kappa", small / "model", "--data", small / "digits", "--num", 1000, "--batch", 4, "--batches", 1]
    assert "report" not in json.loads(invoke(*args, "--json"))
    assert re.search(r"\nfrom the data: cs:0\.\d+\nfrom the model, for a flat gain .*\n$", invoke(*args))
    assert not list(tmp_path.iterdir())


def test_data_and_model_give_advice_and_a_page(small, tmp_path):
    args = ["kappa", small / "model", "--data", small / "digits", "--process", "ddpm", "--num", 1000]
    args += ["--batch", 4, "--batches", 1, "--out", tmp_path / "k.html"]
    found = json.loads(invoke(*args, "--json"))
    assert (found["data"]["draws"], found["data"]["images"]) == (1000, 1000)  # of 1,797
    assert found["data"]["num_skips"] == len(found["model"]["merges"]) == 2
    assert set(found["specs"]) == {"data", "model"}
    for spec in found["specs"].values():
        scalelong.parse_scaling(spec)  # to paste
    page = (tmp_path / "k.html").read_text()
    assert page.count("<svg") == 2
    assert "κ from the data" in page
    assert "κ from the model" in page
    assert not re.findall(r'(?:src|href)="(?!data:|#)([^"]+)', page)
    text = invoke(*args)
    for part in ("ratio of means", "M_0 =", "from the data: ", "worse than none in our runs", "its κ here"):
        assert part in " ".join(text.split())


def test_a_model_alone_gives_its_flat_gain_with_a_caution(small, tmp_path):
    args = ["kappa", small / "model", "--batch", 2, "--batches", 1, "--out", tmp_path / "k.html"]
    spec = json.loads(invoke(*args, "--json"))["specs"]["model"]
    scalelong.parse_scaling(spec)
    said = " ".join(invoke(*args).split())
    assert f"for a flat gain (worse than none in our runs): {spec}" in said
    assert "take κ from images (--data) or from short runs (--probe)" in said


def test_where_a_norm_undoes_constants_kappa_says_how_much_as_inspect_does_and_names_the_placement(small, tmp_path):
    folder = tmp_path / "unet"
    diffusers.UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(32, 64),
        down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2, norm_num_groups=16,
    ).save_pretrained(folder)  # fmt: skip
    args = ["kappa", folder, "--data", small / "digits", "--num", 200, "--batch", 2, "--batches", 1]
    found, text = json.loads(invoke(*args, "--json")), invoke(*args)
    share = re.search(r"! (\d+%) of the skip channels", invoke("inspect", folder, "--scaling", "cs:0.7"))[1]
    assert f"on {share} of the skips' channels" in text
    assert f"{found['model']['undone_by_norm']:.0%}" == share == "98%"  # 97 % is the mean over skips
    spec = found["specs"]["data"]
    assert str(scalelong.parse_scaling(spec)) == spec  # to paste into what takes a spec alone
    assert f'\nfrom the data: {spec}, with placement="norm"\n' in text


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["kappa"], "κ comes from --sum and --skips, from --data, from a MODEL or from --probe; got none."),
        (["kappa", "--sum", "5"], "say how many either with --skips or by a MODEL; got neither"),
        (["kappa", "digits", "--sum", "5", "--skips", "6"], "got both, --skips 6 and digits"),
        (["kappa", "nothing", "--sum", "5"], "neither a folder nor a preset"),
        (["kappa", "--sum", "5", "--skips", "6", "--data", "nowhere"], "solved by itself; leave out --data"),
        (["kappa", "--sum", "5", "--skips", "6", "--probe"], "solved by itself; leave out --probe"),
        (["kappa", "--sum", "5", "--skips", "6", "--out", "k.html"], "solved by itself; leave out --out"),
        (["kappa", "{small}/model", "--probe"], "--probe trains the recipe of a preset, and"),
        (["kappa", "digits", "--init", "{small}/model"], "add --probe, or name it as the MODEL"),
        (
            ["kappa", "--probe", "--data", "{small}/digits", "--set", "model.changes.num_layers=2"],
            "κ acts from the second skip on, and this net has 1",
        ),
        (["kappa", "--sum", "6", "--skips", "6"], "no κ below 1 has Σκ² = 6 over 6 skips"),
        (["kappa", "nothing"], "neither a folder nor a preset"),
        (["kappa", "--data", "{small}/digits"], "give a MODEL, or --skips"),
        (["kappa", "--data", "{small}/digits", "--skips", "6", "--process", "x"], "unknown noise process 'x'"),
        (["kappa", "--data", "nowhere", "--skips", "6"], "no prepared dataset"),
        (["kappa", "cifar10-uvit-xs", "--data", "{small}/digits", "--num", "100"], "takes images of 3 channels"),
        (["kappa", "--probe", "--kappas", "1,x"], "--kappas are numbers separated by commas"),
        (["kappa", "--probe", "--kappas", "0.9,0.8"], "κ = 1 is one of two or more"),
        (["kappa", "--probe", "--seeds", "0"], "at least two different seeds"),
        (["kappa", "--probe", "cifar10-nothing"], "unknown recipe 'cifar10-nothing'"),
        (["theory", "--skips", "1"], "num_skips is at least 2, got 1"),
        (["theory", "--data", "nowhere"], "no prepared dataset"),
    ],
)
def test_bad_usage_exits_2_with_a_sentence(args, says, small, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["scalelong", *(arg.format(small=small) for arg in args)])
    with pytest.raises(SystemExit) as stopped:
        main.main()
    assert stopped.value.code == 2
    assert says in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


def hours_to_the_end(small):
    scalings, how = "none,cs:0.8,cs:0.6,cs:0.4", ["--dry-run", "--json", "--set", "train.steps=200"]
    told = json.loads(invoke("compare", "--data", small / "digits", "--scalings", scalings, "--seeds", "0,1", *how))
    return told["hours"]


def test_a_dry_probe_writes_nothing(small, tmp_path):
    args = ["kappa", "--probe", "--dry-run", "--data", small / "digits", "--runs", tmp_path / "runs"]
    args += ["--kappas", "1,0.8,0.6,0.4", "--seeds", "0,1", "--rounds", "2"]
    found = json.loads(invoke(*args, "--json"))
    assert [r["runs"] for r in found["rounds"]] == [8, 4]
    assert found["total_steps"] == 8 * 100 + 4 * 100  # the four go on from step 100
    text = invoke(*args)
    table = [line.split() for line in text.splitlines() if line[:1].isdigit()]
    assert table[:2] == [["1", "4", "8", "100"], ["2", "2", "4", "200"]]
    assert "8 runs of 1,200 steps in all under " in text
    assert re.search(r"runs at once, about \d+ \w+ here for the steps alone, by their arithmetic", text)
    flops = found["total_steps"] / (8 * 200)  # all eight to the last step would be 1
    assert found["hours"] == pytest.approx(flops * hours_to_the_end(small), rel=0.01)
    assert '"train": {' in text
    assert text.endswith("nothing was written.\n")
    assert not list(tmp_path.iterdir())


def test_the_theory_is_a_section_of_any_page(tmp_path):
    lemma = judge_lemma([{"data": "x", "process": "ddpm", "closed_form": 0.8163, "measured": 0.8162}])
    direction = judge_direction([{"pair": 1.5, "cs": 1.0, "cs-reversed": 2.0}], 1.118)
    file = tmp_path / "theory.json"
    file.write_text(json.dumps({"statements": [lemma.as_dict(), direction.as_dict()]}))
    sections = theory_sections(read_theory(file))
    write_page("x", "y", [*sections, probe_section(judge([[NONE, score("cs:0.7", (0.4, 0.5, 0.6))]]).as_dict())],
               tmp_path / "page.html", "scalelong theory")  # fmt: skip
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 3
    assert page.count("Verdict: holds.") == 2
    assert "beyond the spread" in page
    file.write_text("{}")
    with pytest.raises(ValueError, match="not what scalelong theory --json prints"):
        read_theory(file)


def test_a_statement_fits_into_80_columns_and_names_each_condition_once():
    where = "each pair of blocks keeps the gain that the theorem asks of it, at every width"
    rows = [{"data": where, "process": p, "closed_form": 0.8, "measured": m} for p, m in (("sd", 0.8), ("ddpm", 1))]
    text = statement_text(judge_lemma(rows).as_dict(), 80)
    assert max(map(len, text.splitlines())) <= 80
    assert " ".join(text.split()) == (
        f"Lemma 3.2: does not hold where {where}: ✓ sd: measured 0.8000, closed form 0.8000 "
        "✗ ddpm: measured 1.0000, closed form 0.8000"
    )


@pytest.mark.slow
def test_theory_runs_small(tmp_path):
    out = tmp_path / "theory.html"
    found = json.loads(invoke("theory", "--skips", 3, "--width", 32, "--inits", 2, "--out", out, "--json"))
    assert [s["name"] for s in found["statements"]][:4] == ["Lemma 3.2", "Thm 3.1", "Thm 3.3", "Thm 3.4"]
    assert all(re.match("holds|does not hold", s["verdict"]) for s in found["statements"])
    assert out.read_text().count("<svg") == 6


@pytest.mark.slow
def test_a_probe_of_a_few_steps(small, tmp_path):
    settings = ["model.changes.hidden_size=16", "model.changes.num_layers=4", "train.batch_size=4"]
    args = ["kappa", "--probe", "--data", small / "digits", "--kappas", "1,0.7", "--seeds", "0,1", "--steps", 40]
    args += ["--rounds", 1, "--runs", tmp_path / "runs", "--out", tmp_path / "p.html"]
    args += [x for s in settings for x in ("--set", s)]
    found = json.loads(invoke(*args, "--json"))
    assert "beyond the spread" in found["advice"][0]
    assert "κ from short runs" in (tmp_path / "p.html").read_text()


@pytest.mark.parametrize("name", ["unet3d", "motion"])
def test_kappa_measures_models_of_videos(name, tmp_path):
    CASES[name].model().save_pretrained(tmp_path / "video")
    found = json.loads(invoke("kappa", tmp_path / "video", "--batch", 2, "--batches", 1, "--json"))
    assert len(found["model"]["merges"]) == len(found["model"]["coefficients"]) > 1
    assert all(merge["main_variance"] > 0 for merge in found["model"]["merges"])


def test_a_model_that_is_told_an_image_besides_its_video_is_refused(tmp_path):
    CASES["i2vgen"].model().save_pretrained(tmp_path / "video")
    with pytest.raises(ValueError, match="an I2VGenXLUNet, .* call scalelong.stability.calibration.calibrate"):
        open_model(str(tmp_path / "video"))


def test_a_model_scaled_behind_the_norm_is_measured_without(tmp_path):
    model = CASES["unet2d"].model()
    scalelong.apply(model, "cs:0.7", placement="norm")
    model.save_pretrained(tmp_path / "scaled")
    with pytest.warns(UserWarning, match="is scaled by cs:0.7 at norm, which is taken off here"):
        opened = open_model(str(tmp_path / "scaled"))
    assert scalelong.scaling_of(opened.model) is None
