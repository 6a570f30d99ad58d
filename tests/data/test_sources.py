"""Each source in the exact form that it has on disk, and what goes wrong there."""

import importlib.util
import io
import lzma
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from scalelong.data.images import Decoder
from scalelong.data.sources import SourceError, open_source

SHARED = Path(__file__).parents[3] / "shared" / "data"
rng = np.random.default_rng(0)


def picture(height=10, width=12, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def save(path: Path, image: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)


def png(image: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "PNG")
    return stream.getvalue()


def all_items(source, **how):
    return list(open_source(str(source), **how).items())


# Digits


def test_digits_are_the_1797_of_scikit_learn():
    from sklearn.datasets import load_digits

    source = open_source("digits")
    items = list(source.items())
    assert len(items) == source.count == 1797
    data = load_digits()
    assert [item.label for item in items] == data.target.tolist()
    assert items[7].image.shape == (8, 8, 1)
    np.testing.assert_allclose(items[7].image[..., 0], data.images[7] * 255 / 16, atol=0.5)


# Folders


def test_a_flat_folder_has_no_labels_and_subfolders_are_classes(tmp_path):
    for i in range(3):
        save(tmp_path / "flat" / f"{i}.png", picture(seed=i))
        save(tmp_path / "classed" / ("cat" if i else "ant") / "deeper" / f"{i}.png", picture(seed=i))
    flat, classed = open_source(str(tmp_path / "flat")), open_source(str(tmp_path / "classed"))
    assert flat.classes is None
    assert [item.label for item in flat.items()] == [None] * 3
    assert classed.classes == ["ant", "cat"]
    assert [(item.label, item.name) for item in classed.items()] == [
        (0, "ant/deeper/0.png"),
        (1, "cat/deeper/1.png"),
        (1, "cat/deeper/2.png"),
    ]
    for item, seed in zip(flat.items(), range(3), strict=True):
        np.testing.assert_array_equal(item.image, picture(seed=seed))


def test_linked_folders_count_and_hidden_ones_do_not(tmp_path):
    for name in ("cat", "dog"):
        save(tmp_path / "all" / name / "0.png", picture())
    some = tmp_path / "some"
    save(some / "owl" / "0.png", picture())
    save(some / ".ipynb_checkpoints" / "0.png", picture())
    for name in ("cat", "dog"):
        (some / name).symlink_to(tmp_path / "all" / name)
    (some / "owl" / "up").symlink_to(some)  # and so on for ever
    source = open_source(str(some))
    assert source.classes == ["cat", "dog", "owl"]
    assert [item.label for item in source.items()] == [0, 1, 2]


def test_a_class_whose_name_is_no_text_is_refused_before_anything_is_decoded(tmp_path):
    place = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    save(place / "0.png", picture())
    with pytest.raises(SourceError, match="is no text in UTF-8; rename it"):
        open_source(str(tmp_path))


def test_size_takes_the_centre_square(tmp_path):
    image = np.zeros((20, 40, 3), np.uint8)
    image[:, 10:30] = 200  # the centre square is bright, what is cut off is dark
    save(tmp_path / "wide.png", image)
    (item,) = all_items(tmp_path, size=8)
    assert item.image.shape == (8, 8, 3)
    assert item.image.min() == item.image.max() == 200


def test_grey_palette_and_alpha_become_rgb(tmp_path):
    for i, mode in enumerate(("L", "P", "RGBA", "LA", "1")):
        Image.fromarray(picture()).convert("RGB").convert(mode).save(tmp_path / f"{i}.png")
    assert [item.image.shape for item in all_items(tmp_path)] == [(10, 12, 3)] * 5


@pytest.mark.parametrize(
    ("name", "order"), [("a.png", "<u2"), ("a.tif", "<u2"), ("a.tif", ">u2"), ("a.ppm", "<u2")]
)
def test_16_bits_are_rounded_to_8(tmp_path, name, order):
    values = np.array([[0, 128, 129, 32768, 65406, 65407, 65535]], order)
    if name == "a.ppm":
        (tmp_path / name).write_bytes(b"P5 7 1 65535\n" + values.astype(">u2").tobytes())
    else:
        Image.fromarray(values).save(tmp_path / name)
    (item,) = all_items(tmp_path)
    assert item.image[0].tolist() == [[round(v / 257)] * 3 for v in values[0].tolist()]


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_pixels_of_an_unknown_range_are_named(tmp_path, kind):
    Image.fromarray(picture()[..., 0].astype(kind)).save(tmp_path / "a.tif")
    (item,) = all_items(tmp_path)
    assert item.image is None
    assert "8 or 16 bits per channel, got Pillow's mode" in item.error


def test_what_is_transparent_lies_on_white(tmp_path):
    pixels = np.array([[[200, 0, 0, 0], [200, 0, 0, 51], [200, 0, 0, 255]]], np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    Image.fromarray(pixels[..., [0, 3]]).save(tmp_path / "b.png")
    palette = Image.fromarray(np.array([[0, 1, 1]], np.uint8))
    palette.putpalette([200, 0, 0, 0, 100, 0])
    palette.save(tmp_path / "c.gif", transparency=0)
    palette.save(tmp_path / "d.png", transparency=0)
    found = [item.image[0].tolist() for item in all_items(tmp_path)]
    assert found == [
        [[255] * 3, [244, 204, 204], [200, 0, 0]],
        [[255] * 3, [244] * 3, [200] * 3],
        [[255] * 3, [0, 100, 0], [0, 100, 0]],
        [[255] * 3, [0, 100, 0], [0, 100, 0]],
    ]


def test_of_several_frames_the_first_is_taken(tmp_path):
    frames = [Image.new("RGB", (2, 2), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert all_items(tmp_path)[0].image[0, 0].tolist() == [255, 0, 0]


def test_a_broken_image_is_an_item_with_an_error(tmp_path):
    save(tmp_path / "a.png", picture())
    (tmp_path / "b.png").write_bytes((tmp_path / "a.png").read_bytes()[:60])
    (tmp_path / "c.jpg").write_bytes(b"not an image")
    good, cut, wrong = all_items(tmp_path)
    assert good.error is None
    assert cut.image is None
    assert wrong.image is None
    assert "UnidentifiedImageError" in wrong.error


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda d: None, "no images in .* found no files"),
        (lambda d: (d / "notes.txt").write_text("x"), r"no images in .*looked for \.png.*found \.txt"),
        (
            lambda d: (save(d / "a.png", picture()), save(d / "cat" / "b.png", picture())),
            "mixes class subfolders with 1 loose images .*a.png",
        ),
    ],
)
def test_folders_that_are_not_one(tmp_path, build, says):
    build(tmp_path)
    with pytest.raises(SourceError, match=says):
        open_source(str(tmp_path))


def test_things_that_are_no_source(tmp_path):
    with pytest.raises(SourceError, match="no file or folder 'nothing'; a source is 'digits', a path"):
        open_source("nothing")
    (tmp_path / "x.bin").write_bytes(b"123")
    with pytest.raises(SourceError, match="neither a parquet file nor a CIFAR-10 tar"):
        open_source(str(tmp_path / "x.bin"))


# Tables


def write_parquet(path, rows, **schema):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows, **schema), path)


def test_parquet_with_bytes_or_structs_and_labels(tmp_path):
    plain = [{"image": png(picture(seed=i)), "label": i % 2} for i in range(4)]
    structs = [{"image": {"bytes": row["image"], "path": None}, "text": "x"} for row in plain]
    write_parquet(tmp_path / "plain.parquet", plain)
    write_parquet(tmp_path / "structs.parquet", structs)
    labelled, unlabelled = (
        open_source(str(tmp_path / "plain.parquet")),
        open_source(str(tmp_path / "structs.parquet")),
    )
    assert (labelled.count, labelled.classes, unlabelled.classes) == (4, ["0", "1"], None)
    assert [item.label for item in labelled.items()] == [0, 1, 0, 1]
    for source in (labelled, unlabelled):
        for i, item in enumerate(source.items()):
            np.testing.assert_array_equal(item.image, picture(seed=i))


def test_parquet_problems(tmp_path):
    write_parquet(tmp_path / "a.parquet", [{"picture": png(picture())}])
    with pytest.raises(SourceError, match="no column 'image'; it has picture: use --image-column"):
        open_source(str(tmp_path / "a.parquet"))
    assert len(all_items(tmp_path / "a.parquet", image_column="picture")) == 1
    write_parquet(tmp_path / "b.parquet", [{"image": png(picture()), "label": "cat"}])
    with pytest.raises(SourceError, match=r"b\.parquet, row 0: a label is a whole number .*, got 'cat'; mend"):
        open_source(str(tmp_path / "b.parquet"))
    rows = [{"image": png(picture()), "label": label} for label in (0, 999_999_999)]
    write_parquet(tmp_path / "c.parquet", rows)
    with pytest.raises(SourceError, match=r"c\.parquet, row 1: .* from 0 to 999,999, got 999999999; mend"):
        open_source(str(tmp_path / "c.parquet"))


def test_captions_of_a_parquet_file(tmp_path):
    one = [{"image": png(picture(seed=i)), "text": f"picture {i}"} for i in range(3)]
    many = [{"image": row["image"], "alt": [row["text"], "a picture"], "text": "no"} for row in one]
    write_parquet(tmp_path / "one.parquet", one)
    write_parquet(tmp_path / "many.parquet", many)
    assert [i.captions for i in all_items(tmp_path / "one.parquet")] == [(f"picture {i}",) for i in range(3)]
    (first, *_) = all_items(tmp_path / "many.parquet", caption_column="alt")
    assert first.captions == ("picture 0", "a picture")
    with pytest.raises(SourceError, match="has no column 'words'; it has image, text: use --caption-column"):
        open_source(str(tmp_path / "one.parquet"), caption_column="words")
    write_parquet(tmp_path / "gap.parquet", [*one, {"image": one[0]["image"], "text": None}])
    assert all_items(tmp_path / "gap.parquet")[3].captions == ()
    write_parquet(
        tmp_path / "gaps.parquet", [{"image": one[0]["image"], "text": told} for told in (["a"], [], None)]
    )
    assert [item.captions for item in all_items(tmp_path / "gaps.parquet")] == [("a",), (), ()]
    write_parquet(tmp_path / "numbers.parquet", [{"image": one[0]["image"], "text": 3}])
    (wrong,) = all_items(tmp_path / "numbers.parquet")
    assert "in the column 'text', captions are a text or a list of some, got 3" in wrong.error


@pytest.mark.skipif(not (SHARED / "coco64").is_dir(), reason="the small COCO is not at hand")
def test_the_small_coco_has_a_caption_for_each_picture():
    source = open_source(str(SHARED / "coco64"), split="validation")
    assert source.count == 1000
    first = next(source.items())
    assert first.image.shape == (64, 64, 3)
    assert first.captions == ("A pair of giraffes and standing with a skyline in the background.",)


def test_a_split_is_chosen_by_the_file_names_or_refused(tmp_path):
    for split, count in (("train", 2), ("validation", 1)):
        write_parquet(tmp_path / f"{split}.parquet", [{"image": png(picture())}] * count)
    assert len(all_items(tmp_path)) == 2
    assert len(all_items(tmp_path, split="val")) == 1
    with pytest.raises(SourceError, match="no parquet file of the split 'test'; it has train.parquet, validation"):
        open_source(str(tmp_path), split="test")
    for name in "ab":
        write_parquet(tmp_path / f"more-{name}.parquet", [{"image": png(picture())}])
    with pytest.warns(UserWarning, match=r"^more-a\.parquet and 1 more name no split and are left out"):
        assert len(all_items(tmp_path)) == 2


def damaged(data: bytes, kind: str) -> bytes:
    if kind == "cut":
        return data[:-100]
    if kind == "empty":
        return b""
    middle = len(data) // 2
    return data[: middle - 200] + bytes(400) + data[middle + 200 :]


@pytest.mark.parametrize("kind", ["cut", "empty", "holes"])
def test_a_broken_parquet_file_is_named(tmp_path, kind):
    write_parquet(tmp_path / "train-0.parquet", [{"image": png(picture(seed=i)), "label": 0} for i in range(9)])
    whole = (tmp_path / "train-0.parquet").read_bytes()
    (tmp_path / "train-1.parquet").write_bytes(damaged(whole, kind))
    for source in (tmp_path, tmp_path / "train-1.parquet"):
        with pytest.raises(
            SourceError, match="train-1.parquet is no whole parquet file .*copy or download it again"
        ):
            all_items(source)


def test_without_a_hub_a_dataset_is_refused_at_once(tmp_path, monkeypatch):
    import datasets
    from huggingface_hub import HfApi, constants

    def no_connection(*args, **how):
        raise ConnectionError("Name or service not known")

    def not_cached(name):
        assert constants.HF_HUB_OFFLINE
        raise FileNotFoundError(name)

    before = constants.HF_HUB_OFFLINE
    monkeypatch.setattr(HfApi, "dataset_info", no_connection)
    monkeypatch.setattr(datasets, "load_dataset", not_cached)
    with pytest.raises(
        SourceError, match=r"not in the local cache, and the hub cannot be reached \(Name or service"
    ):
        open_source("hf:someone/thing")
    assert before == constants.HF_HUB_OFFLINE
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    rows = {"image": [Image.fromarray(picture())], "text": ["a picture"]}
    cached = datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows, features=features)})
    monkeypatch.setattr(datasets, "load_dataset", lambda name: cached)
    (item,) = open_source("hf:someone/thing").items()
    assert item.captions == ("a picture",)


def test_offline_mode_fails_at_once_too(monkeypatch):
    import time

    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    begin = time.monotonic()
    with pytest.raises(SourceError, match="hf:someone/thing is not in the local cache"):
        open_source("hf:someone/thing")
    assert time.monotonic() - begin < 10


def test_a_hugging_face_dataset_on_disk(tmp_path):
    import datasets

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["ant", "bee"])})
    rows = {"image": [Image.fromarray(picture(seed=i)) for i in range(3)], "label": [0, 1, 1]}
    data = datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows, features=features)})
    data.save_to_disk(tmp_path / "hf")
    source = open_source(str(tmp_path / "hf"))
    assert (source.count, source.classes) == (3, ["ant", "bee"])
    for i, item in enumerate(source.items()):
        np.testing.assert_array_equal(item.image, picture(seed=i))
    with pytest.raises(SourceError, match="no split 'test'; it has train"):
        open_source(str(tmp_path / "hf"), split="test")


def test_labels_of_a_saved_dataset_that_are_plain_numbers_are_those_of_its_parquet(tmp_path):
    import datasets

    rows = {"image": [Image.fromarray(picture(seed=i)) for i in range(4)], "label": [0, 1, 2, 1]}
    data = datasets.Dataset.from_dict(rows)
    data.save_to_disk(tmp_path / "saved")
    data.to_parquet(str(tmp_path / "table.parquet"))
    saved, table = (open_source(str(tmp_path / name)) for name in ("saved", "table.parquet"))
    assert saved.classes == table.classes == ["0", "1", "2"]
    assert [item.label for item in saved.items()] == [item.label for item in table.items()] == [0, 1, 2, 1]


@pytest.mark.parametrize("wrong", ["a", -1, None, 0.5, [1], 999_999])
def test_a_saved_dataset_whose_labels_are_none_is_prepared_without_them(tmp_path, wrong):
    import datasets

    labels = [type(wrong)(), wrong, wrong] if isinstance(wrong, str | float | list) else [0, wrong, wrong]
    rows = {"image": [Image.fromarray(picture(seed=i)) for i in range(3)], "label": labels}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "saved")
    with pytest.warns(
        UserWarning, match=r"holds no numbers of classes \(row \d: .*prepared without labels"
    ) as told:
        source = open_source(str(tmp_path / "saved"))
    assert len(told) == 1
    assert source.classes is None
    assert [item.label for item in source.items()] == [None] * 3


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"split": "test"}, "--split means nothing for the digits, got 'test'; leave it out"),
        ({"crop": "adm"}, "--crop means nothing for the digits"),
        ({"image_column": "picture"}, "--image-column means nothing for the digits, got 'picture'"),
    ],
)
def test_what_a_source_would_ignore_is_refused(tmp_path, asked, says):
    with pytest.raises(SourceError, match=says):
        open_source("digits", **asked)
    if "image_column" in asked:
        Image.fromarray(picture()).save(tmp_path / "a.png")
        with pytest.raises(SourceError, match="--image-column means nothing for a folder of images"):
            open_source(str(tmp_path), **asked)


# CIFAR-10

BATCH_SIZE = 6


def cifar_rows(batch):
    generator = np.random.default_rng(batch)
    return generator.integers(0, 256, (BATCH_SIZE, 3072), dtype=np.uint8), generator.integers(0, 10, BATCH_SIZE)


def write_cifar(folder: Path, form: str) -> None:
    folder.mkdir(parents=True)
    for batch, name in enumerate(
        ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"]
    ):
        rows, labels = cifar_rows(batch)
        if form == "python":
            content = {
                b"batch_label": b"x",
                b"labels": labels.tolist(),
                b"data": rows,
                b"filenames": [b"a.png"] * BATCH_SIZE,
            }
            (folder / name).write_bytes(pickle.dumps(content, protocol=2))
        else:
            binary = np.concatenate([labels[:, None].astype(np.uint8), rows], 1)
            (folder / f"{name}.bin").write_bytes(binary.tobytes())


@pytest.mark.parametrize("form", ["python", "binary"])
@pytest.mark.parametrize("packing", ["folder", "parent", "tar"])
def test_cifar10_distributions(tmp_path, form, packing):
    name = "cifar-10-batches-py" if form == "python" else "cifar-10-batches-bin"
    write_cifar(tmp_path / name, form)
    where = {"folder": tmp_path / name, "parent": tmp_path, "tar": tmp_path / "cifar.tar.gz"}[packing]
    if packing == "tar":
        with tarfile.open(where, "w:gz") as tar:
            tar.add(tmp_path / name, name)
    for split, batches in (("train", range(5)), ("test", [5])):
        items = all_items(where, split=split)
        rows = np.concatenate([cifar_rows(b)[0] for b in batches])
        labels = np.concatenate([cifar_rows(b)[1] for b in batches])
        assert [item.label for item in items] == labels.tolist()
        np.testing.assert_array_equal(items[3].image[5, 7], rows[3].reshape(3, 32, 32)[:, 5, 7])
    assert open_source(str(where)).classes[9] == "truck"


def test_cifar10_problems(tmp_path):
    write_cifar(tmp_path / "c", "binary")
    with pytest.raises(SourceError, match="splits train and test, got 'valid'"):
        open_source(str(tmp_path / "c"), split="valid")
    (tmp_path / "c" / "data_batch_3.bin").unlink()
    with pytest.raises(SourceError, match="looks like CIFAR-10 but lacks data_batch_3.bin"):
        open_source(str(tmp_path / "c"))
    write_cifar(tmp_path / "d", "binary")
    whole = (tmp_path / "d" / "data_batch_1.bin").read_bytes()
    (tmp_path / "d" / "data_batch_1.bin").write_bytes(whole[:-5])
    with pytest.raises(SourceError, match="rows of 3073 bytes, got .* cut short"):
        all_items(tmp_path / "d")
    with tarfile.open(tmp_path / "other.tar", "w") as tar:
        tar.add(tmp_path / "c" / "data_batch_1.bin", "x.bin")
    with pytest.raises(SourceError, match="not a CIFAR-10 tar"):
        open_source(str(tmp_path / "other.tar"))


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    write_cifar(tmp_path / "c", "python")
    evil = b"cos\nsystem\n(S'touch " + str(tmp_path / "owned").encode() + b"'\ntR."
    (tmp_path / "c" / "data_batch_1").write_bytes(evil)
    with pytest.raises(SourceError, match="asks for os.system, and only NumPy arrays are let in"):
        all_items(tmp_path / "c")
    assert not (tmp_path / "owned").exists()


def pack(images: np.ndarray) -> bytes:
    """The packed form's encoder: G, R-G, B-G, minus the median predictor."""
    red, green, blue = np.moveaxis(images, -1, 0)
    planes = np.stack([green, red - green, blue - green])
    residual = np.zeros_like(planes)
    for y in range(32):
        for x in range(32):
            left = planes[:, :, y, x - 1].astype(int) if x else np.zeros(planes.shape[:2], int)
            above = planes[:, :, y - 1, x].astype(int) if y else np.zeros(planes.shape[:2], int)
            corner = planes[:, :, y - 1, x - 1].astype(int) if x and y else np.zeros(planes.shape[:2], int)
            guess = np.sort(np.stack([left, above, left + above - corner]), 0)[1]
            residual[:, :, y, x] = (planes[:, :, y, x] - guess) % 256
    return lzma.compress(residual.transpose(1, 0, 2, 3).tobytes())


def test_cifar10_packed(tmp_path):
    images = rng.integers(0, 256, (7, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(7, dtype=np.uint8)
    for split, part in (("train", slice(0, 5)), ("test", slice(5, 7))):
        (tmp_path / f"{split}_0.xz").write_bytes(pack(images[part]))
        np.save(tmp_path / f"{split}_labels.npy", labels[part])
    items = all_items(tmp_path)
    np.testing.assert_array_equal(np.stack([item.image for item in items]), images[:5])
    assert [item.label for item in all_items(tmp_path, split="test")] == [5, 6]
    (tmp_path / "train_0.xz").write_bytes(b"junk")
    with pytest.raises(SourceError, match="train_0.xz is damaged"):
        all_items(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / "cifar10").is_dir(), reason="the packed CIFAR-10 is not at hand")
def test_the_real_packed_cifar10_has_its_published_checksums():
    spec = importlib.util.spec_from_file_location("unpack", SHARED / "cifar10" / "unpack.py")
    unpack = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(unpack)
    images, labels = unpack.load("test")  # checks SHA-1
    items = all_items(SHARED / "cifar10", split="test")
    np.testing.assert_array_equal(np.stack([item.image for item in items]), images)
    assert [item.label for item in items] == labels.tolist()


def test_photographs_stand_as_the_camera_was_held(tmp_path):
    image = Image.fromarray(picture())  # 12 wide, 10 high
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90° clockwise
    image.save(tmp_path / "a.png", exif=exif)
    (item,) = all_items(tmp_path)
    np.testing.assert_array_equal(item.image, np.rot90(picture(), -1))
    plain = Decoder(10, "adm")(tmp_path / "a.png")  # a published crop: as its authors had it
    np.testing.assert_array_equal(plain, picture()[:, 1:11])


def test_a_folder_of_images_has_no_splits(tmp_path):
    Image.fromarray(picture()).save(tmp_path / "a.png")
    with pytest.raises(
        SourceError, match="a folder of images has no splits, got --split test; prepare a folder of"
    ):
        open_source(str(tmp_path), split="test")
