"""How long until the first step is done: `python -m benchmarks.startup cifar10-uvit-s`.

Fresh processes of `scalelong train`, from their start to the first line of the log: one with an empty cache of
compiled code, then some that find it filled. Imports, data and, on a GPU, compiling and capturing are all in it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.measure import hardware
from benchmarks.profile import PROFILES
from benchmarks.throughput import random_store, recipe
from scalelong.config import with_overrides


def main(
    preset: Annotated[str, typer.Argument(help="A recipe of scalelong train.")] = "cifar10-uvit-s",
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C")] = None,
    warm: Annotated[int, typer.Option(min=1, help="Starts with a filled cache.")] = 2,
    out: Annotated[Path, typer.Option(help="Where the result file goes.")] = PROFILES,
) -> None:
    """Time starts of a training, print them and write a dated result file."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        random_store(work / "store", with_overrides(recipe(preset), settings or []))
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"), "TRITON_CACHE_DIR": str(work / "triton")}
        changes = [word for setting in (settings or []) for word in ("--set", setting)]
        seconds = [
            first_step_s([preset, "--data", str(work / "store"), *changes], work / f"run-{start}", caches)
            for start in range(1 + warm)
        ]
    result = {
        "preset": preset,
        "cold_s": round(seconds[0], 2),
        "warm_s": [round(s, 2) for s in seconds[1:]],
        "hardware": hardware(),
        "torch": torch.__version__,
    }
    typer.echo(json.dumps(result, indent=1))
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"{date.today().isoformat()}-startup-{preset}.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    typer.echo(f"written: {file}")


def first_step_s(arguments: list[str], run: Path, environment: Mapping[str, str]) -> float:
    """Seconds from a process' start to its first line in metrics.jsonl; it is ended then."""
    command = [
        sys.executable, "-m", "scalelong", "train", *arguments,
        "--set", "train.log_every=1", "--logger", "none", "--out", str(run),
    ]  # fmt: skip
    log = run / "metrics.jsonl"
    with tempfile.TemporaryFile() as printed:
        started = time.perf_counter()
        process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=printed, stderr=printed)
        try:
            while not (log.exists() and log.stat().st_size):
                if process.poll() is not None:
                    printed.seek(0)
                    raise RuntimeError(f"training ended before its first step:\n{printed.read().decode()}")
                time.sleep(0.02)
            return time.perf_counter() - started
        finally:
            process.kill()
            process.wait()


if __name__ == "__main__":
    typer.run(main)
