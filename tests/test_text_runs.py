"""Text to image, from captions to pictures of the colour that was asked for."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import scalelong
from scalelong import experiment
from scalelong.caption_check import check_captions
from scalelong.config import with_overrides
from scalelong.data.contexts import Context, text_of
from scalelong.data.prepare import prepare
from scalelong.data.text import TextEncoder
from scalelong.export import export
from scalelong.presets import run_preset
from tests.cli.test_run_commands import fails
from tests.cli.test_run_commands import run as command
from tests.test_world import launch, series
from tests.texts import COLOURS, pictures, save_bert
from tests.training.test_fit import same

SMALL = [
    "model.changes.patch_size=2",
    "model.changes.hidden_size=32",
    "model.changes.num_layers=2",
    "model.changes.num_attention_heads=2",
    "train.batch_size=16",
    "train.warmup_steps=5",
    "train.lr=5e-3",
    "target=x0",  # of noise a caption says little: the loss on pictures learns what it says in fewer steps
    "train.log_every=50",
    "train.monitor_every=50",
    "train.sample_every=1000",
    "train.checkpoint_every=1000",
    "train.ema_rates=0.9",
    "sampling.steps=8",
]


def config(*settings):
    return with_overrides(run_preset("coco64-uvit-s"), [*SMALL, *settings])


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return save_bert(tmp_path_factory.mktemp("encoder") / "bert")


@pytest.fixture(scope="module")
def store(bert, tmp_path_factory):
    encoder = TextEncoder(bert, length=8)
    return prepare(pictures(64, size=4), tmp_path_factory.mktemp("data") / "store", text_encoder=encoder)


@pytest.fixture(scope="module")
def trained(store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    experiment.train(config("train.steps=250", "model.scaling=cs:0.7"), store, folder, device="cpu", logger="none")
    return folder


def test_a_run_knows_its_text(trained, store):
    run = experiment.load_run(trained, device="cpu")
    assert (run.config.model.changes["cross_attention_dim"], run.config.model.changes["text_len"]) == (16, 8)
    assert run.text.info == text_of(store).info
    assert run.text.captions == [captions[0] for captions in store.captions]  # of the first 64 images
    assert torch.equal(run.text.context.null, text_of(store).null)
    assert (trained / "samples" / "step-000000250.png").is_file()


def test_a_prompt_decides_the_colour(trained):
    run = experiment.load_run(trained, device="cpu")
    prompts = [f"a {colour} picture" for colour in COLOURS]
    context = experiment.encode_prompts(run.text, prompts)
    images = experiment.draw(run.config, run.model, 16, context=context, guidance=1.5, steps=15)
    means = (images.mean(dim=(2, 3)) + 1) * 127.5
    nearest = torch.cdist(means, torch.tensor(list(COLOURS.values())).float()).argmin(1)
    assert (nearest == torch.arange(16) % 4).float().mean() > 0.9, means
    # Image 5 is the same in any batch.
    part = experiment.draw(run.config, run.model, 2, first=4, context=context, guidance=1.5, steps=15)
    torch.testing.assert_close(part, images[4:6], rtol=1e-4, atol=1e-4)


def test_captions_that_matter_are_missed(trained, store):
    run = experiment.load_run(trained, device="cpu")
    found = check_captions(run.config, run.model, store, draws=4, batch=24)
    assert found.difference > 5 * found.standard_error > 0
    assert found.difference == pytest.approx(found.shuffled_loss - found.true_loss)
    assert (found.images, found.draws) == (64, 4)
    # Other batches put other captions to the images at their ends alone.
    other = check_captions(run.config, run.model, store, draws=4, batch=64)
    assert other.true_loss == pytest.approx(found.true_loss, rel=1e-4)
    assert check_captions(run.config, run.model, store, draws=4, seed=1).true_loss != found.true_loss
    with torch.no_grad():
        run.model.context_embed.weight.zero_()  # a model that does not listen
    deaf = check_captions(run.config, run.model, store, draws=4)
    assert (deaf.difference, deaf.standard_error) == (0, 0)


@pytest.mark.slow
def test_captions_that_say_nothing_are_not_missed(bert, tmp_path):
    encoder = TextEncoder(bert, length=8)
    learned, held_out = (
        prepare(pictures(count, size=4, told="anything"), tmp_path / f"store-{count}", text_encoder=encoder)
        for count in (512, 128)
    )
    experiment.train(config("train.steps=250"), learned, tmp_path / "run", device="cpu", logger="none")
    run = experiment.load_run(tmp_path / "run", device="cpu")
    found = check_captions(run.config, run.model, held_out)
    assert abs(found.difference) < 3 * found.standard_error


def test_a_resumed_run_goes_on_as_it_would_have(store, tmp_path):
    for name, stops in (("straight", [6]), ("halting", [3, 6])):
        for steps in stops:
            settings = [f"train.steps={steps}", "model.scaling=cs:0.7", "train.accumulate=2"]
            experiment.train(config(*settings), store, tmp_path / name, device="cpu", logger="none")
    assert same(tmp_path / "straight", tmp_path / "halting")


@pytest.mark.slow
def test_two_processes_train_on_text_as_one(store, tmp_path):
    more = ["train.steps=4", "train.log_every=1", "train.accumulate=2"]
    changes = [part for setting in [*SMALL, *more, "train.log_every=1"] for part in ("--set", setting)]
    where = ["--data", str(store.folder), "--out", str(tmp_path / "two"), "--device", "cpu", "--logger", "none"]
    launch(2, "train", "coco64-uvit-s", *where, *changes)
    experiment.train(config(*more), store, tmp_path / "one", device="cpu", logger="none")
    two, one = (torch.tensor(series(tmp_path / name, "loss")) for name in ("two", "one"))
    assert len(one) == 4
    torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a graph is captured on a GPU")
def test_captured_steps_on_text_are_those_of_the_eager_one(store, tmp_path):
    losses = []
    for execution in ("eager", "captured"):
        more = ["train.steps=12", "train.log_every=1", "train.precision=fp32", f"train.execution={execution}"]
        experiment.train(config(*more), store, tmp_path / execution, device="cuda", logger="none")
        losses.append(torch.tensor(series(tmp_path / execution, "loss")))
    torch.testing.assert_close(*losses, rtol=1e-4, atol=0)


def test_the_unet_reads_text_too(store, tmp_path):
    small = {"block_out_channels": [32, 32, 32], "layers_per_block": 1, "attention_head_dim": 2}
    settings = [f"model.changes={json.dumps(small)}", "model.scaling=cs:0.7", "model.placement=norm"]
    unet = with_overrides(
        run_preset("coco-unet"),
        [
            *settings,
            "train.batch_size=4",
            "train.steps=2",
            "train.ema_rates=0.9",
            "train.warmup_steps=0",
            "data.space=pixels",
        ],
    )
    unet = replace(unet, sampling=replace(unet.sampling, steps=2))
    experiment.train(unet, store, tmp_path / "run", device="cpu", logger="none")
    run = experiment.load_run(tmp_path / "run", device="cpu")
    assert run.model.config.cross_attention_dim == 16
    told, null = (
        experiment.draw(run.config, run.model, 2, context=c, guidance=1.0, steps=2)
        for c in (run.text.context, Context(run.text.context.null[None], run.text.context.null))
    )
    assert not torch.equal(told, null)


def test_guidance_leads_away_from_the_empty_prompt(trained):
    """By hand: ε_null + w (ε_told - ε_null), with diffusers' DDIM."""
    from scalelong.diffusion.sampling import sample, scheduler_for

    run = experiment.load_run(trained, device="cpu")
    process, context = experiment.process_of(run.config), run.text.context
    tokens = context.of(torch.arange(2))
    found = sample(
        run.model,
        process,
        torch.arange(2),
        (3, 4, 4),
        sampler="ddim",
        steps=3,
        guidance=2.5,
        context=tokens,
        null_context=context.null,
    )
    from scalelong.data.random import Stream

    scheduler, x = scheduler_for(process, "ddim"), Stream(0, "sample").normal(torch.arange(2), (3, 4, 4))
    scheduler.set_timesteps(3)
    with torch.no_grad():
        for t in scheduler.timesteps:
            told, null = (
                run.model(x, t, encoder_hidden_states=c).sample for c in (tokens, context.null.expand(2, -1, -1))
            )
            x = scheduler.step(null + 2.5 * (told - null), t, x).prev_sample
    torch.testing.assert_close(found, x.clamp(-1, 1), rtol=1e-4, atol=1e-5)


PIPELINE = """
import sys
import numpy as np, torch, diffusers, scalelong
folder, how, out = sys.argv[1:]
if how == "load_pipeline":
    pipe = scalelong.load_pipeline(folder)
else:
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)
pipe.set_progress_bar_config(disable=True)
how = dict(num_inference_steps=3, generator=torch.Generator().manual_seed(0), output_type="np")
np.save(out, pipe(prompt=["a red picture", "the very large picture of blue"], guidance_scale=2.5, **how).images)
print(type(pipe).__name__, type(pipe.text_encoder).__name__)
"""


def by_hand(run, folder, scheduler_folder):
    """Noise, diffusers' scheduler, ε_null + w (ε_told - ε_null), contexts of transformers' own encoder."""
    from diffusers import DDIMScheduler

    contexts = TextEncoder(folder, length=8)(["", "a red picture", "the very large picture of blue"])
    scheduler = DDIMScheduler.from_pretrained(scheduler_folder)
    scheduler.set_timesteps(3)
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for t in scheduler.timesteps:
            told, null = (
                run.model(x, t, encoder_hidden_states=c).sample
                for c in (contexts[1:], contexts[:1].expand(2, -1, -1))
            )
            x = scheduler.step(null + 2.5 * (told - null), t, x).prev_sample
    return (x / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).numpy()


def test_an_exported_pipeline_takes_prompts(trained, bert, tmp_path):
    run = experiment.load_run(trained, device="cpu")
    want = by_hand(run, bert, _exported(run, tmp_path / "out") / "scheduler")
    files = {str(f.relative_to(tmp_path / "out")) for f in (tmp_path / "out").rglob("*") if f.is_file()}
    assert {"pipeline.py", "text_encoder/model.safetensors", "tokenizer/tokenizer.json"} <= files
    pipe = scalelong.load_pipeline(tmp_path / "out")
    how = {"num_inference_steps": 3, "generator": torch.Generator().manual_seed(0), "output_type": "np"}
    prompts = ["a red picture", "the very large picture of blue"]
    np.testing.assert_allclose(pipe(prompt=prompts, guidance_scale=2.5, **how).images, want, atol=1e-5)
    assert len(pipe(prompt="red", batch_size=3, num_inference_steps=1).images) == 3
    for arguments, message in (
        ({}, "prompt is a text or a list of some, got None"),
        ({"prompt": []}, "prompt is a text or a list of some"),
        ({"prompt": ["red"], "batch_size": 2}, "number of prompts, 1"),
        ({"prompt": "red", "class_labels": 1}, "leave class_labels out"),
    ):
        with pytest.raises(ValueError, match=message):
            pipe(num_inference_steps=1, **arguments)
    with pytest.raises(ValueError, match="there is no folder '/gone/with/the/wind'"):
        export(run, tmp_path / "no", text_encoder="/gone/with/the/wind")
    assert not (tmp_path / "no").exists()


def _exported(run, out):
    assert export(run, out) == "ScaleLongPipeline"
    return out


@pytest.mark.slow
def test_an_exported_pipeline_runs_in_a_fresh_process(trained, bert, tmp_path):
    run = experiment.load_run(trained, device="cpu")
    _exported(run, tmp_path / "out")
    for how in ("load_pipeline", "from_pretrained"):
        call = [sys.executable, "-c", PIPELINE, str(tmp_path / "out"), how, str(tmp_path / f"{how}.npy")]
        found = subprocess.run(call, capture_output=True, text=True, check=True)
        assert found.stdout.split() == ["ScaleLongPipeline", "BertModel"]
        want = by_hand(run, bert, tmp_path / "out" / "scheduler")
        np.testing.assert_allclose(np.load(tmp_path / f"{how}.npy"), want, atol=1e-5)


def test_what_does_not_fit_is_told(store, trained, bert, tmp_path):
    def refused(match, preset="coco64-uvit-s", data=store, *settings):
        changed = with_overrides(run_preset(preset), list(settings))
        with pytest.raises(ValueError, match=match):
            experiment.train(changed, data, tmp_path / "run", device="cpu", logger="none")

    plain = prepare(pictures(4), tmp_path / "plain")
    refused("captions that are not encoded; prepare", data=plain)
    refused("cifar10-unet has no place for text", "cifar10-unet", store, "data.condition=text")
    refused("coco-unet reads text", "coco-unet", store, "data.condition=none", "data.space=pixels")
    wide = "model.changes.cross_attention_dim=768"
    refused(
        r"cross_attention_dim is 768, and the contexts in .* are 8 tokens of width 16", "coco64-uvit-s", store, wide
    )
    refused(r"guidance needs a run that also learned.*got 2\.0", "coco64-uvit-s", store, "data.label_dropout=0")
    assert not (tmp_path / "run").exists()

    run = experiment.load_run(trained, device="cpu")
    with pytest.raises(ValueError, match="draws what it is told; give context="):
        experiment.draw(run.config, run.model, 2)
    with pytest.raises(ValueError, match="text tokens of width 16, got 5"):
        experiment.draw(run.config, run.model, 2, context=Context(torch.zeros(1, 8, 5), torch.zeros(8, 5)))

    other = TextEncoder(save_bert(tmp_path / "other", seed=1), length=8)
    elsewhere = prepare(pictures(64, size=4), tmp_path / "elsewhere", text_encoder=other)
    more = config("train.steps=251", "model.scaling=cs:0.7")
    with pytest.raises(ValueError, match="the data encodes texts otherwise"):
        experiment.train(more, elsewhere, trained, device="cpu", logger="none")


def test_a_uvit_for_text_can_do_without(tmp_path, store):
    settings = [*SMALL, "data.condition=none", "sampling.guidance=1"]
    fitted = experiment.fitted_to(with_overrides(run_preset("coco64-uvit-s"), settings), store)
    assert experiment.build_model(fitted).context_embed is None


def test_the_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    import io

    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    bert = save_bert(tmp_path / "bert")
    rows = {"image": [], "captions": []}
    for item in pictures(12).items():
        file = io.BytesIO()
        Image.fromarray(item.image).save(file, "png")
        rows["image"].append(file.getvalue())
        rows["captions"].append(list(item.captions))
    pq.write_table(pa.table(rows), tmp_path / "pictures.parquet")
    prepare_it = ["prepare", tmp_path / "pictures.parquet", "--text-encoder", bert, "--text-len", 7]
    prepare_it += ["--out", tmp_path / "store"]
    plan = json.loads(command(*prepare_it, "--dry-run", "--json"))
    assert not (tmp_path / "store").exists()
    assert (plan["text"]["captions"], plan["text_bytes"]) == (24, 25 * 7 * 16 * 2)
    made = json.loads(command(*prepare_it, "--json"))
    assert (made["text"]["captions"], made["text"]["cut"]) == (24, 12)
    assert (tmp_path / "store" / "text.npy").stat().st_size == plan["text_bytes"] + 128

    settings = [part for setting in [*SMALL, "train.steps=3"] for part in ("--set", setting)]
    run = tmp_path / "run"
    command("train", "coco64-uvit-s", "--data", tmp_path / "store", "--out", run, "--device", "cpu", *settings)
    grid = ["--num", 4, "--out", tmp_path / "grid.png", "--json"]
    kept = json.loads(command("sample", run, *grid))
    assert (kept["guidance"], kept["captions"][1]) == (2.0, "a green picture")
    asked = json.loads(command("sample", run, *grid, "--prompt", "red", "--prompt", "", "--guidance", 3))
    assert (asked["guidance"], asked["captions"]) == (3.0, ["red", "", "red", ""])
    quality = json.loads(
        command("evaluate", run, "--data", tmp_path / "store", "--num", 8, "--features", "pixels", "--json")
    )
    assert "w = 2.0" in quality["protocol"]
    checked = json.loads(command("evaluate", run, "--data", tmp_path / "store", "--caption-check", "--json"))
    assert checked["images"] == 12
    assert checked["standard_error"] > 0

    told = command("export", run, "--out", tmp_path / "pipe")  # and what it says to type works
    assert "pipe(prompt='a red picture').images" in told
    scope = {}
    typed = told.partition("Use it with: ")[2]
    exec(typed.replace("pipe(prompt", "images = pipe(num_inference_steps=2, prompt"), scope)
    assert len(scope["images"]) == 1

    # The encoder has moved.
    shutil.move(bert, tmp_path / "moved")
    code, error = fails(monkeypatch, capsys, "sample", run, *grid, "--prompt", "red")
    assert code == 2
    assert f"there is no folder '{bert}'" in error
    assert "--text-encoder" in error
    again = command("sample", run, *grid, "--prompt", "red", "--text-encoder", tmp_path / "moved")
    assert json.loads(again)["captions"] == ["red"] * 4
    code, error = fails(monkeypatch, capsys, "prepare", "digits", "--out", tmp_path / "no", "--text-len", 5)
    assert (code, "without --text-encoder" in error) == (2, True)
    other = save_bert(tmp_path / "other", seed=1)
    code, error = fails(monkeypatch, capsys, "sample", run, *grid, "--prompt", "red", "--text-encoder", other)
    assert (code, "encodes texts otherwise" in error) == (2, True)
