"""CelebA, ImageNet and COCO in small copies of the form that they have on disk, and what goes wrong there."""

import json

import numpy as np
import pytest
from PIL import Image

from scalelong.data.images import Decoder, adm_crop, celeba_crop, in_threads
from scalelong.data.prepare import prepare
from scalelong.data.sources import SourceError, open_source


def picture(width, height, seed=0):
    """Smooth, so that jpg keeps it."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def save(path, image):
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, quality=95)


def items(source, **how):
    return list(open_source(str(source), **how).items())


# Crops


@pytest.mark.parametrize("shape", [(500, 375), (375, 500), (64, 64), (65, 90), (127, 127), (128, 128), (50, 40)])
def test_adm_crop_is_a_square_of_the_size_and_keeps_a_constant(shape):
    cropped = adm_crop(Image.new("RGB", shape, (10, 200, 30)), 64)
    assert cropped.size == (64, 64)
    assert set(cropped.getdata()) == {(10, 200, 30)}


def test_adm_crop_keeps_the_middle_and_the_aspect():
    wide = np.zeros((256, 512, 3), np.uint8)
    wide[:, 128:384] = 200  # the middle square is bright
    cropped = np.asarray(adm_crop(Image.fromarray(wide), 64))
    assert cropped[:, 4:-4].min() == 200
    disc = np.hypot(*(np.indices((256, 512)) - np.array([128, 256])[:, None, None])) < 64
    seen = (
        np.asarray(adm_crop(Image.fromarray(disc.astype(np.uint8)[..., None].repeat(3, 2) * 255), 64))[..., 0] > 127
    )
    assert seen.any(0).sum() == pytest.approx(32, abs=1)  # a disc stays a disc
    assert seen.any(1).sum() == pytest.approx(32, abs=1)


def test_adm_crop_averages_where_plain_sampling_would_alias():
    board = (np.indices((256, 256)).sum(0) % 2 * 255).astype(np.uint8)
    cropped = np.asarray(adm_crop(Image.fromarray(board).convert("RGB"), 64))
    assert np.abs(cropped.astype(int) - 127.5).max() <= 1


def test_adm_crop_commutes_with_mirroring_and_halves_before_it_interpolates():
    image = picture(512, 256)
    mirrored = adm_crop(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT), 64)
    difference = np.asarray(mirrored, int) - np.asarray(adm_crop(image, 64), int)[:, ::-1]
    assert np.abs(difference).max() <= 1
    # At a power of two nothing but means of squares is left to do, rounded in each of four passes.
    noise = np.random.default_rng(0).integers(0, 256, (256, 256, 3), dtype=np.uint8)
    means = noise.reshape(64, 4, 64, 4, 3).mean((1, 3))
    assert np.abs(np.asarray(adm_crop(Image.fromarray(noise), 64)) - means).max() <= 2


def test_celeba_crop_is_128_pixels_about_89_121():
    image = np.zeros((218, 178, 3), np.uint8)
    image[57:185, 25:153] = 255
    assert np.asarray(celeba_crop(Image.fromarray(image), 64)).min() == 255
    image[57:185, 25:153] = 0
    image[121, 89] = 255
    centre = np.asarray(celeba_crop(Image.fromarray(image), 128))[..., 0]
    assert np.argwhere(centre).tolist() == [[64, 64]]


def test_a_crop_needs_a_known_name_and_a_size(tmp_path):
    with pytest.raises(SourceError, match="a crop is one of centre, adm, celeba; got 'middle'"):
        Decoder(8, "middle")
    save(tmp_path / "a.png", picture(20, 10))
    with pytest.raises(SourceError, match="got --crop adm alone; add --size N"):
        open_source(str(tmp_path), crop="adm")
    (item,) = items(tmp_path, crop="adm", size=8)
    np.testing.assert_array_equal(item.image, np.asarray(adm_crop(picture(20, 10), 8)))


def test_threads_keep_the_order_and_stop_when_left():
    assert list(in_threads(lambda x: x * x, range(100))) == [x * x for x in range(100)]
    started = []
    stream = in_threads(started.append, range(10_000))
    next(stream)
    stream.close()
    assert len(started) < 1000


# CelebA


@pytest.fixture
def celeba(tmp_path):
    folder = tmp_path / "CelebA"
    for i in range(1, 9):
        save(folder / "img_align_celeba" / f"{i:06}.jpg", picture(178, 218, i))
    lines = [f"{i:06}.jpg {part}" for i, part in zip(range(1, 9), [0, 0, 0, 0, 0, 1, 1, 2], strict=True)]
    (folder / "list_eval_partition.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize(
    ("split", "numbers"), [("train", range(1, 6)), ("val", (6, 7)), ("test", (8,)), ("all", range(1, 9))]
)
def test_celeba_has_its_splits_and_its_crop(celeba, split, numbers):
    source = open_source(f"celeba:{celeba}", split=split)
    found = list(source.items())
    assert [item.name for item in found] == [f"{i:06}.jpg" for i in numbers]
    assert source.count == len(found)
    assert source.classes is None
    with Image.open(celeba / "img_align_celeba" / found[0].name) as file:
        np.testing.assert_array_equal(found[0].image, np.asarray(celeba_crop(file.convert("RGB"), 64)))


def test_celeba_is_recognised_by_its_folder(celeba):
    for place in (celeba, celeba / "img_align_celeba"):
        assert open_source(str(place)).description == "CelebA train, celeba crop at 64×64"
    (item, *_) = items(celeba, size=32)
    assert item.image.shape == (32, 32, 3)
    nested = celeba.parent / "kaggle" / "img_align_celeba"
    nested.mkdir(parents=True)
    (celeba / "img_align_celeba").rename(nested / "img_align_celeba")
    assert open_source(str(nested.parent), split="all").count == 8


@pytest.mark.parametrize(
    ("spoil", "how", "says"),
    [
        (lambda d: None, {"split": "valid"}, "splits train, val, test and all, got 'valid'"),
        (lambda d: (d / "list_eval_partition.txt").unlink(), {}, "has none; put it beside .* or .*--split all"),
        (
            lambda d: (d / "img_align_celeba" / "000002.jpg").unlink(),
            {},
            r"lacks 1 of the 5 .*000002.jpg\); unpack",
        ),
        (lambda d: (d / "list_eval_partition.txt").write_text("8\n"), {}, "'000001.jpg 0', got '8' in line 1"),
        (lambda d: (d / "list_eval_partition.txt").write_bytes(b"\xff\n"), {}, "'000001.jpg 0', got '.' in line 1"),
        (
            lambda d: (d / "list_eval_partition.txt").write_text("000001.jpg 0\n000002.jpg 0\n000001.jpg 2\n"),
            {},
            "names each image once, got '000001.jpg' again",
        ),
        (lambda d: [f.unlink() for f in (d / "img_align_celeba").iterdir()], {}, "holds no .jpg; unpack"),
        (lambda d: (d / "img_align_celeba").rename(d / "pictures"), {}, "has no folder img_align_celeba; unpack"),
    ],
)
def test_celeba_problems(celeba, spoil, how, says):
    spoil(celeba)
    with pytest.raises(SourceError, match=says):
        open_source(f"celeba:{celeba}", **how)


def test_another_edition_of_celeba_is_told_by_its_size(celeba, tmp_path):
    for file in (celeba / "img_align_celeba").iterdir():
        save(file, picture(64, 64))
    with pytest.raises(SourceError, match="an aligned CelebA image is 178×218, got 64×64; take img_align_celeba"):
        prepare(open_source(str(celeba)), tmp_path / "store")
    assert not list(tmp_path.glob("*store*"))


# ImageNet

WNIDS = ["n01440764", "n01443537", "n02119789"]


@pytest.fixture
def ilsvrc(tmp_path):
    folder = tmp_path / "ILSVRC2012"
    for label, wnid in enumerate(WNIDS):
        for i in range(3):
            save(folder / "train" / wnid / f"{wnid}_{i}.JPEG", picture(150 + 10 * i, 140, 10 * label + i))
        save(folder / "val" / wnid / f"ILSVRC2012_val_0000000{label}.JPEG", picture(200, 130, label))
    return folder


def test_imagenet_folders_have_sorted_wnids_and_adms_crop(ilsvrc):
    source = open_source(f"imagenet64:{ilsvrc}")
    found = list(source.items())
    assert (source.count, source.classes) == (9, WNIDS)
    assert [item.label for item in found] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert found[4].name == "n01443537/n01443537_1.JPEG"
    with Image.open(ilsvrc / "train" / found[4].name) as file:
        np.testing.assert_array_equal(found[4].image, np.asarray(adm_crop(file.convert("RGB"), 64)))
    for size in (256, 512):
        (item, *_) = items(f"imagenet{size}:{ilsvrc}", split="val")
        assert item.image.shape == (size, size, 3)


def test_imagenet_is_found_where_archives_put_it(ilsvrc, tmp_path):
    assert open_source(f"imagenet64:{ilsvrc / 'train'}").count == 9
    (tmp_path / "kaggle" / "ILSVRC" / "Data").mkdir(parents=True)
    ilsvrc.rename(tmp_path / "kaggle" / "ILSVRC" / "Data" / "CLS-LOC")
    assert open_source(f"imagenet64:{tmp_path / 'kaggle'}", split="val").count == 3


def test_a_part_of_the_validation_images_has_the_labels_of_train(ilsvrc):
    for file in (ilsvrc / "val" / WNIDS[0]).iterdir():
        file.unlink()
    (ilsvrc / "val" / WNIDS[0]).rmdir()
    source = open_source(f"imagenet64:{ilsvrc}", split="val")
    assert (source.classes, [item.label for item in source.items()]) == (WNIDS, [1, 2])


@pytest.mark.parametrize(
    ("spoil", "how", "says"),
    [
        (lambda d: None, {"split": "test"}, r"splits train and val \(its test has no labels\), got 'test'"),
        (lambda d: None, {"size": 32}, "imagenet64 has the size 64, got --size 32; leave --size out"),
        (
            lambda d: (d / "train").rename(d / "images"),
            {},
            "no folder 'train' with ImageNet's .* found images, val",
        ),
        (lambda d: (d / "train" / "cats").mkdir(), {}, "a WordNet id such as n01440764, got 'cats' in"),
        (lambda d: (d / "train" / "n09999999").mkdir(), {}, "n09999999 holds no images; unpack n09999999.tar"),
        (
            lambda d: (d / "val" / WNIDS[0]).rename(d / "val" / "n09999999"),
            {"split": "val"},
            "has the class n09999999, which .*train lacks",
        ),
        (
            lambda d: [(f.rename(d / "val" / f.name), f.parent.rmdir()) for f in (d / "val").glob("*/*")],
            {"split": "val"},
            "val has no class folders .*move the validation images into theirs",
        ),
    ],
)
def test_imagenet_problems(ilsvrc, spoil, how, says):
    spoil(ilsvrc)
    with pytest.raises(SourceError, match=says):
        open_source(f"imagenet64:{ilsvrc}", **how)


def npz_rows(seed, count=3):
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (count, 12288), dtype=np.uint8), generator.integers(1, 1001, count)


@pytest.fixture
def downsampled(tmp_path):
    folder = tmp_path / "imagenet64"
    for part, batches in (
        ("Imagenet64_train_part1_npz", range(1, 6)),
        ("Imagenet64_train_part2_npz", range(6, 11)),
    ):
        (folder / part).mkdir(parents=True)
        for batch in batches:
            data, labels = npz_rows(batch)
            mean = data.mean(0)
            np.savez(folder / part / f"train_data_batch_{batch}.npz", data=data, labels=labels.tolist(), mean=mean)
    (folder / "Imagenet64_val_npz").mkdir()
    data, labels = npz_rows(0)
    np.savez_compressed(folder / "Imagenet64_val_npz" / "val_data.npz", data=data, labels=labels.tolist())
    return folder


@pytest.mark.parametrize("name", ["imagenet64:", ""])
def test_downsampled_imagenet(downsampled, name):
    for split, batches in (("train", range(1, 11)), ("val", [0])):
        source = open_source(f"{name}{downsampled}", split=split)
        found = list(source.items())
        rows, labels = (np.concatenate(parts) for parts in zip(*map(npz_rows, batches), strict=True))
        assert source.count == len(found) == len(rows)
        assert [item.label for item in found] == (labels - 1).tolist()
        for item, row in zip(found, rows, strict=True):
            np.testing.assert_array_equal(item.image, row.reshape(3, 64, 64).transpose(1, 2, 0))
    assert len(source.classes) == 1000


def cut(file):
    file.write_bytes(file.read_bytes()[:-200])


def damage(file):
    data = bytearray(file.read_bytes())
    data[5000] ^= 1  # in a row of the images
    file.write_bytes(data)


def rewrite(**arrays):
    return lambda file: np.savez(file, **arrays)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda file: file.unlink(), "looks like the downsampled ImageNet but lacks train_data_batch_3.npz"),
        (cut, "train_data_batch_3.npz is no whole npz file .*cut short or damaged"),
        (damage, "train_data_batch_3.npz is no whole npz file .*cut short or damaged"),
        (rewrite(data=npz_rows(3)[0]), "train_data_batch_3.npz is no whole npz file with data and labels"),
        (rewrite(data=npz_rows(3)[0], labels=["a", "b", "c"]), r"a row of whole numbers, got <U1 of shape \(3,\)"),
        (rewrite(data=npz_rows(3)[0], labels=[[1, 2, 3]]), r"a row of whole numbers, got int64 of shape \(1, 3\)"),
        (rewrite(data=npz_rows(3)[0], labels=[0, 1, 2]), r"labels .* are 1 … 1000, got 0 … 2"),
        (
            rewrite(data=np.zeros((3, 3072), np.uint8), labels=[1, 2, 3]),
            r"rows of 12288 uint8, one for each of 3 labels, got uint8 \(3, 3072\)",
        ),
    ],
)
def test_downsampled_imagenet_problems(downsampled, spoil, says, tmp_path):
    spoil(downsampled / "Imagenet64_train_part1_npz" / "train_data_batch_3.npz")
    with pytest.raises(SourceError, match=says):
        prepare(open_source(str(downsampled)), tmp_path / "store")
    assert not list(tmp_path.glob("*store*"))


def test_the_downsampled_edition_has_one_size(downsampled):
    with pytest.raises(SourceError, match="downsampled to 64×64, got 256×256; give imagenet64:"):
        open_source(f"imagenet256:{downsampled}")
    with pytest.raises(SourceError, match="downsampled to 64×64, got --crop centre"):
        open_source(f"imagenet64:{downsampled}", crop="centre")


# COCO


@pytest.fixture
def coco(tmp_path):
    folder = tmp_path / "coco"
    (folder / "annotations").mkdir(parents=True)
    for split, ids in (("train2017", (9, 25, 30)), ("val2017", (139, 285))):
        images = [{"id": i, "file_name": f"{i:012}.jpg", "height": 60, "width": 80} for i in ids]
        notes = [
            {"image_id": i, "id": 1000 - 10 * i - n, "caption": f"Caption {n} of\n {i}. "}
            for i in ids
            for n in range(5)
        ]
        content = {"info": {}, "licenses": [], "images": images, "annotations": notes}
        (folder / "annotations" / f"captions_{split}.json").write_text(json.dumps(content))
        for i in ids:
            save(folder / split / f"{i:012}.jpg", picture(80, 60, i))
    return folder


@pytest.mark.parametrize("name", ["coco:", ""])
def test_coco_items_carry_all_captions(coco, name):
    source = open_source(f"{name}{coco}", split="val", size=32)
    first, second = source.items()
    assert (source.count, source.classes, source.description) == (2, None, "COCO val2017, centre crop at 32×32")
    assert first.captions == tuple(f"Caption {n} of 139." for n in (4, 3, 2, 1, 0))  # by their ids
    assert second.image.shape == (32, 32, 3)
    assert open_source(f"coco:{coco}", split="train2017").count == 3
    assert next(open_source(f"coco:{coco}").items()).image.shape == (256, 256, 3)


def test_coco_images_may_lie_in_a_folder_images(coco):
    (coco / "images").mkdir()
    (coco / "train2017").rename(coco / "images" / "train2017")
    assert len(items(coco, size=8)) == 3


def drop_captions_of(file, image_id):
    content = json.loads(file.read_text())
    content["annotations"] = [note for note in content["annotations"] if note["image_id"] != image_id]
    file.write_text(json.dumps(content))


def list_first_again(file):
    content = json.loads(file.read_text())
    content["images"].append(content["images"][0])
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("spoil", "how", "says"),
    [
        (
            lambda d: None,
            {"split": "test"},
            "no captions_test.*json; it has train2017, val2017: choose with --split",
        ),
        (
            lambda d: (d / "annotations" / "captions_train2014.json").write_text("{}"),
            {},
            "holds train2014, train2017, val2017: 'train' is more than one",
        ),
        (
            lambda d: [f.unlink() for f in (d / "annotations").iterdir()],
            {},
            "has no annotations/captions_.*json; unpack annotations_trainval2017.zip",
        ),
        (
            lambda d: (d / "train2017").rename(d / "pictures"),
            {},
            "needs the images in .*train2017; unpack train2017",
        ),
        (
            lambda d: cut(d / "annotations" / "captions_train2017.json"),
            {},
            "captions_train2017.json is no whole file",
        ),
        (
            lambda d: (d / "annotations" / "captions_train2017.json").write_text('{"images": []}'),
            {},
            "is no whole file of COCO captions .*KeyError: 'annotations'",
        ),
        (
            lambda d: list_first_again(d / "annotations" / "captions_train2017.json"),
            {},
            "is no whole file of COCO captions .*the image 9 is listed twice",
        ),
    ],
)
def test_coco_problems(coco, spoil, how, says):
    spoil(coco)
    with pytest.raises(SourceError, match=says):
        open_source(f"coco:{coco}", **how)


def test_coco_pictures_without_file_or_caption_are_named(coco, tmp_path):
    (coco / "train2017" / "000000000009.jpg").unlink()
    store = prepare(open_source(str(coco), size=8), tmp_path / "store")
    assert len(store) == len(store.captions) == 2
    assert store.captions[0][0] == "Caption 4 of 25."
    assert "000000000009.jpg: FileNotFoundError" in store.manifest.skipped[0]
    drop_captions_of(coco / "annotations" / "captions_train2017.json", 25)
    with pytest.raises(SourceError, match="000000000025.jpg: it has no caption in captions_train2017.json"):
        prepare(open_source(str(coco), size=8), tmp_path / "other")


def test_a_named_source_that_is_not_there():
    with pytest.raises(
        SourceError, match="no file or folder 'nothing'; .*NAME:PATH with one of celeba, imagenet64"
    ):
        open_source("celeba:nothing")
