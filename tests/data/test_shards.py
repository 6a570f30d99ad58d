"""Webdataset tars as webdataset writes them, the stream over them, and what happens to tars after indexing."""

import io
import json
import os
import tarfile
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from scalelong.data.loader import Loader
from scalelong.data.prepare import prepare
from scalelong.data.sources import SourceError, open_source
from scalelong.data.store import StoreError, open_store

PER_SHARD, SHARDS = 6, 3


def picture(i, width=12, height=10):
    return np.random.default_rng(i).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encoded(image, form="PNG"):
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, form)
    return stream.getvalue()


def write_tar(path, members):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def sample(i, notes=("cls",)):
    texts = {
        "cls": str(i % 4),
        "txt": f"picture {i}\n",
        "json": json.dumps({"label": i % 4, "captions": [f"picture {i}", "a picture"]}),
    }
    return [(f"{i:09}.png", encoded(picture(i))), *((f"{i:09}.{note}", texts[note].encode()) for note in notes)]


def write_shards(folder, prefix="imagenet-train", notes=("cls",)):
    for shard in range(SHARDS):
        numbers = range(shard * PER_SHARD, (shard + 1) * PER_SHARD)
        write_tar(folder / f"{prefix}-{shard:06}.tar", [member for i in numbers for member in sample(i, notes)])
    return folder


@pytest.fixture
def tars(tmp_path):
    return write_shards(tmp_path / "tars")


def index(tars, out, **how):
    return prepare(open_source(f"shards:{tars}", **how), out)


def test_a_store_of_shards_holds_an_index_and_gives_the_images(tars, tmp_path):
    store = index(tars, tmp_path / "store")
    again = open_store(tmp_path / "store")
    assert len(again) == PER_SHARD * SHARDS
    assert (again.num_classes, again.labels.tolist()) == (4, [i % 4 for i in range(18)])
    assert again.images.shape == (18, 10, 12, 3)
    for i in (0, 5, 6, 17):
        np.testing.assert_array_equal(again.images[i], picture(i))
    np.testing.assert_array_equal(again.images[4:8], np.stack([picture(i) for i in range(4, 8)]))
    np.testing.assert_array_equal(again.images[np.array([9, 2])], np.stack([picture(9), picture(2)]))
    assert store.manifest.shards == [f"../tars/imagenet-train-{i:06}.tar" for i in range(3)]
    assert sorted(p.name for p in (tmp_path / "store").iterdir()) == [
        ".verified",
        "index.npy",
        "labels.npy",
        "manifest.json",
    ]


@pytest.mark.parametrize(
    ("notes", "captions"),
    [(("txt",), ("picture 7",)), (("json",), ("picture 7", "a picture")), (("cls", "json", "txt"), ("picture 7",))],
)
def test_captions_and_labels_come_from_txt_cls_and_json(tmp_path, notes, captions):
    store = index(write_shards(tmp_path / "tars", notes=notes), tmp_path / "store")
    assert store.captions[7] == captions
    assert (store.labels is None) == (notes == ("txt",))


def test_images_are_cropped_and_resized_as_the_source_would(tmp_path):
    write_tar(tmp_path / "a.tar", [(f"{i}.jpg", encoded(picture(i, 20 + i, 30), "JPEG")) for i in range(3)])
    source = open_source(f"shards:{tmp_path / 'a.tar'}", size=8, crop="adm")
    wanted = np.stack([item.image for item in source.items()])
    store = prepare(source, tmp_path / "store")
    assert (store.manifest.crop, store.labels) == ("adm", None)
    np.testing.assert_array_equal(open_store(tmp_path / "store").images[:], wanted)


def test_the_stream_has_every_image_once_per_epoch_and_depends_on_nothing_else(tars, tmp_path):
    shards = index(tars, tmp_path / "shards")
    how = dict(seed=5, flip=True, label_dropout=0.2)
    whole = Loader(shards, **how).batch(0, 50)
    for epoch in range(2):
        rows = Loader(shards, **how)._rows(18 * epoch, 18).tolist()
        assert sorted(rows) == list(range(18))
        images = Loader(shards, seed=5).batch(18 * epoch, 18).images
        for image, row in zip(images, rows, strict=True):
            np.testing.assert_allclose(image.permute(1, 2, 0), picture(row) / 127.5 - 1, atol=1e-6)
    one = Loader(shards, **how)
    for start, size in (
        (0, 7),
        (7, 7),
        (14, 7),
        (3, 2),
        (45, 5),
        (14, 7),
        (0, 1),
        (8, 4),
        (16, 4),
        (24, 4),
        (32, 4),
    ):
        for loader in (one, Loader(shards, **how)):
            part = loader.batch(start, size)
            for field in ("images", "condition", "indices"):
                assert torch.equal(getattr(part, field), getattr(whole, field)[start : start + size])


def test_the_next_batch_is_decoded_ahead_also_where_each_process_takes_a_part(tars, tmp_path):
    loader = Loader(index(tars, tmp_path / "store"), seed=0)
    loader.buffers(4)
    for step in range(4):
        loader.fetch(8 * step + 4, 4)  # the second of two processes
        if step:
            assert loader._ahead.key == (8 * (step + 1) + 4, 4)


def test_buffers_fit_a_fetch(tars, tmp_path):
    loader = Loader(index(tars, tmp_path / "store"), seed=0, label_dropout=0.1)
    pixels, labels = loader.buffers(5)
    fetched, classes = loader.fetch(0, 5)
    assert (pixels.shape, labels.shape) == (fetched.shape, classes.shape)
    assert (pixels.dtype, labels.dtype) == (fetched.dtype, classes.dtype)


# Which tars


def test_splits_are_told_by_the_names(tars, tmp_path):
    write_shards(tars, "imagenet-validation")
    assert len(index(tars, tmp_path / "a", split="val")) == len(index(tars, tmp_path / "b")) == 18
    with pytest.raises(SourceError, match="no shards of the split 'test'; it has imagenet-train-000000.tar"):
        open_source(f"shards:{tars}", split="test")
    write_shards(tmp_path / "plain", "00")
    assert open_source(f"shards:{tmp_path / 'plain'}", split="test").count == 18


def test_tars_that_name_no_split_beside_some_that_do_are_told(tmp_path):
    for number, prefix in enumerate(("train-0", "extra-0", "val-0")):
        write_tar(tmp_path / f"{prefix}.tar", sample(number))
    with pytest.warns(UserWarning, match=r"^extra-0\.tar names no split and is left out, .*put train into"):
        assert open_source(f"shards:{tmp_path}").count == 1
    (tmp_path / "extra-0.tar").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_source(f"shards:{tmp_path}").count == 1


def test_relative_paths_let_store_and_shards_move_together(tars, tmp_path):
    index(tars, tmp_path / "store")
    (tmp_path / "elsewhere").mkdir()
    for name in ("tars", "store"):
        (tmp_path / name).rename(tmp_path / "elsewhere" / name)
    np.testing.assert_array_equal(open_store(tmp_path / "elsewhere" / "store").images[3], picture(3))
    far = index(tmp_path / "elsewhere" / "tars", tmp_path / "deep" / "er" / "store")
    assert all(os.path.isabs(name) for name in far.manifest.shards)


def test_a_checksum_tells_how_images_are_cut_and_not_where_they_lie(tars, tmp_path):
    checksums = [
        index(tars, tmp_path / f"{size}-{crop}", size=size, crop=crop).checksum
        for size in (4, 8)
        for crop in ("adm", "centre")
    ]
    assert len(set(checksums)) == 4
    assert index(tars, tmp_path / "deep" / "er" / "store", size=4, crop="adm").checksum == checksums[0]


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ([("a.png", encoded(picture(0))), ("a.jpg", b"x")], r"a sample has one image, got \.png, \.jpg"),
        ([("a.cls", b"3")], r"a sample has one image, got \.cls"),
        ([("a.png", encoded(picture(0))), ("a.png", encoded(picture(1)))], r"of each kind, got \.png twice"),
        ([("a.png", encoded(picture(0))), ("a.cls", b"0"), ("a.CLS", b"1")], r"of each kind, got \.cls twice"),
        ([("a.png", encoded(picture(0))), ("a.cls", b"-3")], "a label is a whole number from 0 to 999,999, got -3"),
        ([("a.png", encoded(picture(0))), ("a.cls", b"999999999")], "from 0 to 999,999, got 999999999"),
        ([("a.png", encoded(picture(0))), ("a.json", b'{"label": 1e6}')], "from 0 to 999,999, got 1000000.0"),
        ([("a.png", encoded(picture(0))), ("a.cls", b"cat")], "invalid literal"),
        ([("a.png", encoded(picture(0))), ("a.json", b"{")], "Expecting property name"),
        ([("a.png", encoded(picture(0))), ("a.json", b"[1]")], r"\.json holds an object, got list"),
        ([("a.png", encoded(picture(0))[:60])], "OSError|SyntaxError|Truncated"),
    ],
)
def test_bad_samples_are_named_and_skipped(tars, tmp_path, members, says):
    good = [member for i in range(2) for member in sample(i)]
    write_tar(tmp_path / "one" / "a.tar", [*good, *members])
    store = index(tmp_path / "one", tmp_path / "store")
    assert len(store) == 2
    assert store.manifest.skipped[0].startswith("a.tar/a: ")
    write_tar(tmp_path / "bad" / "a.tar", members)
    with pytest.raises(SourceError, match=says):
        index(tmp_path / "bad", tmp_path / "other")
    assert not list(tmp_path.glob("*other*"))


def test_a_key_that_comes_again_later_is_named_and_skipped(tmp_path):
    again = [("000000000.png", encoded(picture(7))), ("000000000.cls", b"3")]
    write_tar(tmp_path / "one" / "a.tar", [*sample(0), *sample(1), *again])
    store = index(tmp_path / "one", tmp_path / "store")
    assert store.labels.tolist() == [0, 1]
    assert store.manifest.skipped == [
        "a.tar/000000000: its key was there before, further up in the tar; a sample's files lie side by side"
    ]


def test_why_a_sample_was_skipped_is_the_same_each_time(tmp_path):
    write_tar(tmp_path / "one" / "a.tar", [*sample(0), *sample(1), ("z.png", b"no image"), ("z.cls", b"0")])
    skipped = [index(tmp_path / "one", tmp_path / name).manifest.skipped for name in "ab"]
    assert skipped[0] == skipped[1] == ["a.tar/z: UnidentifiedImageError: cannot identify image file"]


def test_keys_end_at_the_first_dot_and_folders_belong_to_them(tmp_path):
    write_tar(
        tmp_path / "a.tar",
        [
            ("x/a.png", encoded(picture(1))),
            ("x/a.seg.png", b"?"),
            ("x/a.cls", b"1"),
            ("y/a.png", encoded(picture(2))),
            ("y/a.cls", b"0"),
        ],
    )
    store = index(tmp_path / "a.tar", tmp_path / "store")
    assert store.labels.tolist() == [1, 0]
    np.testing.assert_array_equal(store.images[1], picture(2))


def test_pax_headers_and_long_names_do_not_shift_the_images(tmp_path):
    name = "ü" * 40 + "/" + "very-long-" * 20
    write_tar(tmp_path / "a.tar", [(f"{name}{i}.png", encoded(picture(i))) for i in range(3)])
    np.testing.assert_array_equal(index(tmp_path / "a.tar", tmp_path / "store").images[2], picture(2))


# What goes wrong with tars


@pytest.mark.parametrize("kept", ["middle of an image", "between two members", "end of the last member", "nothing"])
def test_a_tar_cut_short_is_refused(tars, tmp_path, kept):
    file = tars / "imagenet-train-000001.tar"
    with tarfile.open(file) as tar:
        third, last = tar.getmembers()[4], tar.getmembers()[-1]
    ends = {
        "middle of an image": third.offset_data + 100,
        "between two members": third.offset,
        "end of the last member": last.offset_data + 512,
        "nothing": 0,
    }
    os.truncate(file, ends[kept])
    with pytest.raises(
        SourceError, match="imagenet-train-000001.tar is no whole, uncompressed tar .*copy it again"
    ):
        index(tars, tmp_path / "store")
    assert not list(tmp_path.glob("*store*"))


def test_damage_in_the_middle_of_a_tar_is_not_taken_for_its_end(tars):
    file = tars / "imagenet-train-000001.tar"
    with tarfile.open(file) as tar:
        header = tar.getmembers()[4].offset
    data = bytearray(file.read_bytes())
    data[header : header + 512] = b"x" * 512
    file.write_bytes(data)
    with pytest.raises(SourceError, match="is no whole, uncompressed tar"):
        open_source(f"shards:{tars}")


def test_compressed_tars_and_empty_folders_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="holds no .tar, found nothing"):
        open_source(f"shards:{tmp_path / 'empty'}")
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz"):
        pass
    with pytest.raises(SourceError, match=r"holds no .tar, found a.tar.gz, empty; .*gunzip"):
        open_source(f"shards:{tmp_path}")
    with pytest.raises(SourceError, match="is no whole, uncompressed tar"):
        open_source(f"shards:{tmp_path / 'a.tar.gz'}")
    write_shards(tmp_path / "tars")
    with pytest.raises(SourceError, match="found .tar. For tars of images: shards:"):
        open_source(str(tmp_path / "tars"))


def test_a_tar_that_changed_after_indexing_is_found(tars, tmp_path):
    index(tars, tmp_path / "store")
    file = tars / "imagenet-train-000002.tar"
    os.utime(file)
    open_store(tmp_path / "store")  # touched, and still the same
    data = bytearray(file.read_bytes())
    data[700] ^= 1
    file.write_bytes(data)
    with pytest.raises(StoreError, match="000002.tar does not have the checksum that its manifest names"):
        open_store(tmp_path / "store")
    file.unlink()
    with pytest.raises(StoreError, match="lacks .*000002.tar; put it back, or prepare the shards again"):
        open_store(tmp_path / "store")


def test_only_what_changed_is_read_again(tars, tmp_path, monkeypatch):
    from scalelong.data import store as module

    index(tars, tmp_path / "store")
    real, read = module.sha256, []
    monkeypatch.setattr(module, "sha256", lambda file: read.append(file.name) or real(file))
    open_store(tmp_path / "store")
    assert read == []
    os.utime(tars / "imagenet-train-000001.tar")
    open_store(tmp_path / "store")
    assert read == ["imagenet-train-000001.tar"]


def test_a_tar_that_changes_during_training_gets_a_sentence(tars, tmp_path):
    loader = Loader(index(tars, tmp_path / "store"), seed=0)
    os.truncate(tars / "imagenet-train-000000.tar", 100)
    with pytest.raises(
        OSError, match=r"image \d+ cannot be read from .*000000.tar at byte .*prepare the shards again"
    ):
        loader.fetch(0, 18)


def test_an_interrupted_indexing_leaves_nothing(tars, tmp_path):
    def interrupted(items, count):
        for i, item in enumerate(items):
            if i == 5:
                raise KeyboardInterrupt
            yield item

    with pytest.raises(KeyboardInterrupt):
        prepare(open_source(f"shards:{tars}"), tmp_path / "store", progress=interrupted)
    assert [p.name for p in tmp_path.iterdir()] == ["tars"]


def test_sizes_must_agree_or_be_given(tmp_path):
    write_tar(tmp_path / "a.tar", [("a.png", encoded(picture(0))), ("b.png", encoded(picture(1, 9, 9)))])
    with pytest.raises(SourceError, match="the first is 12×10, a.tar/b is 9×9; give --size N"):
        index(tmp_path / "a.tar", tmp_path / "store")
    assert index(tmp_path / "a.tar", tmp_path / "store", size=8).images.shape == (2, 8, 8, 3)
