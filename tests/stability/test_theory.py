"""Each statement's verdict follows from its numbers, both ways; closed forms against other sources."""

import json
import math

import numpy as np
import pytest
import torch

from scalelong.data.prepare import prepare
from scalelong.data.sources import digits
from scalelong.diffusion.process import mean_square_norm, process_named
from scalelong.report.theory import read_theory, theory_sections
from scalelong.stability import robustness, theorems, theory
from scalelong.stability.noise_ratio import Norms, advise_from
from scalelong.stability.statements import Check, fit_line, statement_from, verdict
from scalelong.stability.theorems import NETS, Settings
from scalelong.stability.toy_net import LongSkipNet
from scalelong.training.log import for_json

SMALL = Settings(num_skips=3, width=32, inits=3)
AS_WRITTEN, KEEPING = NETS


def test_the_verdict_has_three_forms():
    yes, no = Check("A", True, ""), Check("B", False, "")
    assert verdict([yes, yes]) == "holds"
    assert verdict([no]) == "does not hold"
    assert verdict([yes, no]) == "holds only where A"
    assert verdict([yes, Check("A", False, "")]) == "does not hold"  # a condition is met as a whole


def test_a_line_is_fitted_and_judged():
    line = fit_line([0, 1, 2], [1, 3, 5])
    assert (line.slope, line.offset, line.r2) == pytest.approx((2, 1, 1))
    x, y = np.random.default_rng(0).normal(size=(2, 50))
    assert fit_line(x, y).r2 == pytest.approx(np.corrcoef(x, y)[0, 1] ** 2)


# E‖x_t‖²/m of U[-1, 1] for each schedule, to four digits.
EXPECTED = {"ddpm": 0.8163, "vp-sde": 0.8160, "sd": 0.7511, "cosine": 0.6696}


@pytest.mark.parametrize("name", EXPECTED)
def test_lemma_3_2_closed_forms(name):
    from diffusers import DDPMScheduler

    closed = mean_square_norm(process_named(name), 1 / 3)
    assert closed == pytest.approx(EXPECTED[name], abs=1e-4)
    if name == "vp-sde":  # ∫ exp(-a t²/2 - b t) dt in terms of erf
        a, b = 19.9, 0.1
        mean = math.sqrt(math.pi / 2 / a) * math.exp(b * b / 2 / a)
        mean *= math.erf((a + b) / math.sqrt(2 * a)) - math.erf(b / math.sqrt(2 * a))
    else:
        how = {"ddpm": "linear", "sd": "scaled_linear", "cosine": "squaredcos_cap_v2"}[name]
        betas = {"beta_start": 0.00085, "beta_end": 0.012} if name == "sd" else {}
        mean = DDPMScheduler(beta_schedule=how, **betas).alphas_cumprod.mean().item()
    assert closed == pytest.approx(1 - 2 / 3 * mean, abs=1e-3)


def test_lemma_3_2_holds_and_an_error_of_two_thousandths_flips_it():
    found = theory.lemma_3_2(SMALL, count=2000)
    assert found.verdict == "holds"
    assert [row["process"] for row in found.rows] == ["vp-sde", "ddpm", "sd", "cosine"]
    found.rows[2]["measured"] += 0.002
    assert theory.judge_lemma(found.rows).verdict == "does not hold"


def test_real_images_are_judged_beside_uniform_ones(tmp_path):
    store = prepare(digits(), tmp_path / "digits")
    found = theory.lemma_3_2(SMALL, store, count=2000)
    assert found.verdict == "holds only where x_0 ~ U[-1, 1]"
    moment = ((torch.tensor(np.array(store.images)) / 127.5 - 1) ** 2).mean().item()
    for row in found.rows[1::2]:  # the general form: ⅔ becomes 1 - moment
        assert row["measured"] == pytest.approx(mean_square_norm(process_named(row["process"]), moment), abs=0.01)


def feature_rows(where, spread, bend):
    return [
        {
            "where": where,
            "width": w,
            "x": x,
            "y": [(x + 1 + bend * (x % 2)) * f for f in (1 - spread, 1, 1 + spread)],
        }
        for w in (8, 32)
        for x in map(float, range(6))
    ]


@pytest.mark.parametrize(("spread", "bend", "holds"), [(0.1, 0, True), (3, 0, False), (0.1, 9, False)])
def test_thm_3_1_needs_a_line_and_a_band(spread, bend, holds):
    rows = feature_rows(KEEPING, spread, bend) + feature_rows(AS_WRITTEN, 0.1, 9)
    wanted = f"holds only where {KEEPING}" if holds else "does not hold"
    assert theorems.judge_features(rows).verdict == wanted


def test_thm_3_3_needs_a_rising_line():
    def rows(slope):
        return [{"where": "here", "x": float(x), "y": 9.0 + slope * x} for x in range(1, 6)]

    assert theorems.judge_gradients(rows(1)).verdict == "holds"
    assert theorems.judge_gradients(rows(-1)).verdict == "does not hold"
    assert theorems.judge_gradients([{**r, "y": (-1) ** int(r["x"])} for r in rows(1)]).verdict == "does not hold"


def test_gradient_norms_of_single_samples_are_those_of_autograd():
    net = LongSkipNet(2, width=8, seed=3, dtype=torch.float64)
    x, noise = torch.randn(2, 3, 8, dtype=torch.float64)
    losses, squares = theorems.gradient_squares(net, x, noise, (1.0, 0.5), output_scale=0.3)
    for sample in range(3):
        loss = (0.3 * net(x[sample : sample + 1], (1.0, 0.5)) - noise[sample]).square().mean()
        assert loss.item() == pytest.approx(losses[sample].item())
        for name, block in (("a_1", net.encoder[1]), ("b_0", net.decoder[0])):
            gradients = torch.autograd.grad(loss, [block[0].weight, block[2].weight], retain_graph=True)
            wanted = sum(g.square().sum() for g in gradients) / 2 / 0.3**2
            torch.testing.assert_close(squares[name][sample], wanted)


RANDOM, APART = "the weights are these random ones and", "M_0 is max ‖b_i‖·‖a_i‖ instead"


def test_thm_3_4_holds_in_random_nets_until_one_init_breaks_it():
    rows = robustness.theorem_3_4(SMALL, iterations=8).rows
    wanted = f"holds only where {RANDOM} {AS_WRITTEN}; or where {RANDOM} {KEEPING}; or where {APART}"
    assert robustness.judge_gain(rows).verdict == wanted
    rows[0]["sum"] = rows[0]["largest"] / 2
    assert robustness.judge_gain(rows).verdict == f"holds only where {RANDOM} {KEEPING}; or where {APART}"
    rows[-1]["sum_apart"] = rows[-1]["largest"] / 2
    assert robustness.judge_gain(rows).verdict == f"holds only where {RANDOM} {KEEPING}"


def test_a_net_of_five_matrices_breaks_thm_3_4_as_printed():
    """By hand: b_1 (a_1 + b_2 (a_2 a_1 + f a_2 a_1)) = 10 P (… + 2 · swap · 10 (I - P)), of norm 200."""
    net, _ = robustness.counterexample()
    whole = torch.stack([net(row[None], (1.0, 1.0))[0] for row in torch.eye(4)], 1)
    assert torch.linalg.matrix_norm(whole, 2).item() == pytest.approx(200)
    statement = robustness.theorem_3_4(SMALL, iterations=8)
    broken, made = statement.checks[2], statement.rows[-1]
    assert broken.holds is False
    assert broken.found.endswith("3 against 200, with M_0 = 1")
    assert [made[key] for key in ("m0", "sum", "largest")] == pytest.approx([1, 1 + 1 + 1, 200])
    assert [made[key] for key in ("m0_apart", "sum_apart")] == pytest.approx([100, 100 + 2 * 100**2])


@pytest.mark.parametrize("seed", range(20))
def test_thm_3_4_follows_with_the_blocks_gains_apart(seed):
    """Linear nets of any shape: half of the blocks are cut to a few directions, as in the one that breaks it."""
    net = LongSkipNet(3, width=4, layers=1, block_gain=4.0, seed=seed, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    for block in [*net.encoder, *net.decoder]:
        keep = torch.rand(4, generator=generator) < 0.5
        block[0].weight.data[:, keep] *= 0.01
    x, kappas = torch.ones(1, 4, dtype=torch.float64), torch.rand(3, generator=generator).tolist()
    apart = robustness.separate_gain(net, x, kappas, 200)
    norms = [torch.linalg.matrix_norm(block[0].weight.detach(), 2).item() for block in (*net.encoder, *net.decoder)]
    assert apart.item() == pytest.approx(max(a * b for a, b in zip(norms[:3], norms[3:], strict=True)))
    middle = torch.linalg.matrix_norm(net.middle[0].weight.detach(), 2)
    largest = robustness.jacobian_of(lambda y: net(y, kappas), x).largest_gain(200)
    assert largest.item() <= robustness.predicted_gain(kappas, apart, middle).item()


def test_the_sum_of_thm_3_4_is_the_papers():
    m0 = torch.tensor([2.0, 3.0])
    found = robustness.predicted_gain((1.0, 0.5), m0, torch.tensor([1.0, 0.1]))
    torch.testing.assert_close(found, torch.tensor([2 + 0.5 * 4 + 4.0, 3 + 0.5 * 9 + 0.9]))


def test_m_0_is_the_norm_of_the_pairs():
    net = LongSkipNet(2, width=6, layers=1, seed=0, dtype=torch.float64)
    pairs, middle = robustness.block_gains(net, torch.randn(2, 6, dtype=torch.float64), 400)
    for pair, a, b in zip(pairs, net.encoder, net.decoder, strict=True):  # one layer: linear, the same everywhere
        wanted = torch.linalg.matrix_norm(b[0].weight @ a[0].weight, 2)
        torch.testing.assert_close(pair, wanted.detach().expand(2))
    torch.testing.assert_close(middle, torch.linalg.matrix_norm(net.middle[0].weight, 2).detach().expand(2))


def test_the_direction_is_judged_by_where_reversed_is_larger():
    rows = [{"pair": p, "cs": 1.0, "cs-reversed": p - 0.1} for p in (1.0, 1.05, 1.2, 2.0)]
    found = robustness.judge_direction(rows, 1.118)
    assert found.verdict == "holds only where a pair of blocks enlarges typical changes by more than 1.05"
    assert robustness.judge_direction(rows[2:], 1.118).verdict == "holds"
    assert robustness.judge_direction(rows[:2], 1.118).verdict == "does not hold"


@pytest.mark.parametrize(
    ("skips", "kappa", "edge"),
    [(4, 0.7, 1.267), (6, 0.7, 1.118), (8, 0.7, 1.072), (10, 0.7, 1.052), (6, 0.9, 1.094), (6, 0.5, 1.174)],
)
def test_where_the_direction_turns_round_in_expectation(skips, kappa, edge):
    found = robustness.direction_edge(skips, kappa)
    assert found == pytest.approx(edge, abs=1e-3)
    forth, back = (sum(kappa ** (2 * k) * found ** (2 * j) for j, k in enumerate(powers, 1))
                   for powers in (range(skips), range(skips, 0, -1)))  # fmt: skip
    assert forth == pytest.approx(back)


def test_the_measured_direction_turns_round():
    rows = robustness.direction(Settings(num_skips=6, width=32)).rows
    assert rows[0]["cs-reversed"] < rows[0]["cs"]  # blocks that keep the norm
    assert rows[-1]["cs-reversed"] > rows[-1]["cs"]  # Eq. 3 as written


def test_the_range_from_data_depends_on_what_is_called_mean_and_on_the_number_of_skips():
    noised = torch.tensor([0.5, 1.0, 1.0, 0.7774])
    found = advise_from(Norms(torch.ones(4), noised), "ddpm", 6)
    assert theory.judge_data_range(found, "x").verdict == "holds only where “mean” is the ratio of means"
    found = advise_from(Norms(torch.ones(4), noised), "ddpm", 8)  # 0.95 overshoots
    assert theory.judge_data_range(found, "x").verdict == "does not hold"
    flat = advise_from(Norms(torch.ones(4), torch.full((4,), 1 / 1.22)), "ddpm", 6)
    assert theory.judge_data_range(flat, "x").verdict == "holds"


def test_statements_survive_json():
    found = robustness.judge_direction([{"pair": 1.5, "cs": 1.0, "cs-reversed": 2.0}], 1.118)
    back = statement_from(json.loads(json.dumps(found.as_dict())))
    assert (back, back.verdict) == (found, "holds")


@pytest.mark.parametrize("bad", [{"num_skips": 1}, {"width": 8}, {"inits": 1}, {"layers": 0}, {"seed": -1}])
def test_settings_that_cannot_be_are_sentences(bad):
    with pytest.raises(ValueError, match="is at least"):
        Settings(**bad)


@pytest.mark.slow
def test_the_verdicts_of_the_full_size():
    found = {statement.name: statement.verdict for statement in theory.run(Settings())}
    assert found == {
        "Lemma 3.2": "holds",
        "Thm 3.1": "holds only where blocks keep the norm",
        "Thm 3.3": "holds only where blocks keep the norm and the output starts small",
        "Thm 3.4": f"holds only where {RANDOM} {AS_WRITTEN}; or where {RANDOM} {KEEPING}; or where {APART}",
        "Direction of CS": "holds only where a pair of blocks enlarges typical changes by more than 1.10",
        "κ from data": "holds only where “mean” is the ratio of means",
    }


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nothing_is_judged_by_what_is_no_number(bad, tmp_path):
    assert math.isnan(fit_line([1.0, 2.0, bad], [1.0, 2.0, 3.0]).r2)
    rows = [{"where": "here", "x": float(i), "y": bad if i == 2 else 4.0 * i} for i in range(1, 4)]
    assert [check.holds for check in theorems.judge_gradients(rows).checks] == [None]
    keys = ("m0", "sum", "m0_apart", "sum_apart", "skip_sum", "largest", "typical")
    rows = [{"where": "here", "scaling": "none", **dict.fromkeys(keys, 1.0), "sum": bad, "sum_apart": bad}]
    gain = robustness.judge_gain(rows)
    assert [check.holds for check in gain.checks] == [None, None]
    assert robustness.judge_direction([{"pair": 1.0, "cs": bad, "cs-reversed": 1.0}], 1.118).verdict == "not judged"
    file = tmp_path / "theory.json"
    file.write_text(json.dumps(for_json({"statements": [gain.as_dict()]})))
    (section,) = theory_sections(read_theory(file))
    assert "<svg" in section.svg
    assert section.verdict == "Verdict: not judged."
    assert [row["holds"] for row in section.rows] == ["–", "–"]
