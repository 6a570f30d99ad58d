import re
import subprocess
import sys

import pytest

from scalelong.report import figures
from scalelong.report.runs import Record


def record(values, name="skip norm/0"):
    rows = [{"step": i, "loss": v, "signals": {name: v}, "update": {"a": v}} for i, v in enumerate(values)]
    return Record(rows)


COEFFICIENT = record([0.5], "coefficient/0")


def texts(svg):
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def letters(svg):
    """Size of the page's letters over that in the figure."""
    rem, points = re.search(r'style="width: ([\d.]+)rem".*?width="([\d.]+)pt"', svg, re.DOTALL).groups()
    return float(rem) / float(points)


def test_a_report_leaves_the_backend_of_its_process_alone():
    """In a process of its own: here another test may have chosen one."""
    code = (
        "import matplotlib; matplotlib.use('svg')\n"
        "import scalelong.report.figures, scalelong.reproduce.drawing as drawing\n"
        "from scalelong.report.runs import Record\n"
        "scalelong.report.figures.curves({'a': [Record([{'step': 1, 'loss': 1.0}])]}, ('loss',), 'loss')\n"
        "drawing.panels(2)\n"
        "import sys; print(matplotlib.get_backend(), 'matplotlib.pyplot' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.split() == ["svg", "False"]


def test_all_figures_are_drawn_at_one_scale():
    one, four = ({str(i): [record([1.0, 2.0])] for i in range(n)} for n in (1, 4))
    drawn = [
        figures.curves(one, ("loss",), "loss"),
        *(figures.per_skip(g, "skip norm", "norm") for g in (one, four)),
    ]
    assert letters(drawn[0]) == pytest.approx(letters(drawn[1]), rel=1e-2)
    assert letters(drawn[0]) == pytest.approx(letters(drawn[2]), rel=1e-2)


@pytest.mark.parametrize("values", [[33.0, 41.0], [20.0, 90.0], [0.02, 90.0], [0.0002, 90.0]])
def test_ticks_are_plain_numbers(values):
    svg = figures.per_skip({"none": [record(values)]}, "skip norm", "norm")
    assert "times" not in svg
    assert "×" not in "".join(texts(svg))
    assert any(re.fullmatch(r"[\d.e-]+", text) for text in texts(svg))


@pytest.mark.parametrize(("points", "marked"), [(1, 1), (3, 3), (100, 0)])
def test_a_point_alone_is_seen_and_many_are_a_line(points, marked):
    found = record([1.5] * points)
    for svg, colour in (
        (figures.curves({"": [found]}, ("loss",), "loss"), "1f77b4"),
        (figures.lines(found, {"a": ("loss",)}, "loss"), "440154"),
    ):
        marks = len(re.findall(f"<use [^>]*fill: #{colour}; stroke", svg))
        assert marks in (marked, marked + 1 if marked else 0)  # one more where the legend has it


def test_steps_are_whole_numbers():
    for svg in (
        figures.curves({"": [record([1.5])]}, ("loss",), "loss"),
        figures.coefficients({"ls": [COEFFICIENT]}),
    ):
        ticks = re.search(r'id="matplotlib.axis_1".*?id="matplotlib.axis_2"', svg, re.DOTALL)[0]
        numbers = [t.replace("\N{MINUS SIGN}", "-") for t in texts(ticks)[:-1]]
        assert numbers
        assert all(float(t).is_integer() for t in numbers)


def test_coefficients_of_seeds_are_one_line_and_a_band():
    runs = [record([v], "coefficient/0") for v in (0.4, 0.6)]
    svg = figures.coefficients({"ls": runs})
    assert texts(svg).count("ls") == 1
    assert "PolyCollection" in svg
