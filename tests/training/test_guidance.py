"""Guidance on a model that was really trained: a classifier of real digits sees more of the class asked for."""

from dataclasses import replace

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from scalelong import experiment
from scalelong.data.prepare import prepare
from scalelong.data.sources import digits
from tests.training.test_fit import config

DIGITS = [0, 1, 4]  # of ten classes a model of seconds would learn too little
SETTINGS = [
    "data.condition=class",
    "train.steps=600",
    "train.batch_size=64",
    "train.lr=3e-3",
    "train.betas=0.9,0.99",
    "train.ema_rates=0.98",
    "train.log_every=100",
    "train.monitor_every=100",
    "train.checkpoint_every=600",
]


@pytest.fixture(scope="module")
def some_digits(tmp_path_factory):
    ten = digits()

    def items():
        return (replace(item, label=DIGITS.index(item.label)) for item in ten.items() if item.label in DIGITS)

    three = replace(ten, classes=[str(digit) for digit in DIGITS], items=items)
    return prepare(three, tmp_path_factory.mktemp("data") / "digits")


@pytest.fixture(scope="module")
def classifier(some_digits):
    pixels, labels = np.asarray(some_digits.images).reshape(len(some_digits), -1) / 127.5 - 1, some_digits.labels
    half = len(labels) // 2
    result = LogisticRegression(max_iter=2000).fit(pixels[:half], labels[:half])
    assert result.score(pixels[half:], labels[half:]) > 0.95
    return result


@pytest.mark.slow
def test_guidance_moves_samples_towards_their_class(some_digits, classifier, tmp_path):
    seed = 0
    experiment.train(config(*SETTINGS, f"train.seed={seed}"), some_digits, tmp_path / "run", device="cpu")
    run = experiment.load_run(tmp_path / "run", device="cpu")
    labels = np.arange(300) % 3  # what draw asks for without labels

    def agreement(guidance):
        images = experiment.draw(run.config, run.model, 300, seed=seed, steps=15, guidance=guidance)
        of_each = classifier.predict_proba(images.flatten(1).numpy())
        return of_each[np.arange(300), labels].mean(), (of_each.argmax(1) == labels).mean()

    without, plain, guided = agreement(0.0), agreement(1.0), agreement(3.0)
    assert without[0] == pytest.approx(1 / 3, abs=0.08)  # w = 0 draws without the class: chance
    assert plain[0] > without[0] + 0.08
    assert guided[0] > plain[0] + 0.08
    assert guided[1] > plain[1] + 0.05
    assert guided[1] > 0.55
