"""prepare, train, sample, evaluate: as a user types them, right and wrong."""

import errno
import json
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors import SafetensorError
from typer.testing import CliRunner

from scalelong.backbones.memory import StepBytes
from scalelong.cli import main
from scalelong.cli.main import app
from scalelong.cli.sample import class_number
from scalelong.cli.train import RECIPES
from scalelong.presets import RUN_PRESETS
from scalelong.runs.claim import claimed
from scalelong.runs.pictures import Together
from scalelong.training.step import Stepper

TINY = [
    "--set",
    "model.changes.hidden_size=32",
    "--set",
    "model.changes.num_layers=2",
    "--set",
    "train.batch_size=8",
    "--set",
    "train.ema_rates=0.9",
]


def run(*args):
    result = CliRunner().invoke(app, [str(a) for a in args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def fails(monkeypatch, capsys, *args):
    monkeypatch.setattr(sys, "argv", ["scalelong", *map(str, args)])
    with pytest.raises(SystemExit) as stopped:
        main.main()
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return stopped.value.code, " ".join(error.split())


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for i in range(24):
        place = folder / "pictures" / ("cat" if i % 2 else "dog")
        place.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(i).integers(0, 256, (20, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{i}.png")
    out = json.loads(run("prepare", folder / "pictures", "--size", 8, "--out", folder / "store", "--json"))
    assert out["count"] == 24
    assert out["classes"] == ["cat", "dog"]
    return folder


@pytest.fixture(scope="module")
def trained(data):
    out = data / "run"
    args = [
        "train",
        "digits",
        "--data",
        data / "store",
        "--scaling",
        "cs:0.7",
        "--out",
        out,
        "--device",
        "cpu",
        *TINY,
    ]
    first = json.loads(run(*args, "--set", "train.steps=3", "--set", "data.condition=class", "--json"))
    assert first == {"out": str(out), "done": True, "step": 3}
    again = json.loads(run(*args, "--set", "train.steps=5", "--set", "data.condition=class", "--json"))
    assert again["step"] == 5
    assert "cs:0.7 with the recipe digits" in (out / "report.html").read_text()
    return out


def test_a_folder_of_pictures_becomes_samples_and_a_number(trained, data, monkeypatch):
    monkeypatch.setenv("HOME", str(data))
    grid = data / "grid.png"
    told = run("sample", trained, "--num", 4, "--out", grid, "--steps", 3, "--class", 1, "--guidance", 2)
    assert "4 images of class 1 (dog), weights of step 5 averaged at 0.9 (still 59% the first weights), dpm" in told
    assert Image.open(grid).size[0] >= 17
    args = ["evaluate", trained, "--data", data / "store", "--num", 16, "--steps", 3, "--features", "pixels"]
    quality = json.loads(run(*args, "--json"))
    assert quality["fid"] > 0
    told = CliRunner().invoke(app, [*map(str, args)])
    assert "16 samples are few for features of 192 numbers" in told.stdout
    assert "comparing the features: KID" in told.stderr
    assert "16 samples (dpm++, 3 steps" in quality["protocol"]


def test_heun_is_told_with_the_evaluations_that_it_takes(trained, data):
    args = ["sample", trained, "--num", 2, "--sampler", "heun", "--json"]
    even, odd = (json.loads(run(*args, "--steps", steps, "--out", data / f"{steps}.npz")) for steps in (6, 5))
    assert even["steps"] == odd["steps"] == 5
    np.testing.assert_array_equal(*(np.load(data / f"{steps}.npz")["arr_0"] for steps in (6, 5)))


def test_samples_in_a_folder_go_on_where_they_were_stopped(trained, data, monkeypatch, capsys):
    out = data / "many"
    args = ["sample", trained, "--num", 7, "--steps", 2, "--batch", 3, "--seed", 5]
    told = json.loads(run(*args, "--out", out, "--json"))
    assert (told["num"], told["seed"], told["sampler"]) == (7, 5, "dpm++")
    assert sorted(file.name for file in out.iterdir()) == [*(f"{i:06d}.png" for i in range(7)), "samples.json"]
    before = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in out.glob("*.png")}
    (out / "000004.png").unlink()  # as if it had been stopped
    run(*args, "--out", out)
    after = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in out.glob("*.png")}
    assert {name for name in before if before[name] != after[name]} == {"000003.png", "000004.png", "000005.png"}
    assert {name: content for name, (content, _) in before.items()} == {name: c for name, (c, _) in after.items()}

    run(*args, "--out", data / "many.npz")
    pixels = np.load(data / "many.npz")["arr_0"]
    assert (pixels.shape, pixels.dtype) == ((7, 8, 8, 3), np.uint8)
    for i in range(7):
        np.testing.assert_array_equal(pixels[i], np.asarray(Image.open(out / f"{i:06d}.png")))
    code, error = fails(monkeypatch, capsys, *args[:-1], 6, "--out", out)
    assert code == 2
    assert "many holds other samples: seed was 5 and is 6. Choose another --out" in error


def test_samples_are_known_by_their_weights_and_not_by_the_place_of_their_run(data, tmp_path, monkeypatch, capsys):
    out, samples = tmp_path / "run", tmp_path / "samples"
    train = ["train", "digits", "--data", data / "store", "--out", out, *TINY, "--set", "train.steps=1"]
    run(*train)
    args = ["--num", 2, "--steps", 1, "--out", samples]
    told = json.loads(run("sample", out, *args, "--json"))
    before = {file: file.stat().st_mtime_ns for file in samples.iterdir()}
    out.rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    assert json.loads(run("sample", "moved", *args, "--json"))["weights"] == told["weights"]
    assert {file: file.stat().st_mtime_ns for file in samples.iterdir()} == before
    run(*train, "--set", "train.seed=5")
    code, error = fails(monkeypatch, capsys, "sample", out, *args)
    assert code == 2
    assert f"samples holds other samples: weights was '{told['weights']}' and is" in error


def test_weights_are_hashed_for_a_folder_alone(trained, tmp_path, monkeypatch):
    args = ["sample", trained, "--num", 1, "--steps", 1, "--json"]
    assert len(json.loads(run(*args, "--out", tmp_path / "samples"))["weights"]) == 16
    monkeypatch.setattr("scalelong.data.latents.fingerprint", lambda _: pytest.fail("hashed"))
    for name in ("grid.png", "samples.npz"):
        assert "weights" not in json.loads(run(*args, "--out", tmp_path / name))


def test_a_folder_of_samples_is_drawn_into_by_one_command_at_a_time(trained, tmp_path, monkeypatch, capsys):
    out = tmp_path / "samples"
    args = ["sample", trained, "--num", 1, "--steps", 1, "--out", out]
    with claimed(out):
        (out / ".samples.json.partial").write_text("{")  # it was killed as it began, or begins right now
        code, error = fails(monkeypatch, capsys, *args)
    assert code == 2
    assert f"another process is drawing samples in {out}; wait until it ends" in error
    run(*args)
    assert sorted(file.name for file in out.iterdir()) == ["000000.png", "samples.json"]


@pytest.mark.parametrize("name", ["x.h5", "x.xbm", "file/x.png", "file/x.npz"])
def test_where_samples_cannot_go_is_told_before_they_are_drawn(trained, tmp_path, monkeypatch, capsys, name):
    (tmp_path / "file").write_text("x")
    monkeypatch.setattr("scalelong.experiment.draw", lambda *_, **__: pytest.fail("drawn"))
    code, error = fails(monkeypatch, capsys, "sample", trained, "--num", 1, "--out", tmp_path / name)
    if name.startswith("x"):
        assert (code, f"in these colours, got '{tmp_path / name}'" in error) == (2, True)
    else:
        assert (code, "its parents are folders where you may write" in error) == (1, True)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("name", ["x.png", "x.npz"])
def test_samples_that_no_longer_fit_on_the_disk_leave_those_that_are_there(
    trained, tmp_path, monkeypatch, capsys, name
):
    args = ["sample", trained, "--num", 1, "--steps", 1, "--out", tmp_path / name]
    run(*args)
    before = (tmp_path / name).read_bytes()

    def full(place, world):
        def half(image, file, **_):
            Path(file).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(np, "savez", lambda stream, **_: half(None, stream.name))
        monkeypatch.setattr(Image.Image, "save", half)
        return finish(place, world)

    finish = Together.finish
    monkeypatch.setattr(Together, "finish", full)
    code, error = fails(monkeypatch, capsys, *args)
    assert (code, "No space left on device" in error) == (1, True)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {name: before}


def test_a_training_stops_after_its_time_and_goes_on(data):
    out = data / "in bits"
    args = ["train", "digits", "--data", data / "store", "--out", out, *TINY, "--set", "train.steps=2"]
    assert "step 1 of 2 is saved. Stopped before its end; the same" in run(*args, "--stop-after", "0")
    assert json.loads(run(*args, "--stop-after", "5", "--json")) == {"out": str(out), "done": True, "step": 2}


def test_a_folder_without_a_run_is_not_taken_for_one_of_the_digits(monkeypatch, capsys, tmp_path):
    code, error = fails(monkeypatch, capsys, "train", "--out", tmp_path / "mistyped")
    assert code == 2
    assert "mistyped has no run to go on with; to begin one there, name its recipe" in error
    assert not (tmp_path / "mistyped").exists()


def test_a_comparison_is_not_put_into_a_run(trained, monkeypatch, capsys):
    code, error = fails(monkeypatch, capsys, "compare", "--out", trained)
    assert code == 2
    assert "is a run itself; --out is a folder for several" in error


def test_averages_of_first_weights_are_told_once_and_only_where_that_can_be_changed(data):
    def told(*args):
        return CliRunner().invoke(app, list(map(str, args)), catch_exceptions=False).stderr

    out, says = data / "first weights", "still 81% the first weights"
    args = ["train", "digits", "--data", data / "store", *TINY, "--set", "train.warmup_steps=1"]
    assert says in told(*args, "--set", "train.steps=2", "--dry-run")
    assert says in told(*args, "--set", "train.steps=2", "--out", out)
    assert "warning" not in told(*args, "--set", "train.steps=3", "--out", out)
    assert "warning" not in told("train", "--branch", out, "--set", "train.steps=4", "--out", data / "branched")


def test_ctrl_c_saves_and_is_told_by_the_exit_code(data, monkeypatch):
    """As shells have it; a time that was asked for and is over is no failure."""
    update = Stepper.update

    def and_ctrl_c(stepper, step, **how):
        update(stepper, step, **how)
        if step == 1:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Stepper, "update", and_ctrl_c)
    out = data / "interrupted"
    args = ["train", "digits", "--data", data / "store", "--out", out, *TINY, "--set", "train.steps=3", "--json"]
    result = CliRunner().invoke(app, list(map(str, args)))
    assert result.exit_code == 130
    assert json.loads(result.stdout) == {"out": str(out), "done": False, "step": 2}
    assert json.loads(run(*args))["done"]


def test_ctrl_c_in_a_comparison_has_the_same_exit_code(data, monkeypatch):
    monkeypatch.setattr(
        "scalelong.comparison.run_all", lambda group, *_, **how: [True] + [False] * (len(group) - 1)
    )
    args = ["compare", "digits", "--data", data / "store", "--seeds", "0", "--out", data / "group", *TINY]
    result = CliRunner().invoke(app, list(map(str, args)))
    assert result.exit_code == 130
    assert "the same command goes on" in result.stderr


def test_a_run_that_is_done_is_told_to_be_and_how_it_is_trained_further(data):
    out = data / "done"
    args = ["train", "digits", "--data", data / "store", "--out", out, *TINY]
    run(*args, "--set", "train.steps=2")
    for steps in (2, 1):
        told = CliRunner().invoke(app, [*map(str, args), "--set", f"train.steps={steps}"], catch_exceptions=False)
        assert told.stderr == ""  # no progress: there was none
        assert told.stdout == (
            f"{out} is done: step 2 is saved and train.steps={steps}, so nothing was trained. For more steps: "
            f"scalelong train --out {out} --set train.steps=4. Next: scalelong sample {out}\n"
        )
    assert json.loads(run(*args, "--set", "train.steps=1", "--json")) == {"out": str(out), "done": True, "step": 2}
    more = CliRunner().invoke(app, ["train", "--out", str(out), "--set", "train.steps=4"], catch_exceptions=False)
    assert "training digits none: 4 of 4" in more.stderr
    assert f"{out}: step 4 of 4 is saved. Next: scalelong sample" in more.stdout


def test_a_run_goes_on_by_its_folder_alone(data):
    out = data / "by folder"
    run(
        "train",
        "digits",
        "--data",
        data / "store",
        "--scaling",
        "ls",
        "--out",
        out,
        *TINY,
        "--set",
        "train.steps=2",
    )
    assert json.loads(run("train", "--out", out, "--set", "train.steps=3", "--json"))["step"] == 3
    plan = json.loads(run("train", "--out", out, "--dry-run", "--json"))
    assert (plan["starts_at"], plan["config"]["model"]["scaling"], plan["begins"]) == (3, "ls", None)


def test_a_branch_goes_on_where_a_nan_ended_a_run(data, monkeypatch, capsys):
    """A learning rate that ends in a NaN, and a lower one from the last good step on."""
    out, better = data / "diverging", data / "better"
    wild = ["--set", "train.steps=40", "--set", "train.warmup_steps=0", "--set", "train.lr=1e18"]
    code, error = fails(
        monkeypatch, capsys, "train", "digits", "--data", data / "store", "--out", out, *TINY, *wild
    )
    assert code == 1
    assert "not finite" in error
    assert "A branch goes on from there (scalelong train --branch RUN --out NEW)" in error
    began = int(max(folder.name for folder in (out / "checkpoints").iterdir()).removeprefix("step-"))
    args = [
        "train",
        "--branch",
        out,
        "--set",
        "train.lr=1e-4",
        "--set",
        f"train.steps={began + 1}",
        "--out",
        better,
    ]
    plan = json.loads(run(*args, "--dry-run", "--json"))
    assert plan["starts_at"] == began
    assert plan["begins"] == f"as a branch of {out}"
    assert f"the first {began:,} of them done, begun as a branch of" in run(*args, "--dry-run")
    assert not better.exists()
    code, error = fails(monkeypatch, capsys, *args, "--init", out)
    assert (code, "a run begins by --init or by --branch" in error) == (2, True)


def test_weights_of_another_run_are_looked_at_before_anything_is_written(trained, data, monkeypatch, capsys):
    args = ["train", "digits", "--data", data / "store", "--init", trained, *TINY, "--out", data / "new"]
    code, error = fails(monkeypatch, capsys, *args, "--dry-run")
    assert code == 2
    assert f"the weights of {trained} do not fit: label_emb.weight is" in error or "pos_embed is" in error
    by_class = [*args, "--set", "data.condition=class", "--set", "train.steps=1"]
    assert f"begun with the weights of {trained}" in run(*by_class, "--dry-run")
    assert not (data / "new").exists()
    code, error = fails(monkeypatch, capsys, *args[:5], "nowhere", *args[6:])
    assert (code, "there is no folder 'nowhere'" in error) == (2, True)


def test_data_that_a_run_had_and_that_are_gone_are_asked_for(data, tmp_path, monkeypatch, capsys):
    store = Path(shutil.copytree(data / "store", tmp_path / "store"))
    args = ["--out", tmp_path / "run", "--set", "train.steps=1"]
    run("train", "digits", "--data", store, *TINY, *args)
    store.rename(tmp_path / "moved")
    code, error = fails(monkeypatch, capsys, "train", *args)
    assert code == 2
    assert f"which were in {store}; give their folder with --data" in error
    run("train", "--data", tmp_path / "moved", *args)


def test_a_branch_goes_on_with_the_data_of_its_run_whatever_the_recipe(trained, data, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    like = [*TINY, "--scaling", "cs:0.7", "--set", "data.condition=class", "--set", "train.steps=9"]
    plan = json.loads(run("train", "digits", "--branch", trained, *like, "--dry-run", "--json"))
    assert plan["data"] == json.loads((data / "store" / "manifest.json").read_text())["source"]
    assert plan["images"] == 24


def test_data_given_by_a_relative_path_are_found_from_elsewhere(data, tmp_path, monkeypatch):
    monkeypatch.chdir(data)
    run("train", "digits", "--data", "store", "--out", tmp_path / "run", *TINY, "--set", "train.steps=1")
    monkeypatch.chdir(tmp_path)
    assert json.loads(run("train", "--out", "run", "--set", "train.steps=2", "--json"))["step"] == 2


def test_what_is_typed_beside_weights_is_not_changed_in_silence(trained, data, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    args = ["train", "digits", "--data", data / "store", "--init", trained, *TINY, "--dry-run"]
    args += ["--set", "data.condition=class"]
    for typed, says in (
        (["--scaling", "none"], "model.scaling, 'cs:0.7', got 'none'"),
        (["--set", "model.keep_function=true"], "model.keep_function, False, got True"),
    ):
        code, error = fails(monkeypatch, capsys, *args, *typed)
        assert code == 2
        assert f"a run that begins with the weights of {trained} keeps their {says}; leave it out" in error
    assert json.loads(run(*args, "--json", "--scaling", "cs:0.70"))["out"] == "runs/digits-cs-0.7"
    assert json.loads(run(*args, "--json"))["out"] == "runs/digits-cs-0.7"


def test_the_same_command_goes_on_where_its_source_was_moved(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, "source")
    commands = [["train", f"--{how}", "source", "--out", how] for how in ("init", "branch")]
    commands[0] += ["digits", "--data", trained.parent / "store", *TINY, "--set", "data.condition=class"]
    for command in commands:
        run(*command, "--set", "train.steps=6")
    Path("source").rename("moved")
    for command in commands:
        assert json.loads(run(*command, "--set", "train.steps=7", "--json"))["step"] == 7


def test_a_class_is_asked_for_by_name_or_number(trained, data):
    assert json.loads((trained / "data.json").read_text())["classes"] == ["cat", "dog"]
    args = ["sample", trained, "--num", 1, "--steps", 1, "--out", data / "one.png"]
    drawn = []
    for asked in ("dog", "1"):
        assert "1 images of class 1 (dog), weights" in run(*args, "--class", asked)
        drawn.append((data / "one.png").read_bytes())
    assert drawn[0] == drawn[1]


def test_a_name_goes_before_a_number_and_old_runs_know_no_names():
    assert class_number("2", 3, ["2", "10", "1"]) == 0
    assert class_number("2", 3, None) == 2
    for asked, names, says in (
        ("cats", None, r"in 0 … 2, as it keeps no names of its classes for this run, got cats"),
        ("x", [f"c{i}" for i in range(99)], "c18, c19 … for this run, got x"),
        ("-1", None, "got -1"),
    ):
        with pytest.raises(ValueError, match=says):
            class_number(asked, 3, names)


def test_a_dry_run_writes_nothing(data, monkeypatch):
    monkeypatch.setattr("scalelong.costs.step_bytes", lambda *_: StepBytes(0, 0))  # tests/test_costs.py counts
    out = data / "never"
    plan = json.loads(run("train", "cifar10-uvit-s", "--data", data / "store", "--out", out, "--dry-run", "--json"))
    assert plan["parameters"] > 10**7
    assert plan["images_per_step"] == 128
    assert plan["config"]["train"]["lr"] == 2e-4
    assert not out.exists()


def test_a_run_shorter_than_its_warm_up_is_warned_of(data, monkeypatch):
    monkeypatch.setattr("scalelong.costs.step_bytes", lambda *_: StepBytes(0, 0))
    args = ["train", "cifar10-uvit-xs", "--data", str(data / "store"), "--dry-run"]
    for steps, warned in ((200, True), (2500, False)):
        told = CliRunner().invoke(app, [*args, "--set", f"train.steps={steps}"]).stderr
        assert ("200 steps end at 8% of train.lr; for a short run --set train.warmup_steps=20" in told) == warned


@pytest.mark.parametrize(
    "preset", ["digits", "cifar10-uvit-xs", "cifar10-uvit-s", "cifar10-uvit-s-deep", "cifar10-unet"]
)
@pytest.mark.parametrize("condition", ["none", "class"])
def test_every_recipe_resolves(data, preset, condition, monkeypatch):
    monkeypatch.setattr("scalelong.costs.step_bytes", lambda *_: StepBytes(0, 0))  # tests/test_costs.py counts
    plan = json.loads(
        run(
            "train", preset, "--data", data / "store", "--set", f"data.condition={condition}", "--dry-run", "--json"
        )
    )
    classes = plan["config"]["model"]["changes"].get("num_class_embeds")
    assert classes == (3 if condition == "class" else None)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["prepare", "nowhere", "--out", "x"], "no file or folder 'nowhere'"),
        (["train", "mnist"], "unknown recipe 'mnist'; the known ones are digits, cifar10-uvit-xs"),
        (["train", "cifar10-uvt-xs"], "did you mean cifar10-uvit-xs? The known ones are digits"),
        (["train", "digits", "--scaling", "cs:3"], "κ lies in (0, 1], got 3.0"),
        (["train", "digits", "--set", "train.step=3"], "unknown setting 'train.step'"),
        (["train", "digits", "--set", "train.steps"], "NAME=VALUE"),
        (
            ["train", "digits", "--set", "train.steps", "5"],
            "NAME=VALUE, such as train.steps=1000; got 'train.steps'",
        ),
        (["compare", "--set", "train.steps", "5"], "NAME=VALUE"),
        (["kappa", "--probe", "--set", "train.steps", "5"], "NAME=VALUE"),
        (
            ["train", "digits", "--set", "model.changes.hidden_siz=48", "--dry-run"],
            "unknown setting of model.changes 'hidden_siz'; did you mean hidden_size? The known",
        ),
        (
            ["train", "cifar10-unet", "--set", "model.changes.drop=1", "--dry-run"],
            "did you mean dropout?",
        ),
        (["train", "digits", "--data", "nowhere"], "nowhere is no prepared dataset"),
        (["sample", "nowhere"], "nowhere is no run folder"),
        (["evaluate", "nowhere", "--features", "vgg"], "--features is inception or pixels, got 'vgg'"),
        (["evaluate", "nowhere", "--features", "pixels", "--inception", "x.pt"], "leave one of them out"),
        (["train", "--logger", "mlflow"], "one of tensorboard, wandb, none, got 'mlflow'"),
        (["train", "--device", "tpu"], "the device is cpu, cuda or cuda:N, got 'tpu'"),
        (
            ["train", "--set", "model.changes.foo=1"],
            "unknown setting of model.changes 'foo'; the known ones are sample_size, ",
        ),
        (["train", "--set", "model.changes.hidden_size=abc"], "model.changes does not suit digits"),
        (["train", "--set", "process=foo"], "unknown noise process 'foo'"),
        (["report", "."], ". is no run folder"),
        (["train", "--set", "train.lr=Infinity"], "train.lr is positive and finite, got inf"),
        (["train", "--set", f"train.seed={10**20}"], "train.seed is a whole number of 64 bits"),
        (["train", "--held-out-every", "5"], "--held-out-every is about --held-out, which was not given"),
        (["train", "--evaluate-num", "50"], "--evaluate-num is about --evaluate-every, which was not given"),
        (["train", "--features", "pixels"], "--features is about --evaluate-every, which was not given"),
        (["prepare", "digits", "--out", "dg", "--device", "quantum"], "cpu, cuda or cuda:N, got 'quantum'"),
    ],
)
def test_bad_usage_exits_2_with_a_sentence(args, says, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, error = fails(monkeypatch, capsys, *args)
    assert code == 2
    assert says in error
    assert not list(tmp_path.iterdir())


def test_bad_requests_to_a_run(trained, data, monkeypatch, capsys):
    for args, says in (
        (["--ema", "0.5"], "keeps the averages 0.9, got 0.5"),
        (["--out", "x.psd"], "an array (samples.npz) or a folder of pictures, got 'x.psd'"),
        (["--sampler", "euler"], "unknown sampler 'euler'"),
        (["--steps", "0"], "1 … 1000, got 0"),
        (["--class", "7"], "--class is in 0 … 1 or one of cat, dog for this run, got 7"),
        (["--class", "cats"], "--class is in 0 … 1 or one of cat, dog for this run, got cats"),
        (["--guidance", "nan"], "guidance is a number, 1 for none, got nan"),
        (["--device", "tpu"], "the device is cpu, cuda or cuda:N, got 'tpu'"),
        (["--device", "cuda:99"], "GPUs that torch can use, got 'cuda:99'; try cpu"),
        (["--out", data], f"{data} is not empty and holds no samples of a run; choose another --out"),
        (["--out", "grid.xyz"], "an array (samples.npz) or a folder of pictures, got 'grid.xyz'"),
    ):
        code, error = fails(monkeypatch, capsys, "sample", trained, "--out", data / "no.png", *args)
        assert code == 2
        assert says in error
    assert not (data / "no.png").exists()


def test_every_command_has_an_example_in_its_help():
    for command in ("inspect", "prepare", "train", "sample", "evaluate", "export", "compare", "report"):
        assert f"scalelong {command}" in " ".join(run(command, "--help").split("Usage")[1].split()[3:])


def test_the_help_of_train_names_every_recipe():
    assert tuple(RUN_PRESETS) == RECIPES
    told = "".join(c for c in run("train", "--help") if c not in " │\n")
    assert all(name in told for name in RECIPES)


@pytest.fixture
def copied(trained, tmp_path):
    """A run of one's own to spoil."""
    return Path(shutil.copytree(trained, tmp_path / "copied"))


def spoil_checkpoints(run):
    for file in run.glob("checkpoints/*/ema-0.9.safetensors"):
        file.write_bytes(file.read_bytes()[:-1] + b"?")


def change_config(run, old, new):
    text = (run / "config.json").read_text()
    assert old in text
    (run / "config.json").write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("spoil", "command", "says"),
    [
        (spoil_checkpoints, "sample", "does not have its checksum. It is passed over."),
        (spoil_checkpoints, "sample", "no whole checkpoint; give the command that began it again"),
        (
            lambda run: change_config(run, '"hidden_size": 32', '"hidden_size": 64'),
            "sample",
            "do not belong together (size mismatch for",
        ),
        (
            lambda run: change_config(run, '"sample_size"', '"patch_size"'),
            "sample",
            "model.changes lacks sample_size",
        ),
        (lambda run: change_config(run, '"sample_size"', '"patch_size'), "report", "is not as train wrote it"),
        (lambda run: (run / "metrics.jsonl").write_text('{"loss": 1}\n'), "report", "every line has a step"),
        (lambda run: (run / "metrics.jsonl").write_text("?"), "report", "has logged nothing yet"),
        (
            lambda run: (run / "environment.json").write_text("?"),
            "report",
            "environment.json is not as train wrote",
        ),
    ],
)
def test_a_spoilt_run_folder_gets_a_sentence(copied, spoil, command, says, monkeypatch, capsys, tmp_path):
    spoil(copied)
    monkeypatch.chdir(tmp_path)
    code, error = fails(monkeypatch, capsys, command, copied)
    assert code == 2
    assert says in error
    assert "UserWarning" not in error
    assert [f.name for f in tmp_path.iterdir()] == ["copied"]


def test_a_report_does_without_the_environment(copied, tmp_path):
    (copied / "environment.json").write_text("{}")
    run("report", copied, "--out", tmp_path / "page.html")
    assert "an unknown commit" in (tmp_path / "page.html").read_text()


def test_guidance_needs_a_null_class(data, tmp_path, monkeypatch, capsys):
    settings = ["--set", "data.condition=class", "--set", "data.label_dropout=0", "--set", "train.steps=1"]
    run("train", "--data", data / "store", "--out", tmp_path / "run", *TINY, *settings)
    code, error = fails(
        monkeypatch, capsys, "sample", tmp_path / "run", "--guidance", 2, "--out", tmp_path / "x.png"
    )
    assert code == 2
    assert "trained with data.label_dropout=0; guidance is 1 for it, got 2.0" in error


def test_evaluate_takes_the_data_of_the_run_or_wants_them(trained, data, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    how = ("--features", "pixels", "--num", 16, "--steps", 2, "--json")
    assert json.loads(run("evaluate", trained, *how)) == json.loads(
        run("evaluate", trained, "--data", data / "store", *how)
    )
    shutil.copytree(trained, tmp_path / "moved")
    (tmp_path / "moved" / "data.json").unlink()
    code, error = fails(monkeypatch, capsys, "evaluate", tmp_path / "moved", "--features", "pixels")
    assert code == 2
    assert "the run draws images of 8×8×3, and" in error
    assert "holds 8×8×1; give the data that the run was trained on with --data" in error


def test_evaluate_wants_the_classes_of_the_run(trained, data, monkeypatch, capsys, tmp_path):
    (tmp_path / "pictures").mkdir()
    for old, new in (("cat", "cat"), ("dog", "eel")):
        (tmp_path / "pictures" / new).symlink_to(data / "pictures" / old)
    run("prepare", tmp_path / "pictures", "--size", 8, "--out", tmp_path / "store")
    for how in (["--loss"], ["--features", "pixels", "-n", 8]):
        code, error = fails(monkeypatch, capsys, "evaluate", trained, "--data", tmp_path / "store", *how)
        assert code == 2
        assert "class 1 is dog in the run and eel in" in error


def test_a_recipe_without_its_data_says_what_it_trains_on(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    args = ["train", "cifar10-uvit-xs", "--out", tmp_path / "run", *TINY, "--set", "train.steps=1"]
    result = CliRunner().invoke(app, [*map(str, args), "--set", "sampling.steps=1"], catch_exceptions=False)
    assert "no --data: cifar10-uvit-xs is trained on scikit-learn's digits, not on CIFAR-10" in result.stderr


def test_settings_that_cannot_be_leave_no_folder_to_stumble_over(data, tmp_path, monkeypatch, capsys):
    args = ["train", "--data", data / "store", "--out", tmp_path / "run", *TINY, "--set", "train.steps=1"]
    for wrong in ("model.changes.hidden_size=33", "model.changes.foo=1", "process=foo", "train.betas=2,3"):
        code, _ = fails(monkeypatch, capsys, *args, "--set", wrong)
        assert code == 2
        assert not (tmp_path / "run").exists()
    run(*args)


@pytest.mark.parametrize(
    ("out", "wrong", "says"),
    [
        ("new", "sampling.sampler=euler", "unknown sampler 'euler'"),
        ("new", "train.execution=captured", "train.execution=captured needs a GPU, got the device 'cpu'"),
        ("new", "model.changes.num_layers=3", "num_layers is even"),
        ("run", "data.condition=none", "run holds another run: data.condition was 'class' and is 'none'"),
    ],
)
def test_a_refusal_comes_before_any_word_about_the_work(trained, data, monkeypatch, capsys, out, wrong, says):
    monkeypatch.setattr("scalelong.judging.judge_quality", lambda *_, **__: pytest.fail("features were opened"))
    args = ["train", "digits", "--data", data / "store", "--scaling", "cs:0.7", *TINY, "--device", "cpu"]
    args += ["--set", "train.steps=5", "--set", "data.condition=class", "--set", wrong]  # warned of: a short run
    args += ["--evaluate-every", "5", "--features", "pixels"]
    code, error = fails(monkeypatch, capsys, *args, "--out", data / out)
    assert code == 2
    assert error.startswith("error: ")
    assert says in error


def test_what_the_system_refuses_exits_1_with_advice(trained, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("x")
    for args in (["sample", trained, "--num", 1, "--steps", 1], ["export", trained], ["report", trained]):
        code, error = fails(monkeypatch, capsys, *args, "--out", tmp_path / "file" / "x.png")
        assert code == 1
        assert "Check the path: its parents are folders where you may write." in error


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        # As safetensors says it on a filesystem that is really full.
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_exits_1_and_says_what_to_do(data, tmp_path, monkeypatch, capsys, error):
    import safetensors.torch

    args = [
        "train",
        "--data",
        data / "store",
        "--out",
        tmp_path / "run",
        *TINY,
        "--set",
        "train.checkpoint_every=2",
    ]
    run(*args, "--set", "train.steps=2")

    def full(*given):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", full)
        code, told = fails(monkeypatch, capsys, *args, "--set", "train.steps=4")
    assert code == 1
    assert "No space left on device" in told
    assert "Free some space and give the same command again" in told
    assert json.loads(run(*args, "--set", "train.steps=4", "--dry-run", "--json"))["starts_at"] == 2  # nothing lost


def test_too_much_for_the_memory_exits_1_and_says_what_to_do(trained, tmp_path, monkeypatch, capsys):
    args = [
        "sample",
        trained,
        "--num",
        9 * 10**11,
        "--batch",
        9 * 10**11,
        "--steps",
        1,
        "--out",
        tmp_path / "x.png",
    ]
    code, error = fails(monkeypatch, capsys, *args)
    assert code == 1
    assert "out of memory" in error
    assert "a smaller --batch" in error
