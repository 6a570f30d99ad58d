"""The verdict from made-up scores, the halving, and a real small probe that is stopped and goes on."""

import json
import math

import pytest

from scalelong.config import with_overrides
from scalelong.data.prepare import prepare
from scalelong.data.sources import digits
from scalelong.presets import run_preset
from scalelong.stability import probe as module
from scalelong.stability.probe import Plan, Score, judge, probe, round_members, train_member

TINY = ["model.changes.hidden_size=16", "model.changes.num_layers=4", "train.batch_size=4", "train.ema_rates=0.9"]
BASE = with_overrides(run_preset("digits"), TINY)


def score(spec, losses, reference=(0.5, 0.6, 0.7)):
    kappa = 1.0 if spec == "none" else float(spec[3:])
    differences = [0.0 if a == b else a - b for a, b in zip(losses, reference, strict=True)]
    return Score(
        kappa=kappa, spec=spec, steps=100, losses=list(losses), oscillations=[0.1] * 3, differences=differences
    )


SEEDS = "beyond the spread over seeds"
NONE = score("none", (0.5, 0.6, 0.7))


@pytest.mark.parametrize(
    ("losses", "verdict", "spec"),
    [
        ((0.4, 0.5, 0.6), "cs:0.7 changes the loss by -0.1 ± ", "cs:0.7"),  # in every seed, within their range
        ((0.45, 0.62, 0.68), "no difference beyond the spread", "none"),
        ((0.6, 0.7, 0.8), f"no κ is better than no scaling {SEEDS}; worse beyond the spread: cs:0.7", "none"),
        ((math.inf,) * 3, "no κ is better", "none"),
    ],
)
def test_the_verdict_follows_from_the_differences_seed_by_seed(losses, verdict, spec):
    found = judge([[NONE, score("cs:0.7", losses)]])
    assert found.verdict.startswith(verdict)
    assert found.spec == spec


def test_the_best_of_several_wins():
    found = judge([[NONE, score("cs:0.9", (0.49, 0.59, 0.69)), score("cs:0.8", (0.4, 0.5, 0.6))]])
    assert found.spec == "cs:0.8"
    json.dumps(found.as_dict())


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"kappas": (1.0, 1.2)}, r"in \(0, 1\]"),
        ({"kappas": (1.0, 1.0)}, "different numbers"),
        ({"kappas": (0.9, 0.8)}, "κ = 1 is one of"),
        ({"seeds": (0,)}, "two different seeds"),
        ({"steps": 30}, "at least 40 steps"),
        ({"rounds": 0}, "0 rounds"),
    ],
)
def test_plans_that_cannot_be_are_sentences(bad, says):
    with pytest.raises(ValueError, match=says):
        Plan(**bad)


def test_half_of_the_kappas_go_on_and_no_scaling_always_does(monkeypatch, tmp_path):
    """The larger κ, the lower the loss here, and no scaling the worst."""
    reached, asked = {}, []

    def train(group):
        asked.append(sorted({member.scaling for member in group}))
        for member in group:
            reached[member.folder] = member.config.train.steps
            kappa = 0.1 if member.scaling == "none" else float(member.scaling[3:])
            member.folder.mkdir(exist_ok=True)
            rows = [{"step": s, "loss": 1 - kappa, "gradient norm": 1.0} for s in range(10, 401, 10)]
            (member.folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return [True] * len(group)

    monkeypatch.setattr(module, "_reached", lambda folder: reached.get(folder, 0))
    plan = Plan(kappas=(1.0, 0.9, 0.8, 0.7, 0.6, 0.5))
    found = probe(BASE, plan, tmp_path, train)
    assert asked == [
        ["cs:0.5", "cs:0.6", "cs:0.7", "cs:0.8", "cs:0.9", "none"],
        ["cs:0.7", "cs:0.8", "cs:0.9", "none"],
        ["cs:0.8", "cs:0.9", "none"],
    ]
    assert [scores[0].steps for scores in found.rounds] == [100, 200, 400]
    assert found.spec == "cs:0.9"
    asked.clear()
    assert probe(BASE, plan, tmp_path, train) == found  # all is there: nothing is trained again
    assert asked == []
    assert probe(BASE, plan, tmp_path / "elsewhere", lambda group: [False] * len(group)) is None


@pytest.mark.slow
def test_a_run_that_diverges_has_lost_and_is_not_tried_again(tmp_path):
    store = prepare(digits(), tmp_path / "digits")
    base = with_overrides(BASE, ["train.lr=1e30", "train.warmup_steps=0"])
    member = round_members(base, [1.0], [0], 40, tmp_path)[0]
    assert train_member(member, store.folder)
    assert "not finite" in json.loads((member.folder / module.DIVERGED).read_text())["why"]
    assert module._reached(member.folder) == math.inf
    assert module._window(member.folder, 40) == (math.inf, math.inf)


@pytest.mark.slow
def test_a_probe_that_was_stopped_goes_on_and_ends_the_same(tmp_path):
    store = prepare(digits(), tmp_path / "digits")
    plan = Plan(kappas=(1.0, 0.7), seeds=(0, 1), steps=40, rounds=2)

    def train(group):
        return [train_member(member, store.folder) for member in group]

    def stop_after_two(group):
        return [train_member(member, store.folder) for member in group[:2]] + [False] * (len(group) - 2)

    whole = probe(BASE, plan, tmp_path / "whole", train)
    assert probe(BASE, plan, tmp_path / "stopped", stop_after_two) is None
    assert probe(BASE, plan, tmp_path / "stopped", train) == whole
    for scores in whole.rounds:
        assert all(0 < loss < 5 for s in scores for loss in s.losses)
