import json

from scalelong.report.monitor import write_monitor_report


def test_what_cannot_be_told_yet_is_a_dash(tmp_path):
    row = {"step": 2, "loss": 0.5, "gradient norm": 1.5, "seconds_per_step": 0.01}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    write_monitor_report(tmp_path, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "2 steps, 10 ms each. Loss 0.5, gradient norm 1.5, its oscillation index – (" in page
    assert "nan" not in page
