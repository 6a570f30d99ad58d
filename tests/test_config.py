import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelong.config import ModelConfig, RunConfig, TrainConfig, from_dict, to_dict, with_overrides

BASE = RunConfig(
    model=ModelConfig(preset="cifar10-uvit-s", scaling="ls:shared=false"),
    train=TrainConfig(steps=100, batch_size=8, lr=1e-3),
)

configs = st.builds(
    RunConfig,
    model=st.builds(
        ModelConfig,
        preset=st.just("x"),
        changes=st.dictionaries(st.text(), st.integers() | st.text() | st.booleans()),
        scaling=st.sampled_from(["none", "cs:0.7", "ls"]),
    ),
    train=st.builds(
        TrainConfig,
        steps=st.integers(1, 10**9),
        batch_size=st.integers(1, 4096),
        lr=st.floats(1e-9, 1),
        clip_norm=st.none() | st.floats(0.1, 10),
        ema_rates=st.lists(st.floats(0, 0.99999), min_size=1).map(tuple),
        execution=st.sampled_from(["auto", "eager", "compiled"]),
    ),
)


@given(configs)
def test_json_round_trip(config):
    assert from_dict(RunConfig, json.loads(json.dumps(to_dict(config)))) == config


def test_scalings_are_kept_in_their_shortest_form():
    assert BASE.model.scaling == "ls-per-skip"


@pytest.mark.parametrize(
    ("setting", "read"),
    [
        ("train.steps=50000", lambda c: c.train.steps == 50000),
        ("train.steps=5e4", lambda c: c.train.steps == 50000),
        ("train.lr=1", lambda c: c.train.lr == 1.0),
        ("train.clip_norm=1.5", lambda c: c.train.clip_norm == 1.5),
        ("train.clip_norm=none", lambda c: c.train.clip_norm is None),
        ("train.betas=0.9,0.95", lambda c: c.train.betas == (0.9, 0.95)),
        ("train.ema_rates=0.99", lambda c: c.train.ema_rates == (0.99,)),
        ("train.ema_warmup=true", lambda c: c.train.ema_warmup is True),
        ("data.condition=class", lambda c: c.data.condition == "class"),
        ("model.scaling=cs:0.5", lambda c: c.model.scaling == "cs:0.5"),
        ("model.scaling=ls:ratio=8,act=mish", lambda c: c.model.scaling == "ls:ratio=8,act=mish"),
        ("model.changes.hidden_size=64", lambda c: c.model.changes == {"hidden_size": 64}),
        ("process=ddpm", lambda c: c.process == "ddpm"),
        ("model.scaling=none", lambda c: c.model.scaling == "none"),
        ("data.condition=none", lambda c: c.data.condition == "none"),
    ],
)
def test_overrides(setting, read):
    assert read(with_overrides(BASE, [setting]))


def test_later_overrides_win():
    assert with_overrides(BASE, ["train.seed=1", "train.seed=2"]).train.seed == 2


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        (
            "train.step=5",
            "unknown setting 'train.step'; did you mean train.steps[?] The known ones are train.accumulate",
        ),
        (
            "trian.steps=5",
            "unknown setting 'trian.steps'; did you mean train.steps[?] The known ones are data, latents, model",
        ),
        ("steps=5", "did you mean train.steps[?]"),
        ("train.learning_rate=1", "did you mean train.lr[?]"),
        ("xyz=5", "unknown setting 'xyz'; the known ones are data, latents"),
        ("train=5", "'train' is a group; set one of train.accumulate"),
        ("train.steps.x=5", "'steps' is a single value"),
        ("train.steps", "NAME=VALUE, such as train.steps=1000; got 'train.steps'"),
        ("train.steps=many", "train.steps is a whole number, got 'many'"),
        ("train.steps=1.5", "train.steps is a whole number, got 1.5"),
        ("train.steps=true", "train.steps is a whole number, got True"),
        ("train.steps=Infinity", "train.steps is a whole number, got inf"),
        ("train.steps=0", "train.steps is at least 1, got 0"),
        ("train.lr=fast", "train.lr is a number, got 'fast'"),
        ("train.warmup_steps=-5", "train.warmup_steps is at least 0, got -5"),
        ("train.weight_decay=-1", "train.weight_decay is finite, at least 0, got -1"),
        ("train.betas=0.9,1", "train.betas lie in"),
        ("train.steps=1e99", "train.steps is below 10"),
        ("train.execution=fast", "one of auto, eager, compiled, captured, got 'fast'"),
        ("train.betas=0.9", "train.betas is 2 values"),
        ("train.ema_warmup=yes", "train.ema_warmup is true or false, got 'yes'"),
        ("train.precision=fp8", "one of auto, fp32, bf16, fp16, got 'fp8'"),
        ("train.accumulate=3", "divides train.batch_size, got 3"),
        ("data.condition=words", "none, class or text, got 'words'"),
        ("data.label_dropout=1", r"lies in \[0, 1\), got 1.0"),
        ("model.scaling=cs:9", "κ lies in"),
        ("model.placement=x", "placement is one of"),
    ],
)
def test_bad_overrides_get_a_sentence(setting, says):
    with pytest.raises(ValueError, match=says):
        with_overrides(BASE, [setting])


def test_bad_files_get_a_sentence():
    good = to_dict(BASE)
    for path, value, says in (
        (("train", "stpes"), 1, "unknown setting 'train.stpes'; did you mean train.steps[?]"),
        (("model",), 3, "model is a group of settings, got 3"),
        (("train", "steps"), "a", "train.steps is a whole number, got 'a'"),
    ):
        bad = json.loads(json.dumps(good))
        target = bad
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value
        with pytest.raises(ValueError, match=says):
            from_dict(RunConfig, bad)
    del good["train"]["steps"]
    with pytest.raises(ValueError, match=r"'train\.steps' is missing"):
        from_dict(RunConfig, good)
