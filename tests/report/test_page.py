import json
from dataclasses import replace

from scalelong.report.page import write_report
from tests.report.test_runs import made_run


def page_of(tmp_path, *runs):
    write_report(list(runs), tmp_path / "page.html", "scalelong report")
    return (tmp_path / "page.html").read_text()


def test_the_page_of_one_run_speaks_of_one_run(tmp_path):
    page = page_of(tmp_path, made_run("cs:0.7", 3, 0.25))
    for says in ("<h1>cs:0.7 with the recipe digits</h1>", "One run of 2,000 steps", "seed 3.", "<td>0.25</td>"):
        assert says in page
    for says in ("±", "1 runs", "1 seeds", "pixel", "over seeds", 'class="verdict"', "Pixel"):
        assert says not in page.partition("</style>")[2]


def test_a_comparison_begins_with_what_it_shows(tmp_path):
    runs = [made_run(scaling, seed, loss) for scaling, loss in (("none", 1.0), ("ls", 0.5)) for seed in (0, 1)]
    page = page_of(tmp_path, *runs)
    assert "<h1>Skip scaling with the recipe digits</h1>" in page
    lowered = "Against none, ls lowers the loss by 0.5 ± 0, beyond the spread over 2 seeds (chance"
    assert page.index(lowered) < page.index("4 runs of 2,000 steps")
    assert "Mean over seeds ± half their range." in page


def test_a_comparison_of_ones_own_weights_says_where_all_runs_began(tmp_path):
    runs = [replace(made_run(scaling, 0, 1.0), folder=tmp_path / scaling) for scaling in ("none", "ls")]
    for run in runs:
        run.folder.mkdir()
        (run.folder / "began.json").write_text(json.dumps({"how": "weights", "source": "my/unet", "step": 0}))
    page = page_of(tmp_path, *runs)
    assert "All begin with my/unet (the spread over seeds is not of first weights); runs of one seed share" in page


def test_what_is_said_of_the_gates_of_digits_is_not_said_of_larger_images(tmp_path):
    run = made_run("ls", 0, 1.0)
    assert "With 17 tokens" in page_of(tmp_path, run)
    changes = {**run.config.model.changes, "sample_size": 32}
    larger = replace(run.config, model=replace(run.config.model, changes=changes))
    assert "With 17 tokens" not in page_of(tmp_path, replace(run, config=larger))
