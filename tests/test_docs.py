"""Code blocks in the documentation run; links lead somewhere; the project speaks of itself alone."""

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [p for p in PAGES if FENCE.search(p.read_text())], ids=lambda p: p.name)
def test_code_blocks_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_images" / "cats").mkdir(parents=True)
    for i in range(3):
        Image.fromarray(np.random.default_rng(i).integers(0, 255, (40, 50, 3), dtype=np.uint8)).save(
            tmp_path / "my_images" / "cats" / f"{i}.png"
        )
    namespace: dict = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in FENCE.findall(page.read_text()):
            exec(compile(block, str(page), "exec"), namespace)


def test_the_first_block_of_the_readme_prints_the_skip_table(capsys):
    block = FENCE.search((ROOT / "README.md").read_text())[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the first thing a reader runs does what it says
        exec(compile(block, "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "cs:0.7 at norm on UNet2DModel: 6 long skips, outermost first"
    assert [line.split()[3] for line in lines[2:8]] == ["1", "0.7", "0.49", "0.343", "0.2401", "0.16807"]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_the_readme_names_every_module():
    text = (ROOT / "README.md").read_text()
    for module in (ROOT / "src/scalelong").rglob("*.py"):
        if module.name not in ("__init__.py", "version.py", "main.py"):
            assert module.name in text or module.stem in text, f"README's file tree lacks {module}"


def test_the_readme_names_every_preset():
    from scalelong.presets import MODEL_PRESETS

    text = (ROOT / "README.md").read_text()
    assert not [name for name in MODEL_PRESETS if name not in text]


@pytest.mark.slow
def test_the_plain_loop_under_the_monitor_rings(tmp_path):
    from examples import monitor_plain_loop

    monitor = monitor_plain_loop.main(230, tmp_path / "run")
    assert 201 <= monitor.alarms[0].step <= 205
    assert "ALARM" not in (tmp_path / "run" / "report.html").read_text()
    assert (tmp_path / "run" / "report.html").read_text().count("<svg") >= 8


def test_diffusers_loop_under_the_monitor(tmp_path):
    from examples import monitor_diffusers_accelerate

    monitor = monitor_diffusers_accelerate.main(20, tmp_path / "run", batch=4)
    (row,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert row["step"] == 20
    assert [f"skip norm/{i}" in row["signals"] for i in range(4)] == [True] * 4
    assert not monitor.alarms


@pytest.mark.slow
def test_the_example_runs():
    run = subprocess.run(
        [sys.executable, ROOT / "examples" / "skip_tables.py", "--quick"],
        capture_output=True,
        text=True,
        check=True,
    )
    for spec in ("cs-reversed:0.7", "ls-per-skip", "ie"):
        assert run.stdout.count(spec) >= 4  # a skip table and a result, on both nets
    assert "nan" not in run.stdout
