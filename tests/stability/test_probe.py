"""The verdict from made-up scores, the halving, and a real small probe that is stopped and goes on."""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import scalelong
from scalelong import experiment
from scalelong.cli.main import app
from scalelong.config import with_overrides
from scalelong.data.prepare import prepare
from scalelong.data.sources import digits
from scalelong.presets import run_preset
from scalelong.report.kappa import probe_rows
from scalelong.stability import probe as module
from scalelong.stability.probe import Plan, Score, judge, kept, probe, ranked, round_members, train_member
from scalelong.training.log import divergence

TINY = ["model.changes.hidden_size=16", "model.changes.num_layers=4", "train.batch_size=4", "train.ema_rates=0.9"]
BASE = with_overrides(run_preset("digits"), TINY)


def score(spec, losses, reference=(0.5, 0.6, 0.7)):
    kappa = 1.0 if spec == "none" else float(spec[3:])
    differences = [a - b for a, b in zip(losses, reference, strict=True)]
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


INF = math.inf


@pytest.mark.parametrize(
    ("differences", "beyond"),
    [
        ([-INF, 0.1, 0.1], False),  # better in one seed, which diverged without scaling, and worse in the others
        ([INF, -0.1, -0.1], False),
        ([-INF, -0.1, -0.1], True),
        ([-INF, -0.1, -0.5], False),
        ([INF, INF, 0.1], True),
        ([INF, INF, math.nan], False),  # a seed in which both diverged
        ([-0.1, -0.1, math.nan], False),
        ([-INF, INF, 0.1], False),
        ([-INF] * 3, True),
    ],
)
def test_a_divergence_does_not_outvote_the_other_seeds(differences, beyond):
    found = Score(kappa=0.7, spec="cs:0.7", steps=1, losses=[0.1], oscillations=[], differences=differences)
    assert found.beyond_spread is beyond


def test_what_is_better_than_a_divergence_is_told_without_infinite_numbers():
    def told(reference):
        lost = score("none", reference, reference)
        return judge([[lost, score("cs:0.7", (0.4, 0.5, 0.6), reference)]]).verdict

    assert told((INF,) * 3) == "cs:0.7 trains, and no scaling diverges in every seed"
    assert told((INF, 0.6, 0.7)).endswith("beyond the spread; in 1 of 3 seeds no scaling diverges")


def test_two_runs_that_diverged_have_no_difference():
    both = score("none", (INF, 0.6, 0.7), (INF, 0.6, 0.7)), score("cs:0.7", (INF, 0.5, 0.6), (INF, 0.6, 0.7))
    rows = probe_rows(judge([list(both)]).as_dict())
    assert rows[1]["minus none's"] == "-0.1 ± 0, diverged in 1 of 3"


def better_by_chance(seeds, kept_share, probes=2000):
    """How often a probe of the default plan finds some κ better where κ changes nothing.

    Losses are normal; of a run's luck `kept_share` goes on from round to round, as it is the same run.
    """
    rng, plan, found = np.random.default_rng(0), Plan(seeds=tuple(range(seeds))), 0
    for _ in range(probes):
        luck = {kappa: rng.normal(size=seeds) for kappa in plan.kappas}
        kappas, rounds = list(plan.kappas), []
        for steps, count in plan.sizes():
            kappas = kept(plan.kappas, kappas, count)
            fresh = {kappa: rng.normal(size=seeds) for kappa in kappas}
            luck = {k: math.sqrt(kept_share) * luck[k] + math.sqrt(1 - kept_share) * fresh[k] for k in kappas}
            rounds.append(
                [
                    Score(kappa=k, spec=module.spec_of(k), steps=steps, losses=list(luck[k]), oscillations=[],
                          differences=list(luck[k] - luck[1.0]))
                    for k in kappas
                ]
            )  # fmt: skip
            kappas = ranked(rounds[-1])
        found += judge(rounds).spec != "none"
    return found / probes


@pytest.mark.parametrize(("seeds", "least", "most"), [(2, 0.20, 0.39), (3, 0.07, 0.14), (4, 0.02, 0.04)])
def test_chance_passes_a_whole_probe_as_often_as_the_page_says(seeds, least, most):
    """docs/choosing-kappa.md has these numbers; three standard errors of 2,000 probes are up to 0.03."""
    assert better_by_chance(seeds, 0.0) == pytest.approx(least, abs=0.03 if seeds < 4 else 0.01)
    assert better_by_chance(seeds, 1.0) == pytest.approx(most, abs=0.03 if seeds < 4 else 0.015)


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
    assert "not finite" in divergence(member.folder)["error"]
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


@pytest.mark.slow
def test_a_network_of_ones_own_is_probed(tmp_path):
    """Its arguments decide the network, its weights are where every run begins."""
    mine = scalelong.UViT(
        sample_size=8, patch_size=4, in_channels=1, hidden_size=32, num_layers=4, num_attention_heads=2
    )
    mine.save_pretrained(tmp_path / "mine")
    store = prepare(digits(), tmp_path / "digits")
    base = with_overrides(run_preset("digits"), ["train.lr=1e-30", "train.batch_size=4", "train.ema_rates=0.9"])
    seen = []

    def train(group):
        seen.extend(group)
        return [train_member(member, store.folder) for member in group]

    plan = Plan(kappas=(1.0, 0.7), seeds=(0, 1), steps=40, rounds=1)
    assert probe(base, plan, tmp_path / "runs", train, str(tmp_path / "mine")) is not None
    assert [member.scaling for member in seen] == ["none", "cs:0.7"] * 2
    for member in seen:
        found = experiment.load_run(member.folder).model.state_dict()
        assert all(torch.allclose(found[name], weight, atol=1e-20) for name, weight in mine.state_dict().items())
    args = ["kappa", "--probe", "--init", str(tmp_path / "mine"), "--data", str(store.folder), "--dry-run"]
    output = CliRunner().invoke(app, [*args, "--runs", str(tmp_path / "o")], catch_exceptions=False).output
    assert '"hidden_size": 32' in output


@pytest.mark.parametrize("kappa", [0.5, 0.1234567, 1 / 3])
def test_a_round_knows_its_kappa_again(kappa):
    """Of a κ that is rounded in the run's name, the best would be left out of the next round."""
    spec = module.spec_of(kappa)
    assert float(spec.removeprefix("cs:")) == kappa
    assert kept([1.0, kappa, 0.9], [float(spec.removeprefix("cs:")), 1.0, 0.9], 2) == [1.0, kappa]


def test_who_diverged_is_counted():
    lost = [score(spec, (INF,) * 3, (INF,) * 3) for spec in ("none", "cs:0.9")]
    assert judge([lost]).verdict == "every run diverged: take a lower train.lr"
    once = score("cs:0.9", (0.5, 0.6, INF))
    assert judge([[NONE, once]]).verdict.endswith("spread over seeds; cs:0.9 diverged in 1 of 3 seeds")
    rows = probe_rows({"rounds": [[asdict(once) | {"beyond_spread": False}]]})
    assert rows[0]["loss"] == "0.55 ± 0.05, diverged in 1 of 3"
