"""Rooms import only from rooms to their left; what is heavy is imported where it is used."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "scalelong"

# room -> the rooms of the package that its modules may import at the top of the file
ALLOWED = {
    "__init__": {"version"},
    "version": set(),
    "presets": {"config"},
    "config": {"skips"},
    "skips": {"skips"},
    "adapters": {"adapters", "skips"},
    "saving": {"skips"},
    "data": {"data"},
    "kernels": {"kernels"},
    "diffusion": {"diffusion", "data", "kernels"},
    "metrics": {"metrics", "data", "world"},
    "training": {"training", "data", "diffusion", "kernels", "skips", "config", "world"},
    "backbones": {"backbones", "kernels", "skips", "presets", "saving"},
    "report": {"report", "config", "data", "training", "version"},
    "stability": {
        "stability",
        "comparison",
        "config",
        "data",
        "diffusion",
        "experiment",
        "report",
        "skips",
        "training",
    },
    "reproduce": {
        "comparison",
        "config",
        "data",
        "diffusion",
        "experiment",
        "metrics",
        "presets",
        "report",
        "reproduce",
        "skips",
        "stability",
        "training",
    },
    "comparison": {"config", "data"},
    "held_out": {"config", "data", "experiment"},
    "caption_check": {"config", "data", "held_out"},
    "judging": {"config", "data", "experiment", "held_out", "metrics", "world"},
    "runs": {"runs", "backbones", "config", "data", "diffusion", "presets", "saving", "skips", "training", "world"},
    "experiment": {"config", "data", "runs", "training", "world"},
    "world": set(),
    "__main__": {"cli"},
    "costs": {"backbones", "config", "experiment", "presets"},
    "export": {"backbones", "data", "diffusion", "experiment", "saving", "skips"},
    "pipeline": set(),
    "cli": {"cli", "version"},
}


def imports_at_top(file: Path) -> list[str]:
    """Modules imported when the file is, function bodies and TYPE_CHECKING blocks left out."""
    found = []
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


@pytest.mark.parametrize("file", sorted(SOURCE.rglob("*.py")), ids=lambda f: str(f.relative_to(SOURCE)))
def test_rooms_import_only_from_their_left(file):
    room = file.relative_to(SOURCE).parts[0].removesuffix(".py")
    rooms = {name.split(".")[1] for name in imports_at_top(file) if name.startswith("scalelong.")}
    assert rooms <= ALLOWED[room], f"{room} must not import {rooms - ALLOWED[room]}"


def test_the_method_needs_torch_alone():
    for file in (SOURCE / "skips").glob("*.py"):
        packages = {name.split(".")[0] for name in imports_at_top(file)} - set(sys.stdlib_module_names)
        assert packages <= {"torch", "scalelong"}, file


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_is_lazy():
    heavy = ["torch", "diffusers", "transformers", "numpy", "typer", "rich"]
    assert run(f"import sys, scalelong; print([m for m in {heavy} if m in sys.modules])") == "[]\n"
    assert run("import sys, scalelong; scalelong.CS; print('diffusers' in sys.modules)") == "False\n"


def test_the_method_runs_where_diffusers_is_not_installed():
    code = """
import sys
sys.modules.update(dict.fromkeys(["diffusers", "transformers", "numpy", "safetensors", "typer", "rich"]))
import torch, scalelong
scales = scalelong.SkipScales("ls", 2, widths=32)
print(tuple(scales(torch.ones(1, 32, 2, 2), 1).shape))
try:
    scalelong.apply(torch.nn.Linear(1, 1), "cs:0.7")
except ValueError as error:
    print(type(error).__name__)
"""
    assert run(code) == "(1, 32, 2, 2)\nUnsupportedModelError\n"


def test_the_command_line_starts_without_torch():
    code = """
import sys
from typer.testing import CliRunner
from scalelong.cli.main import app
codes = [CliRunner().invoke(app, [*command, "--help"]).exit_code for command in ([], ["train"])]
print(codes, "torch" in sys.modules, "diffusers" in sys.modules)
"""
    assert run(code) == "[0, 0] False False\n"


def test_public_names():
    code = """
import scalelong
for name in scalelong.__all__: getattr(scalelong, name)
print(len(scalelong.__all__) - 1, dir(scalelong) == scalelong.__all__)
try: scalelong.nothing
except AttributeError as error: print("parse_scaling" in str(error), "ModelMixin" in str(error))
"""
    assert run(code) == "15 True\nTrue False\n"
