"""The benchmarks at toy size: they run, and their figures add up."""

import dataclasses
import json
import math
import time
from datetime import date

import numpy as np
import pytest
import torch
import typer
from typer import Typer
from typer.testing import CliRunner

from benchmarks import (
    alarms,
    expectations,
    fault_sets,
    faults,
    fid,
    kernels,
    measure,
    monitor,
    profile,
    readme,
    sampling,
    scaling,
    signals,
    startup,
    throughput,
)
from scalelong import experiment

TINY = ["--set", "model.changes.hidden_size=16", "--set", "model.changes.num_layers=2"]


def run(module, *arguments):
    app = Typer()
    app.command()(module.main)
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def rows_in(folder):
    (file,) = folder.glob("*.json")
    return measure.read(file)


def test_throughput(tmp_path):
    output = run(
        throughput, "digits", *TINY, "--batch", "4", "--only", "eager", "--rounds", "2", "--steps", "1",
        "--out", str(tmp_path),
    )  # fmt: skip
    rows = rows_in(tmp_path)
    assert [row.scaling for row in rows] == ["none", "cs:0.7", "ls"]
    assert "ms/step" in output
    for row in rows:
        assert row.images_per_s == pytest.approx(4 / row.ms_per_step * 1e3, rel=1e-2)
        assert row.peak_tflops > 0
    assert set(json.loads(next(tmp_path.glob("*.json")).read_text())[0]) >= {
        "name", "scaling", "batch", "ms_per_step", "images_per_s", "tflops", "peak_tflops", "memory_gib",
        "hardware", "torch",
    }  # fmt: skip


def test_precisions_are_timed_in_one_run(tmp_path):
    run(
        throughput, "digits", *TINY, "--batch", "4", "--only", "eager", "--rounds", "1", "--steps", "1",
        "--scalings", "none", "--precisions", "bf16,fp32", "--out", str(tmp_path),
    )  # fmt: skip
    assert [row.name for row in rows_in(tmp_path)] == ["scalelong, eager, bf16", "scalelong, eager, fp32"]


def test_the_authors_code_takes_part(tmp_path):
    """A checkout is a folder with libs/uvit.py; this one has the same signature, and a net of one layer."""
    (tmp_path / "libs").mkdir()
    (tmp_path / "libs" / "uvit.py").write_text(
        "import torch\n"
        "class UViT(torch.nn.Module):\n"
        "    def __init__(self, img_size, patch_size, in_chans, embed_dim, depth, num_heads, scalelong, kappa):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Conv2d(in_chans, in_chans, 1)\n"
        "    def forward(self, x, t):\n"
        "        return self.layer(x)\n"
    )
    config = throughput.with_overrides(throughput.recipe("cifar10-uvit-xs"), [])
    (none, cs, ls) = throughput.authors(tmp_path, config, 2)
    assert (none.scaling, cs.scaling, ls.scaling) == ("none", "cs:0.7", "ls")
    none.start()()


def test_scaling_follows_the_flops(tmp_path):
    output = run(
        scaling, "digits", *TINY, "--set", "train.batch_size=4", "--axes", "batch,tokens", "--rounds", "1",
        "--steps", "1", "--out", str(tmp_path),
    )  # fmt: skip
    assert "batch: time grows as FLOPs^" in output
    rows = rows_in(tmp_path)
    assert [row.batch for row in rows] == [2, 4, 8, 4, 4, 4]
    sides = [side // 2 for side in (4, 8, 16)]  # in patches of 2; the time token comes on top
    assert [row.name for row in rows[3:]] == [f"tokens {side**2 + 1}" for side in sides]


def test_the_exponent_of_a_known_growth():
    def row(ms, work):
        return measure.Row("x", "none", 1, ms, 0, 1, work / ms, 1, 0, "", "")

    assert math.isclose(scaling.exponent([row(1, 1), row(2, 2), row(4, 4)]), 1)
    assert math.isclose(scaling.exponent([row(1, 1), row(2, 4)]), 0.5)


def test_sampling_and_signals(tmp_path):
    out = run(sampling, "digits", "--num", "2", "--batch", "2", "--steps", "2", "--out", str(tmp_path / "a"))
    assert "2 images:" in out
    out = run(signals, "digits", *TINY, "--rounds", "1", "--steps", "1", "--out", str(tmp_path / "b"))
    assert "of the time" in out
    assert [row.name for row in rows_in(tmp_path / "b")] == ["plain step", "observed step"]


def test_where_a_step_goes(tmp_path):
    out = run(
        profile, "digits", *TINY, "--batch", "4", "--steps", "1", "--rounds", "1", "--out", str(tmp_path)
    )  # fmt: skip
    assert "| matrix products |" in out
    found = json.loads((tmp_path / f"{date.today()}-digits-batch-4.json").read_text())
    in_kernels = sum(kernel["ms"] for kernel in found["kernels"])
    assert found["accounted"] == pytest.approx(in_kernels / found["step_ms"], abs=1e-3)
    run(profile, "digits", "--sampling", *TINY, "--batch", "4", "--steps", "1", "--out", str(tmp_path))
    whole, forward = (
        json.loads((tmp_path / f"{date.today()}-digits{what}-batch-4.json").read_text())
        for what in ("", "-sampling")
    )
    assert not any("backward" in kernel["name"].lower() for kernel in forward["kernels"])
    assert any("backward" in kernel["name"].lower() for kernel in whole["kernels"])


def test_an_operator_s_time_is_its_own_alone():
    """Counted with what it calls, it would be there several times, and all of them take longer than they took."""
    x = torch.randn(300, 300)
    began = time.perf_counter()
    kernels, pauses_ms = profile.profiled(lambda: torch.nn.functional.linear(x, x, x[0]).relu_(), steps=20)
    assert sum(kernel.ms for kernel in kernels) * 20 < (time.perf_counter() - began) * 1e3
    assert {"aten::linear", "aten::addmm"} <= {kernel.name for kernel in kernels}
    assert pauses_ms == 0


def test_pauses_are_where_nothing_runs():
    assert profile.pauses([]) == 0
    assert profile.pauses([(0, 2), (1, 5), (3, 4), (7, 8), (8, 9), (11, 12)]) == 2 + 2


def test_attention_in_several_ways(tmp_path):
    out = run(
        kernels, "--batch", "1", "--tokens", "65", "--heads", "2", "--dim", "32", "--rounds", "1",
        "--out", str(tmp_path),
    )  # fmt: skip
    assert "torch, cuDNN: left out" in out  # needs a GPU
    rows = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert "torch, plain" in [row["name"] for row in rows]
    assert all(row["forward_ms"] > 0 for row in rows)


def test_blocks_are_no_larger_than_there_are_tokens():
    launches = [
        launch for contender in kernels.contenders(2, 65, on_gpu=True) for launch in contender.launch.values()
    ]
    assert {launch["BQ"] for launch in launches} == {32, 64}
    assert {launch["BK"] for launch in launches if "BK" in launch} == {32, 64}


def wrong_everywhere(qkv):
    return 2 * qkv[..., :64]


def wrong_for_one_token(qkv):
    out = kernels._by_torch(2, qkv)
    return torch.cat([out[:, :1] * 1.05, out[:, 1:]], dim=1)


def not_a_number(qkv):
    return kernels._by_torch(2, qkv) * float("nan")


@pytest.mark.parametrize("attend", [wrong_everywhere, wrong_for_one_token, not_a_number])
def test_an_attention_that_is_wrong_takes_no_part(tmp_path, monkeypatch, attend):
    wrong = kernels.Contender("wrong", attend)
    monkeypatch.setattr(kernels, "contenders", lambda heads, tokens, on_gpu: [wrong])
    out = run(kernels, "--batch", "1", "--tokens", "200", "--heads", "2", "--dim", "32", "--out", str(tmp_path))
    assert "wrong: left out (wrong by" in out


def test_kernels_are_told_apart_by_their_names():
    names = {
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT": "matrix products",
        "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc": "convolutions",
        "attention_backward": "attention",
        "bias_gelu_forward": "GELU and its bias",
        "triton_red_fused_native_layer_norm_native_layer_norm_backward_3": "norms, with the sums beside them",
        "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>": "AdamW, averages, gradient norm",
        "Memcpy DtoD (Device -> Device)": "copies and casts",
        "triton_poi_fused_add_3": profile.OTHER,
    }
    assert {name: profile.group_of(name) for name in names} == names


@pytest.mark.slow
def test_the_seconds_to_the_first_step(tmp_path):
    out = run(startup, "digits", *TINY, "--warm", "1", "--out", str(tmp_path))
    found = json.loads(out.split("written")[0])
    assert found["cold_s"] > 0
    assert len(found["warm_s"]) == 1


def test_a_start_that_fails_tells_why(tmp_path):
    with pytest.raises(RuntimeError, match="nonsense"):
        startup.first_step_s(["nonsense"], tmp_path / "run", {})


def test_fid_between_datasets(tmp_path):
    digits = str(experiment.open_data(None).folder)
    run(fid, digits, digits, "--features", "pixels", "--out", str(tmp_path / "fid.json"))
    found = json.loads((tmp_path / "fid.json").read_text())
    assert found["fid"] == pytest.approx(0, abs=1e-6)
    assert found["precision"] == found["recall"] == 1


def test_presets_on_latents_are_timed_on_images_of_their_shape(tmp_path):
    config = throughput.recipe("imagenet256-uvit-l")
    fitted = experiment.fitted_to(config, throughput.random_store(tmp_path / "store", config))
    assert (fitted.model.changes["sample_size"], fitted.model.changes["in_channels"]) == (32, 4)
    with pytest.raises(typer.BadParameter, match="got coco-uvit-s; take another"):
        throughput.recipe("coco-uvit-s")


def test_expectations_are_as_the_command_writes_them():
    page = expectations.PAGE.read_text()
    assert expectations.row("cifar10-uvit-xs") in page, "run: python -m benchmarks.expectations"
    assert [name for name in expectations.recipes() if f"| `{name}` |" not in page] == []


@pytest.mark.slow
def test_all_expectations_are_current():
    page = expectations.PAGE.read_text()
    assert expectations.updated(page) == page, "run: python -m benchmarks.expectations"


def test_what_the_monitor_costs(tmp_path):
    out = run(monitor, "digits", "--batch", "2", "--rounds", "2", "--interval", "4", "--out", str(tmp_path))
    assert "of it by 8 pairs" in out
    assert "by 2 pairs of blocks" in out
    (row,) = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert row["plain_ms"] > 0 < row["inside_ms"]
    assert row["loop_plain_ms"] > 0 <= row["loop_standard_error_ms"]
    assert row["interval"] == 4


def test_the_overhead_counts_a_look_once_an_interval_and_no_outlier():
    rounds = [[0.1] * 49 + [5.1]] * 6
    inside = [ms for one in rounds for ms in one]
    inside[3] = 40.0  # the machine did something else
    assert math.isclose(monitor.over_the_interval(inside, 50), (0.1 * 49 + 5.1) / 50)


def test_the_standard_error_of_a_median_is_that_of_many_repetitions():
    random = np.random.default_rng(0)
    found = [monitor.median_with_error(list(random.normal(2, 3, 101))) for _ in range(2000)]
    medians, errors = np.array(found).T
    assert medians.mean() == pytest.approx(2, abs=0.05)
    assert errors.mean() == pytest.approx(medians.std(), rel=0.05)


def test_the_step_that_passes_ten_times_the_median():
    losses = [9.0] * 100 + [1.0] * 100 + [5.0, 10.0, 10.1]
    assert faults.first_passing(losses) == 203
    assert faults.first_passing([*losses[:-1], 3.0]) is None
    assert faults.first_passing([*losses[:-1], math.nan]) == 203


@pytest.mark.slow
@pytest.mark.parametrize("fault", [fault_sets.TUNED[0], fault_sets.HELD_OUT[9]], ids=lambda r: r.name)
def test_a_fault_rings_and_the_same_run_without_it_does_not(fault):
    row = alarms.watch(dataclasses.replace(fault, steps=300))
    assert 200 < row["alarm"] < 280
    assert alarms.watch(dataclasses.replace(fault, steps=300, fault=None))["alarm"] is None


def test_the_readme_shows_the_newest_results():
    text = readme.README.read_text()
    assert readme.updated(text) == text, "run: python -m benchmarks.readme"


def test_a_run_that_ends_before_its_fault_is_not_spotless():
    assert faults.first_passing([1.0] * 149 + [float("nan")], onset=200) == 150
    assert faults.first_passing([1.0] * 49 + [float("inf")], onset=200) == 50
    assert faults.first_passing([1.0] * 205 + [11.0], onset=200) == 206
    assert faults.first_passing([1.0] * 205 + [float("nan")], onset=200) == 206
