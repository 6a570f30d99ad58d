"""Runs on latents from pictures to a pipeline: trained, halted, resumed, drawn from, judged, exported."""

import copy
import json
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, DDIMScheduler
from PIL import Image

from scalelong import experiment
from scalelong.config import with_overrides
from scalelong.data.latents import load_autoencoder
from scalelong.data.prepare import prepare
from scalelong.data.random import Stream
from scalelong.data.store import open_store
from scalelong.data.text import TextEncoder
from scalelong.export import export
from scalelong.presets import run_preset
from scalelong.training.step import Stepper
from tests import texts
from tests.cli.test_run_commands import fails, run
from tests.data.test_latents import made_images, tiny_kl
from tests.training.test_fit import config, same

LATENT = ["data.space=latents", "process=sd", "model.changes.timestep_map=one-based", "train.batch_size=8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("latents")
    for i, pixels in enumerate(made_images(12)):
        place = folder / "pictures" / ("cat" if i % 2 else "dog")
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place / f"{i}.png")
    tiny_kl().save_pretrained(folder / "vae")
    args = ["prepare", folder / "pictures", "--autoencoder", folder / "vae", "--scale", "0.2301", "--device", "cpu"]
    told = json.loads(run(*args, "--out", folder / "store", "--dry-run", "--json"))
    made = json.loads(run(*args, "--out", folder / "store", "--json"))
    assert made["latents"] == told["latents"]
    assert made["latents"]["scaling_factor"] == 0.2301
    files = ("images.npy", "labels.npy", "latents.npy")
    assert told["bytes"] == sum((folder / "store" / name).stat().st_size - 128 for name in files)
    return folder


@pytest.fixture(scope="module")
def store(folder):
    return open_store(folder / "store")


@pytest.fixture(scope="module")
def trained(folder, store):
    how = config("train.steps=4", "train.sample_every=4", "data.condition=class", "sampling.steps=4", *LATENT)
    assert experiment.train(how, store, folder / "run", device="cpu")
    return folder / "run"


def by_hand(loaded, vae, noise, labels, steps, guidance):
    """DDIM on SD's schedule, nothing clipped, then decoded; the network sees k and adds 1."""
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    how = dict(clip_sample=False, set_alpha_to_one=True, timestep_spacing="trailing")
    ddim = DDIMScheduler(trained_betas=betas.tolist(), **how)
    ddim.set_timesteps(steps)
    z, null = noise, torch.full_like(labels, 2)
    with torch.no_grad():
        for k in ddim.timesteps:
            with_class, without = (loaded.model(z, k, class_labels=c).sample for c in (labels, null))
            z = ddim.step(without + guidance * (with_class - without), k, z).prev_sample
        return vae.decode(z / 0.2301).sample.clamp(-1, 1)


def test_the_network_has_the_latents_shape(store):
    fitted = experiment.fitted_to(config("data.condition=class", *LATENT), store)
    assert fitted.model.changes["sample_size"] == 4
    assert fitted.model.changes["in_channels"] == 4
    assert fitted.model.changes["num_class_embeds"] == 3
    assert fitted.latents.image_shape == (8, 8, 3)
    assert experiment.fitted_to(fitted, store) == fitted
    assert experiment.fitted_to(config(), store).latents is None  # the same store serves a run on pixels


def test_edm_asks_for_latents_of_its_spread(store):
    edm = config("data.space=latents", "process=edm")
    with pytest.warns(
        UserWarning, match=r"process=edm is made for a spread of 0\.5, .* have [\d.]+; .*--scale"
    ) as told:
        experiment.fitted_to(edm, store)
    scale = float(re.search(r"--scale ([\d.e-]+)", str(told[0].message))[1])
    space = replace(store.manifest.latents, scaling_factor=scale)
    rescaled = replace(store, manifest=replace(store.manifest, latents=space))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        experiment.fitted_to(edm, rescaled)
        experiment.fitted_to(config(*LATENT), store)  # `sd` has no such constant


def test_a_run_resumes_exactly(store, tmp_path):
    straight, halting = tmp_path / "straight", tmp_path / "halting"
    how = config("train.steps=6", "train.checkpoint_every=100", *LATENT)
    assert experiment.train(how, store, straight)

    def stop(progress):
        if progress.step == 3:
            signal.raise_signal(signal.SIGTERM)

    assert not experiment.train(how, store, halting, show=stop)
    assert experiment.train(how, store, halting)
    assert same(straight, halting)


def test_the_loss_is_that_of_the_latents(store):
    fitted = experiment.fitted_to(config("train.steps=1", *LATENT), store)
    loader = experiment.loader_for(fitted, store, "cpu")
    step = Stepper(experiment.build_model(fitted), experiment.process_of(fitted), loader, fitted.train)
    step.update(0)
    batch = loader.batch(0, 8)
    assert batch.images.shape == (8, 4, 4, 4)
    noise = Stream(fitted.train.seed, "noise").normal(batch.indices, (4, 4, 4))
    k = (Stream(fitted.train.seed, "times").uniform(batch.indices) * 1000).long()
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    bar = (1 - betas).cumprod(0)[k].float()[:, None, None, None]
    with torch.no_grad():
        found = experiment.build_model(fitted)(bar.sqrt() * batch.images + (1 - bar).sqrt() * noise, k).sample
    assert step.loss.item() == pytest.approx(((found - noise) ** 2).mean().item(), rel=1e-4)


def test_samples_are_decoded_and_clipped_after_that_alone(folder, trained):
    loaded = experiment.load_run(trained, device="cpu")
    found = experiment.draw(loaded.config, loaded.model, 3, sampler="ddim", steps=5, guidance=3.0)
    noise = Stream(0, "sample").normal(torch.arange(3), (4, 4, 4))
    vae = AutoencoderKL.from_pretrained(folder / "vae")
    expected = by_hand(loaded, vae, noise, torch.tensor([0, 1, 0]), 5, 3.0)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_a_process_without_a_share_draws_none_and_cosine_noise_is_not_exported(trained, tmp_path):
    loaded = experiment.load_run(trained, device="cpu")
    image = experiment.draw(loaded.config, loaded.model, 1, steps=1)
    assert experiment.draw(loaded.config, loaded.model, 0).shape == (0, *image.shape[1:])
    elsewhere = copy.deepcopy(loaded.model).to("meta")  # processes hand each other what lies on their devices
    assert experiment.draw(loaded.config, elsewhere, 0).is_meta
    cosine = replace(loaded.config, process="cosine")
    with pytest.raises(ValueError, match=r"DDIM, which cannot draw latents of the cosine schedule.*target=v"):
        export(replace(loaded, config=cosine), tmp_path / "out")
    export(replace(loaded, config=replace(cosine, target="v")), tmp_path / "out")


def test_the_commands_draw_and_judge(folder, trained, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Image.open(trained / "samples" / "step-000000004.png").size[0] >= 4 * 9 + 1
    told = json.loads(run("sample", trained, "--num", 4, "--out", tmp_path / "grid.png", "--json"))
    assert (told["sampler"], told["steps"], told["guidance"]) == ("dpm++", 4, 1.0)  # the run's own
    args = ["evaluate", trained, "--data", folder / "store", "--num", 8, "--features", "pixels", "--json"]
    quality = json.loads(run(*args, "--guidance", 2))
    assert np.isfinite(quality["fid"])
    assert "dpm++, 4 steps, w = 2.0" in quality["protocol"]


DRAW = """
import sys
import numpy as np
import torch
import scalelong
pipe = scalelong.load_pipeline(sys.argv[1])
pipe.set_progress_bar_config(disable=True)
how = dict(num_inference_steps=5, generator=torch.Generator().manual_seed(0), output_type="np")
np.save(sys.argv[2], pipe(class_labels=[1, 0], guidance_scale=1.4, **how).images)
assert type(pipe.vae).__name__ == "AutoencoderKL"
assert pipe.vae.config.scaling_factor == 0.2301
"""


@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_exported_pipeline_gives_decoded_images(trained, folder, tmp_path, fresh, monkeypatch):
    loaded = experiment.load_run(trained, device="cpu")
    assert export(loaded, tmp_path / "pipeline") == "ScaleLongPipeline"
    arguments = ["-c", str(tmp_path / "pipeline"), str(tmp_path / "images.npy")]
    if fresh:
        subprocess.run([sys.executable, "-c", DRAW, *arguments[1:]], check=True)
    else:
        monkeypatch.setattr(sys, "argv", arguments)
        exec(DRAW, {})
    noise = torch.randn(2, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    vae = AutoencoderKL.from_pretrained(folder / "vae")
    expected = by_hand(loaded, vae, noise, torch.tensor([1, 0]), 5, 1.4)
    expected = (expected / 2 + 0.5).permute(0, 2, 3, 1).numpy()
    np.testing.assert_allclose(np.load(tmp_path / "images.npy"), expected, atol=1e-5)


def test_an_autoencoder_that_was_moved(trained, folder, store, tmp_path, monkeypatch, capsys):
    shutil.copytree(trained, tmp_path / "run")
    moved = tmp_path / "elsewhere"
    settings = json.loads((tmp_path / "run" / "config.json").read_text())
    settings["latents"]["autoencoder"] = str(tmp_path / "gone")
    (tmp_path / "run" / "config.json").write_text(json.dumps(settings))
    shutil.copytree(folder / "vae", moved)
    args = ["sample", tmp_path / "run", "--num", 2, "--out", tmp_path / "grid.png"]
    code, error = fails(monkeypatch, capsys, *args)
    assert code == 2
    assert "there is no folder" in error
    assert "say where with --autoencoder NAME_OR_FOLDER" in error
    run(*args, "--autoencoder", moved)
    assert (tmp_path / "grid.png").is_file()
    # A run goes on with it, too: a place is no setting of what is computed.
    how = experiment.fitted_to(experiment.read_config(trained), store)
    how = experiment.with_autoencoder(how, str(moved))
    assert experiment.train(how, store, tmp_path / "run", device="cpu")
    tiny_kl(seed=1).save_pretrained(tmp_path / "other")
    with pytest.warns(UserWarning, match="has other weights than the one that made this run's latents"):
        run(*args, "--autoencoder", tmp_path / "other")
    tiny_kl(latent_channels=8).save_pretrained(tmp_path / "wider")
    code, error = fails(monkeypatch, capsys, *args, "--autoencoder", tmp_path / "wider")
    assert code == 2
    assert "has latents of 4×4×8 for images of 8×8, and this run's are 4×4×4: it is another one" in error
    assert "has other weights" not in error


def test_what_does_not_fit_gets_a_sentence(folder, store, tmp_path, monkeypatch, capsys):
    run("prepare", folder / "pictures", "--out", tmp_path / "pixels")
    out = ["--out", tmp_path / "run"]
    train = ["train", "digits", *out, "--set", "data.space=latents", "--data"]
    for args, says in (
        ([*train, tmp_path / "pixels"], "has no latents, and data.space=latents asks for them"),
        ([*train, folder / "store", "--autoencoder", tmp_path / "none"], "there is no folder"),
        ([*train, folder / "store", "--set", "data.space=latent"], "data.space is pixels or latents"),
        ([*train, folder / "store", "--set", "sampling.guidance=2"], "guidance 2.0 needs class labels"),
        (
            [*train, folder / "store", "--set", "process=cosine", "--set", "sampling.sampler=ddim"],
            "ddim begins where the cosine schedule leaves nothing of the image",
        ),
        (["prepare", "digits", *out, "--scale", "0.2"], "got --scale 0.2 alone; give --autoencoder as well"),
        (["prepare", "digits", *out, "--latents-only"], "got --latents-only alone"),
        (["prepare", "digits", *out, "--autoencoder", folder / "vae"], "and the images have 1"),
    ):
        code, error = fails(monkeypatch, capsys, *args)
        assert code == 2
        assert says in error
        assert not (tmp_path / "run").exists()


def test_latents_alone_train_and_are_judged_against_another_store(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    args = ["prepare", folder / "pictures", "--autoencoder", folder / "vae", "--latents-only"]
    run(*args, "--out", tmp_path / "store", "--device", "cpu")
    store = open_store(tmp_path / "store")
    experiment.train(config("train.steps=1", *LATENT), store, tmp_path / "run", device="cpu")
    judge = ["evaluate", tmp_path / "run", "--num", 8, "--steps", 2, "--features", "pixels"]
    code, error = fails(monkeypatch, capsys, *judge, "--data", tmp_path / "store")
    assert code == 2
    assert "keeps no images" in error
    assert "Fréchet" in run(*judge, "--data", folder / "store")


def test_images_in_shards_are_encoded_where_they_lie(folder, tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for i, file in enumerate(sorted((folder / "pictures").rglob("*.png"))[:4]):
            tar.add(file, f"{i}.png")
    autoencoder = ["--autoencoder", folder / "vae", "--device", "cpu"]
    run("prepare", f"shards:{tmp_path / 'a.tar'}", *autoencoder, "--out", tmp_path / "store")
    store = open_store(tmp_path / "store")
    assert sorted(store.manifest.sha256) == ["../a.tar", "index.npy", "latents.npy"]
    pixels = torch.from_numpy(store.images[:4])
    direct = load_autoencoder(folder / "vae").moments(pixels).numpy()
    np.testing.assert_allclose(store.latents, direct, rtol=2**-10, atol=1e-6)


def test_latents_need_not_be_square(folder, tmp_path):
    (tmp_path / "wide").mkdir()
    for i in range(4):
        pixels = np.random.default_rng(i).integers(0, 256, (8, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "wide" / f"{i}.png")
    run(
        "prepare",
        tmp_path / "wide",
        "--autoencoder",
        folder / "vae",
        "--device",
        "cpu",
        "--out",
        tmp_path / "store",
    )
    store = open_store(tmp_path / "store")
    fitted = experiment.fitted_to(config("train.steps=1", *LATENT, "train.batch_size=2"), store)
    assert fitted.model.changes["sample_size"] == [4, 8]
    experiment.train(fitted, store, tmp_path / "run", device="cpu")
    loaded = experiment.load_run(tmp_path / "run", device="cpu")
    assert experiment.draw(loaded.config, loaded.model, 2, steps=2).shape == (2, 3, 8, 16)


def test_text_and_latents_go_together(folder, tmp_path):
    encoder = TextEncoder(texts.save_bert(tmp_path / "bert"), length=8)
    autoencoder = load_autoencoder(folder / "vae")
    store = prepare(texts.pictures(8), tmp_path / "store", text_encoder=encoder, autoencoder=autoencoder)
    small = {"hidden_size": 32, "num_layers": 2, "num_attention_heads": 2}
    settings = ["train.batch_size=4", "train.steps=2", "train.ema_rates=0.9", "sampling.steps=2"]
    how = with_overrides(run_preset("coco-uvit-s"), [f"model.changes={json.dumps(small)}", *settings])
    assert how.data.space == "latents"
    experiment.train(how, store, tmp_path / "run", device="cpu", logger="none")
    loaded = experiment.load_run(tmp_path / "run", device="cpu")
    height, width, channels = store.images.shape[1:]
    drawn = experiment.draw(loaded.config, loaded.model, 2, context=loaded.text.context)
    assert drawn.shape == (2, channels, height, width)
    assert loaded.config.model.changes["cross_attention_dim"] == 16


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a graph is captured on a GPU")
def test_the_captured_step_is_the_eager_one(store):
    losses = []
    for execution in ("eager", "captured"):
        torch.compiler.reset()
        settings = ["train.steps=8", "train.precision=fp32", f"train.execution={execution}", "data.condition=class"]
        fitted = experiment.fitted_to(config(*settings, *LATENT), store)
        loader = experiment.loader_for(fitted, store, "cuda")
        model = experiment.build_model(fitted, "cuda").train()
        step = Stepper(model, experiment.process_of(fitted), loader, fitted.train)
        found = []
        for i in range(8):
            step.update(i, observed=i == 3)
            found.append(step.loss.item())
        step.check()
        losses.append(torch.tensor(found))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=0)
