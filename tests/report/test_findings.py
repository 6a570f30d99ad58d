import pytest

from scalelong.report.findings import beyond_spread, conclude, finding
from scalelong.report.runs import by_scaling
from tests.report.test_runs import made_run


@pytest.mark.parametrize(
    ("differences", "says"),
    [
        ({}, ""),
        ({"ls": [-0.1, 0.1]}, "No scaling differs from none in loss beyond the spread over 2 seeds."),
        (
            {"cs:0.7": [-0.3, -0.2], "1/sqrt2": [0.0, 0.1], "ls": [0.1, -0.1]},
            "Against none, cs:0.7 lowers the loss by 0.25 ± 0.05, beyond the spread over 2 seeds; 1/sqrt2 and ls "
            "do not differ.",
        ),
        (
            {"cs:0.7": [-0.3, -0.2], "ls": [0.4, 0.5]},
            "Against none, cs:0.7 lowers the loss by 0.25 ± 0.05 and ls raises the loss by 0.45 ± 0.05, beyond the "
            "spread over 2 seeds.",
        ),
        (
            {"ls": [-9.0]},
            "Whether a scaling differs from none in loss cannot be told from one seed, which has no spread.",
        ),
    ],
)
def test_the_sentence_follows_from_the_differences(differences, says):
    assert conclude(differences, "loss") == says


def test_a_difference_counts_beyond_the_range_over_seeds():
    assert beyond_spread([-0.3, -0.2])
    assert not beyond_spread([-0.3, 0.0])  # the mean, 0.15, is within the range, 0.3


def test_differences_are_seed_by_seed_and_of_held_out_images_where_all_have_them():
    runs = [made_run("none", s, s + 1.0) for s in (0, 1)] + [made_run("ls", s, s + 1.5 - s / 100) for s in (0, 1)]
    assert finding(by_scaling(runs)).startswith(
        "Against none, ls raises the loss by 0.5 ± 0.005"
    )  # seeds are 1 apart
    held_out = [
        made_run(scaling, seed, 1.0, **{"held out": {"loss": loss}})
        for scaling, seed, loss in (("none", 0, 1.0), ("none", 1, 2.0), ("ls", 0, 0.5), ("ls", 1, 1.5))
    ]
    assert finding(by_scaling(held_out)).startswith("Against none, ls lowers the held-out loss by 0.5 ± 0")
    assert finding(by_scaling([*runs[:2]])) == ""
    assert finding(by_scaling(runs[2:])) == ""  # nothing to compare with
