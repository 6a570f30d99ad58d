"""Every process from data to samples, on the real digits: trained, halted, resumed, drawn from, exported."""

import json
import math
import signal

import numpy as np
import pytest
import torch
from diffusers import DDIMPipeline, DiffusionPipeline

import scalelong
from scalelong import experiment
from scalelong.data.loader import Loader
from scalelong.data.random import Stream
from scalelong.diffusion.sampling import samplers_for
from scalelong.diffusion.solvers import heun
from scalelong.export import export, load_pipeline
from scalelong.training.log import read_metrics
from scalelong.training.step import Stepper
from tests.training.test_fit import config, same, store  # noqa: F401 - a fixture

RUNS = [
    ["process=sd", "target=v", "weighting=min-snr:5"],
    ["process=cosine", "target=x0"],
    ["process=edm"],
    ["process=edm", "target=x0", "weighting=p2", "data.condition=class"],
    ["process=flow"],
    ["process=flow:logit-normal", "weighting=p2"],
]


@pytest.mark.parametrize("settings", RUNS, ids=" ".join)
def test_a_run_resumes_exactly_and_is_drawn_from(store, tmp_path, settings):  # noqa: F811
    straight, halting = tmp_path / "straight", tmp_path / "halting"
    how = config("train.steps=8", "train.sample_every=8", "train.checkpoint_every=100", *settings)
    experiment.train(how, store, straight)

    def stop(progress):
        if progress.step == 3:
            signal.raise_signal(signal.SIGTERM)

    assert not experiment.train(how, store, halting, show=stop)
    assert experiment.train(how, store, halting)
    assert same(straight, halting)
    assert (straight / "samples" / "step-000000008.png").is_file()
    loaded = experiment.load_run(straight)
    for sampler in samplers_for(experiment.process_of(loaded.config)):
        images = experiment.draw(loaded.config, loaded.model, 3, sampler=sampler, steps=4)
        assert images.shape == (3, 1, 8, 8)
        assert images.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("settings", RUNS, ids=" ".join)
def test_samples_come_nearer_to_the_data(store, tmp_path, settings):  # noqa: F811
    from scalelong.metrics.evaluate import quality_of, reference_of
    from scalelong.metrics.features import PixelFeatures

    run = experiment.fitted_to(config("train.steps=200", "train.lr=3e-3", *settings), store)
    reference = reference_of(store, PixelFeatures())

    def distance(model):
        return quality_of([experiment.draw(run, model, 128, steps=15)], reference, PixelFeatures(), "").fid

    before = distance(experiment.build_model(run))
    experiment.train(run, store, tmp_path / "run", device="cpu")
    after = distance(experiment.load_run(tmp_path / "run", device="cpu").model)
    assert after < before / 2


def test_the_loss_falls_under_edm(store, tmp_path):  # noqa: F811
    how = config("train.steps=80", "train.lr=3e-3", "process=edm")
    experiment.train(how, store, tmp_path / "run")
    losses = [row["loss"] for row in read_metrics(tmp_path / "run") if "loss" in row]
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:2])


def test_the_loss_is_the_weighted_error(store):  # noqa: F811
    run = experiment.fitted_to(config("train.steps=1", "process=sd", "target=x0", "weighting=min-snr:5"), store)
    model, loader = experiment.build_model(run), Loader(store, seed=0)
    step = Stepper(model, experiment.process_of(run), loader, run.train)
    step.update(0)
    batch = loader.batch(0, 32)
    noise = Stream(run.train.seed, "noise").normal(batch.indices, (1, 8, 8))
    k = (Stream(run.train.seed, "times").uniform(batch.indices) * 1000).long()
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    bar = (1 - betas).cumprod(0)[k].float()[:, None, None, None]
    with torch.no_grad():
        model = experiment.build_model(run)
        found = model(bar.sqrt() * batch.images + (1 - bar).sqrt() * noise, k).sample
    weight = (bar / (1 - bar)).clamp(max=5)
    assert step.loss.item() == pytest.approx((weight * (found - batch.images) ** 2).mean().item(), rel=1e-4)


def test_a_folder_from_before_targets_goes_on(store, tmp_path):  # noqa: F811
    experiment.train(config("train.steps=2"), store, tmp_path)
    file = tmp_path / "config.json"
    settings = json.loads(file.read_text())
    del settings["target"], settings["weighting"]
    file.write_text(json.dumps(settings))
    assert experiment.train(config("train.steps=3"), store, tmp_path)
    assert experiment.load_run(tmp_path).step == 3


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["process=edm", "target=v"], "fit process=edm are edm, x0, epsilon, got 'v'"),
        (["target=velocity"], "fit process=vp-sde are epsilon, x0, v, got 'velocity'"),
        (["weighting=max-snr"], "unknown weighting 'max-snr'"),
        (["weighting=edm"], "no bound for process=vp-sde with target=epsilon"),
        (["process=ve"], "unknown noise process 've'"),
    ],
)
def test_what_does_not_go_together_leaves_no_folder(store, tmp_path, settings, says):  # noqa: F811
    with pytest.raises(ValueError, match=says):
        experiment.train(config("train.steps=1", *settings), store, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_order_of_settings_does_not_matter():
    assert config("target=velocity", "process=flow") == config("process=flow", "target=velocity")


@pytest.mark.parametrize(
    ("settings", "prediction_type"),
    [
        (["process=sd", "target=v"], "v_prediction"),
        (["process=cosine", "target=x0"], "sample"),
        (["process=sd"], "epsilon"),
    ],
    ids=" ".join,
)
def test_what_ddim_can_run_is_exported(store, tmp_path, settings, prediction_type):  # noqa: F811
    experiment.train(config("train.steps=2", *settings), store, tmp_path / "run")
    loaded = experiment.load_run(tmp_path / "run", device="cpu")
    assert export(loaded, tmp_path / "out") == "DDIMPipeline"
    pipe = scalelong.load_pipeline(tmp_path / "out")
    assert isinstance(pipe, DDIMPipeline)
    assert pipe.scheduler.config.prediction_type == prediction_type
    alpha, _ = experiment.process_of(loaded.config).alpha_sigma(torch.arange(1000))
    torch.testing.assert_close(pipe.scheduler.alphas_cumprod, (alpha**2).float(), rtol=1e-3, atol=1e-6)
    pipe.set_progress_bar_config(disable=True)
    found = pipe(generator=torch.Generator().manual_seed(0), num_inference_steps=4, output_type="np").images
    x = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for k in pipe.scheduler.timesteps:
            x = pipe.scheduler.step(loaded.model(x, k).sample, k, x).prev_sample
    np.testing.assert_allclose(found[0, ..., 0], (x / 2 + 0.5).clamp(0, 1)[0, 0].numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("process", "target"),
    [("edm", "edm"), ("edm", "x0"), ("edm", "epsilon"), ("flow", "velocity"), ("flow:logit-normal", "x0")],
)
def test_exported_edm_and_flow_follow_the_same_path_as_our_solvers(store, tmp_path, process, target):  # noqa: F811
    learned = [f"process={process}", f"target={target}", "data.condition=class", "model.scaling=cs:0.7"]
    experiment.train(config("train.steps=30", *learned), store, tmp_path / "run")
    loaded = experiment.load_run(tmp_path / "run", device="cpu")
    assert export(loaded, tmp_path / "out") == "ScaleLongPipeline"
    labels, guidance = torch.tensor([1, 7]), 1.5
    noise = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    trained = experiment.process_of(loaded.config)
    null = torch.full_like(labels, loaded.null_class)

    @torch.no_grad()
    def predict(x, k):
        told, free = (loaded.model(trained.scaled(x, k), k, class_labels=c).sample for c in (labels, null))
        return free + guidance * (told - free)

    ours = heun(predict, trained, noise, 199, iter)
    for pipe in opened_by_us_and_by_diffusers(tmp_path / "out"):
        times = []
        pipe.unet.register_forward_pre_hook(lambda _, args, times=times: times.append(float(args[1])))
        drawn = pipe(
            class_labels=labels,
            guidance_scale=guidance,
            num_inference_steps=200,
            generator=torch.Generator().manual_seed(0),
            output_type="pt",
        ).images
        torch.testing.assert_close(drawn, (ours / 2 + 0.5).clamp(0, 1), rtol=0, atol=0.02)
        # A net of thirty steps hardly minds the time: σ from 80 to 0.002, and t from 1 to 0.001, are looked at.
        ends = [250 * math.log(80), 250 * math.log(0.002)] if process == "edm" else [999.0, 0.0]
        assert [times[0], times[-1]] == pytest.approx(ends, rel=1e-4, abs=1e-3)


def opened_by_us_and_by_diffusers(folder):
    for pipe in (load_pipeline(folder), DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)):
        pipe.set_progress_bar_config(disable=True)
        yield pipe


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a graph is captured on a GPU")
@pytest.mark.parametrize("settings", RUNS, ids=" ".join)
def test_the_captured_step_is_the_eager_one(store, settings):  # noqa: F811
    losses = []
    for execution in ("eager", "captured"):
        torch.compiler.reset()
        how = config("train.steps=8", "train.precision=fp32", f"train.execution={execution}", *settings)
        run = experiment.fitted_to(how, store)
        dropout = 0.1 if run.data.condition == "class" else None
        loader = Loader(store, seed=0, device="cuda", label_dropout=dropout)
        step = Stepper(experiment.build_model(run, "cuda").train(), experiment.process_of(run), loader, run.train)
        found = []
        for i in range(8):
            step.update(i, observed=i == 3)
            found.append(step.loss.item())
        step.check()
        losses.append(torch.tensor(found))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=0)
