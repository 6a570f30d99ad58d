import errno
import json
from pathlib import Path

import pytest
import torch

from scalelong.training import checkpoint
from scalelong.training.checkpoint import CheckpointError, load, load_latest, save


def tensors(value):
    return {"model": {"b": torch.full((3,), value), "a": torch.ones(2, 2)}, "ema-0.999": {"b": torch.zeros(3)}}


def save_step(root, step, keep=2):
    return save(root, tensors(float(step)), {"step": step, "loss": 0.1}, keep)


def test_what_was_saved_comes_back(tmp_path):
    save_step(tmp_path, 7)
    found = load_latest(tmp_path)
    assert found.step == 7
    assert found.state["loss"] == 0.1
    for name, group in tensors(7.0).items():
        assert all(torch.equal(found.tensors(name)[key], value) for key, value in group.items())
    assert load_latest(tmp_path / "nothing") is None


def test_only_the_newest_are_kept(tmp_path):
    for step in (1, 2, 3, 10):
        save_step(tmp_path, step)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["step-000000003", "step-000000010"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-1]),
        lambda f: flip(f / "model.safetensors"),
        lambda f: (f / "ema-0.999.safetensors").unlink(),
        lambda f: (f / "manifest.json").unlink(),
        lambda f: (f / "manifest.json").write_text("{"),
        lambda f: (f / "state.json").write_text('{"step": 999}'),
    ],
)
def test_a_broken_checkpoint_is_named_and_passed_over(tmp_path, spoil):
    save_step(tmp_path, 1)
    broken = save_step(tmp_path, 2)
    spoil(broken)
    with pytest.raises(CheckpointError, match=broken.name):
        load(broken)
    with pytest.warns(UserWarning, match=f"{broken.name}.*passed over"):
        assert load_latest(tmp_path).step == 1


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("fails", ["save_file", "rename"])
def test_a_full_disk_loses_nothing(tmp_path, monkeypatch, fails):
    save_step(tmp_path, 1, keep=1)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    if fails == "save_file":
        monkeypatch.setattr("safetensors.torch.save_file", full)
    else:
        monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(OSError, match="No space left"):
        save_step(tmp_path, 2, keep=1)
    assert [f.name for f in tmp_path.iterdir()] == ["step-000000001"]
    assert load_latest(tmp_path).step == 1


def test_old_ones_are_pruned_only_after_the_new_one_is_in_place(tmp_path, monkeypatch):
    save_step(tmp_path, 1, keep=1)
    seen = []
    real = checkpoint.shutil.rmtree

    def watch(path, *args, **kwargs):
        if Path(path).name == "step-000000001":
            seen.append((tmp_path / "step-000000002" / "manifest.json").is_file())
        real(path, *args, **kwargs)

    monkeypatch.setattr(checkpoint.shutil, "rmtree", watch)
    save_step(tmp_path, 2, keep=1)
    assert seen == [True]


def test_the_manifest_covers_every_file(tmp_path):
    folder = save_step(tmp_path, 1)
    names = {f.name for f in folder.iterdir()} - {"manifest.json"}
    assert set(json.loads((folder / "manifest.json").read_text())) == names


def test_saving_a_step_again_never_leaves_it_without_one(tmp_path, monkeypatch):
    save(tmp_path, {"model": {"x": torch.zeros(2)}}, {"step": 3}, keep=1)
    rename = Path.rename

    def failing(self, target):
        if self.name.startswith(".partial-"):
            raise OSError("no space left")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", failing)
        with pytest.raises(OSError, match="no space"):
            save(tmp_path, {"model": {"x": torch.ones(2)}}, {"step": 3}, keep=1)
    assert load_latest(tmp_path).tensors("model")["x"].sum() == 0
    # Killed between the two renames: the one that was to be replaced is found again.
    rename(tmp_path / "step-000000003", tmp_path / ".replaced-step-000000003")
    assert load_latest(tmp_path).step == 3


def test_a_broken_later_one_does_not_cost_the_one_just_written(tmp_path):
    flip(save_step(tmp_path, 100, keep=1) / "model.safetensors")
    save_step(tmp_path, 40, keep=1)
    save_step(tmp_path, 50, keep=1)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["step-000000050", "step-000000100"]
    with pytest.warns(UserWarning, match="step-000000100 is damaged"):
        assert load_latest(tmp_path).step == 50


def test_a_copy_of_what_may_not_be_written_to_may_be(tmp_path):
    given = save_step(tmp_path / "run", 3)
    (given / "model").mkdir()  # as the processes of FSDP leave it
    (given / "model" / "part").write_text("x")
    everything = [given, *given.rglob("*")]
    for path in everything:
        path.chmod(0o555 if path.is_dir() else 0o444)
    checkpoint.copy(load(given), tmp_path / "branch")
    for path in everything:
        path.chmod(0o755)
        copied = tmp_path / "branch" / path.relative_to(given.parent)
        assert copied.stat().st_mode & 0o200
        assert copied.is_dir() or copied.read_bytes() == path.read_bytes()
