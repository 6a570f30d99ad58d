import json
import os
import signal
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest
import torch

from scalelong.data.loader import Loader
from scalelong.data.prepare import prepare
from scalelong.data.sources import Item, Source, SourceError, digits
from scalelong.data.store import StoreError, open_store


def source(count=20, shape=(4, 6, 3), classes=("a", "b"), broken=(), odd=()):
    def items():
        for i in range(count):
            if i in broken:
                yield Item(f"file {i}", None, None, "OSError: cut short")
                continue
            image = np.random.default_rng(i).integers(0, 256, (5, 5, 3) if i in odd else shape, dtype=np.uint8)
            yield Item(f"file {i}", image, i % 2 if classes else None)

    return Source("made", count, list(classes) if classes else None, items)


def test_a_store_gives_back_what_was_put_in(tmp_path):
    store = prepare(source(), tmp_path / "store")
    again = open_store(tmp_path / "store")
    for i, item in enumerate(source().items()):
        np.testing.assert_array_equal(again.images[i], item.image)
        assert again.labels[i] == item.label
    assert (len(again), again.num_classes, again.images.dtype) == (20, 2, np.uint8)
    assert isinstance(again.images, np.memmap)
    assert store.checksum == again.checksum != prepare(source(19), tmp_path / "other").checksum
    np.testing.assert_array_equal(np.load(tmp_path / "store" / "images.npy"), again.images)  # a plain .npy file


def test_the_digits_prepare(tmp_path):
    store = prepare(digits(), tmp_path / "digits")
    assert store.images.shape == (1797, 8, 8, 1)


def test_broken_images_are_named_and_skipped_but_not_many(tmp_path):
    store = prepare(source(200, broken=(7, 11)), tmp_path / "store")
    assert len(store) == 198
    assert store.manifest.skipped == ["file 7: OSError: cut short", "file 11: OSError: cut short"]
    np.testing.assert_array_equal(store.images[7], next(i for i in source().items() if i.name == "file 8").image)
    with pytest.raises(SourceError, match="3 of 200 images could not be read, more than 1%; mend .*\n  file 0"):
        prepare(source(200, broken=(0, 1, 2)), tmp_path / "other")
    assert not list(tmp_path.glob("*other*"))


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (source(odd=(9,)), "the first is 6×4, file 9 is 5×5; give --size N"),
        (source(0), "made gave no images"),
    ],
)
def test_refusals_leave_nothing_behind(tmp_path, made, says):
    with pytest.raises(SourceError, match=says):
        prepare(made, tmp_path / "store")
    assert not list(tmp_path.iterdir())


def captioned(count=6, without=(), texts=lambda i: (f"picture {i}", "ein Bild: ü\n")):
    image = np.zeros((2, 2, 3), np.uint8)
    made = [Item(f"file {i}", image, None, None, None if i in without else texts(i)) for i in range(count)]
    return Source("made", count, None, lambda: iter(made))


def test_captions_are_kept_with_their_images_and_checked(tmp_path):
    store = prepare(captioned(), tmp_path / "store")
    assert open_store(tmp_path / "store").captions == [(f"picture {i}", "ein Bild: ü\n") for i in range(6)]
    assert store.checksum != prepare(captioned(texts=lambda i: ("x",)), tmp_path / "other").checksum
    file = tmp_path / "store" / "captions.jsonl"
    file.write_text(file.read_text().replace("picture 3", "picture 8"))
    with pytest.raises(StoreError, match="captions.jsonl does not have the checksum"):
        open_store(tmp_path / "store")


def test_a_store_without_captions_has_none_and_looks_as_it_always_did(tmp_path):
    prepare(source(), tmp_path / "store")
    assert open_store(tmp_path / "store").captions is None
    manifest = json.loads((tmp_path / "store" / "manifest.json").read_text())
    assert set(manifest) == {
        *("format", "source", "count", "height", "width", "channels", "classes", "skipped", "sha256")
    }
    assert set(manifest["sha256"]) == {"images.npy", "labels.npy"}
    assert not (tmp_path / "store" / "captions.jsonl").exists()


@pytest.mark.parametrize(
    ("without", "says"),
    [((4,), "file 4 has no caption, and others have one"), ((0, 1), "file 2 has a caption, and others have none")],
)
def test_captions_are_for_all_images_or_none(tmp_path, without, says):
    with pytest.raises(SourceError, match=says):
        prepare(captioned(without=without), tmp_path / "store")
    assert not list(tmp_path.iterdir())


def labelled(*labels, classes=8):
    items = [Item(f"file {i}", np.zeros((2, 2, 3), np.uint8), label) for i, label in enumerate(labels)]
    return Source("made", len(items), [str(i) for i in range(classes)], lambda: iter(items))


def test_classes_without_an_image_are_told(tmp_path):
    with pytest.warns(UserWarning, match=r"4 of 8 classes have no image \(3, 4, 5 …\).*without gaps"):
        prepare(labelled(0, 1, 2, 7), tmp_path / "gaps")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare(labelled(*range(8)), tmp_path / "whole")
        prepare(source(classes=None), tmp_path / "unlabelled")


@pytest.mark.parametrize("label", [-1, 8])
def test_a_label_that_is_no_class_is_named(tmp_path, label):
    with pytest.raises(SourceError, match=f"file 1 has the label {label}, and made has the classes 0 … 7"):
        prepare(labelled(0, label), tmp_path / "store")
    assert not list(tmp_path.iterdir())


def test_missing_labels_are_named(tmp_path):
    unlabelled = Source("made", 1, ["a"], lambda: iter([Item("x.png", np.zeros((2, 2, 3), np.uint8), None)]))
    with pytest.raises(SourceError, match="x.png has no label"):
        prepare(unlabelled, tmp_path / "store")


def test_an_existing_folder_is_not_overwritten(tmp_path):
    prepare(source(), tmp_path / "store")
    with pytest.raises(SourceError, match="already holds a prepared dataset"):
        prepare(source(), tmp_path / "store")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(SourceError, match="already holds something else"):
        prepare(source(), tmp_path / "mine")
    (tmp_path / "empty").mkdir()
    prepare(source(), tmp_path / "empty")


@pytest.mark.parametrize("name", ["images.npy", "labels.npy"])
def test_a_flipped_bit_is_found(tmp_path, name):
    prepare(source(), tmp_path / "store")
    file = tmp_path / "store" / name
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with pytest.raises(StoreError, match=f"{name} does not have the checksum"):
        open_store(tmp_path / "store")


def test_checksums_are_verified_once_and_again_after_a_change(tmp_path, monkeypatch):
    from scalelong.data import store as module

    prepare(source(), tmp_path / "store")
    calls = []
    monkeypatch.setattr(module, "sha256", lambda file: calls.append(file) or "wrong")
    open_store(tmp_path / "store")
    assert not calls
    os.utime(tmp_path / "store" / "images.npy")
    with pytest.raises(StoreError, match="checksum"):
        open_store(tmp_path / "store")
    assert calls


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda d: (d / "manifest.json").unlink(), r"no manifest.json \(found: .*images.npy.*scalelong prepare"),
        (lambda d: (d / "manifest.json").write_text("{"), "cannot be read"),
        (lambda d: (d / "manifest.json").write_text('{"count": 3}'), "cannot be read"),
        (lambda d: (d / "labels.npy").unlink(), "lacks labels.npy"),
    ],
)
def test_spoilt_stores_get_a_sentence(tmp_path, spoil, says):
    prepare(source(), tmp_path / "store")
    spoil(tmp_path / "store")
    with pytest.raises(StoreError, match=says):
        open_store(tmp_path / "store")


def test_another_format_is_named(tmp_path):
    prepare(source(), tmp_path / "store")
    file = tmp_path / "store" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": "scalelong-store-9"}))
    with pytest.raises(StoreError, match="'scalelong-store-9', this version reads"):
        open_store(tmp_path / "store")


def test_a_missing_folder_is_told_what_to_run(tmp_path):
    with pytest.raises(StoreError, match="no such folder.*scalelong prepare SOURCE --out"):
        open_store(tmp_path / "nothing")


def test_of_two_preparations_into_one_folder_the_first_stays(tmp_path):
    def meanwhile(items, count):
        yield from items
        prepare(digits(), tmp_path / "data")

    with pytest.raises(SourceError, match="already holds a prepared dataset"):
        prepare(digits(), tmp_path / "data", progress=meanwhile)
    assert len(open_store(tmp_path / "data")) == 1797
    assert [f.name for f in tmp_path.iterdir()] == ["data"]


def test_a_killed_preparation_is_not_taken_for_a_whole_one(tmp_path):
    code = f"""
import sys, time
import numpy as np
from scalelong.data.prepare import prepare
from scalelong.data.sources import Item, Source
def items():
    for i in range(10**6):
        if i == 5: print("going", flush=True)
        if i > 5: time.sleep(0.01)
        yield Item(str(i), np.zeros((8, 8, 3), np.uint8), None)
prepare(Source("slow", 10**6, None, items), {str(tmp_path / "store")!r})
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    process.stdout.readline()
    time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "store").exists()
    with pytest.raises(StoreError, match="no prepared dataset"):
        open_store(tmp_path / "store")
    prepare(source(), tmp_path / "store")  # the leftover of the killed one is not in the way


# The loader


@pytest.fixture
def store(tmp_path):
    return prepare(source(50, shape=(4, 4, 3)), tmp_path / "store")


def test_each_epoch_has_every_image_once_in_its_own_order(store):
    loader = Loader(store, seed=0)
    epochs = [loader._rows(e * 50, 50) for e in range(2)]
    for rows in epochs:
        assert sorted(rows.tolist()) == list(range(50))
    assert epochs[0].tolist() != epochs[1].tolist()


@pytest.mark.parametrize("resident", [0, 1 << 30])
def test_batches_are_slices_of_one_stream(store, resident):
    how = dict(seed=3, flip=True, label_dropout=0.3, resident_bytes=resident)
    whole = Loader(store, **how).batch(0, 120)  # more than two epochs
    for start, size in ((0, 7), (45, 20), (101, 19)):
        part = Loader(store, **how).batch(start, size)
        for field in ("images", "condition", "indices"):
            assert torch.equal(getattr(part, field), getattr(whole, field)[start : start + size])
    assert not torch.equal(Loader(store, **how | {"seed": 4}).batch(0, 120).images, whole.images)


def test_what_is_read_through_the_memory_map_is_read_ahead(store):
    loader = Loader(store, seed=0, resident_bytes=0)
    asked = []
    request = loader.host.request
    loader.host.request = lambda rows: asked.append(rows.tolist()) or request(rows)
    for step in range(4):
        loader.fetch(8 * step + 4, 4)  # the second of two processes
    wanted = [loader._rows(8 * step + 4, 4).tolist() for step in range(5)]
    assert asked[-1] == wanted[-1]  # begun before it is asked for
    assert asked.count(wanted[3]) == 1  # and not again when it is


def test_pixels_are_scaled_and_half_of_them_flipped(store):
    plain, flipped = Loader(store, seed=0), Loader(store, seed=0, flip=True)
    a, b = plain.batch(0, 1000), flipped.batch(0, 1000)
    row = int(plain._rows(17, 1))
    np.testing.assert_allclose(a.images[17].permute(1, 2, 0), store.images[row] / 127.5 - 1, atol=1e-6)
    same = (a.images == b.images).flatten(1).all(1)
    mirrored = (a.images.flip(3) == b.images).flatten(1).all(1)
    assert (same ^ mirrored).all()
    assert 420 < mirrored.sum() < 580


def test_labels_follow_their_images_and_drop_to_the_null_class(store):
    loader = Loader(store, seed=0, label_dropout=0.0)
    batch = loader.batch(0, 50)
    assert batch.condition.tolist() == [int(r) % 2 for r in loader._rows(0, 50)]
    assert Loader(store, seed=0).batch(0, 5).condition is None
    dropped = Loader(store, seed=0, label_dropout=0.25).batch(0, 4000).condition
    assert 0.2 < (dropped == 2).float().mean() < 0.3


def test_labels_that_are_not_there_are_asked_for(tmp_path):
    unlabelled = prepare(source(classes=None), tmp_path / "store")
    with pytest.raises(ValueError, match="has none; prepare it from class subfolders"):
        Loader(unlabelled, seed=0, label_dropout=0.1)


def test_a_store_is_as_open_to_others_as_a_folder_made_by_hand(tmp_path):
    (tmp_path / "by hand").mkdir()
    prepare(source(), tmp_path / "store")
    assert (tmp_path / "store").stat().st_mode == (tmp_path / "by hand").stat().st_mode


def test_a_folder_of_images_is_told_how_it_is_prepared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("imgs", "data/faces"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.png").touch()
    for folder, fix in (
        ("imgs", "of its images with: scalelong prepare imgs --size N --out data/imgs"),
        ("data/faces", "of its images with: scalelong prepare data/faces --size N --out data/faces-prepared"),
        ("nowhere", "make one with: scalelong prepare SOURCE --out nowhere"),
    ):
        with pytest.raises(StoreError, match=f"no prepared dataset.*{fix}$"):
            open_store(folder)
