import json
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from scalelong.data.prepare import prepare
from scalelong.data.sources import Item, Source, digits
from scalelong.metrics import evaluate as module
from scalelong.metrics.distances import Moments, frechet_distance
from scalelong.metrics.evaluate import quality_of, reference_of
from scalelong.metrics.features import InceptionFeatures, PixelFeatures


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return prepare(digits(), tmp_path_factory.mktemp("data") / "digits")


def images_of(store, rows):
    return torch.from_numpy(store.images[rows]).permute(0, 3, 1, 2).float() / 127.5 - 1


def test_real_images_beat_blurred_ones_beat_noise(store):
    reference = reference_of(store, PixelFeatures())
    real = images_of(store, np.arange(0, 1797, 2))
    blurred = nn.functional.avg_pool2d(real, 3, 1, 1)
    noise = torch.rand_like(real) * 2 - 1
    real, blurred, noise = (
        quality_of(kind.split(200), reference, PixelFeatures(), "made") for kind in (real, blurred, noise)
    )
    assert real.fid < 0.2 * blurred.fid < 0.2 * noise.fid
    assert real.kid < blurred.kid < noise.kid
    assert real.precision > 0.95
    assert noise.precision < 0.05
    assert "pixels; 899 samples (made) against all 1797 images" in real.protocol


def test_the_reference_is_the_whole_data_and_is_cached_by_checksum(store, tmp_path, monkeypatch):
    whole = Moments.of(images_of(store, np.arange(1797)).flatten(1))
    first = reference_of(store, PixelFeatures(), tmp_path)
    assert abs(frechet_distance(first.moments, whole)) < 1e-6
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(module, "images_of", None)  # the second time nothing is read
    second = reference_of(store, PixelFeatures(), tmp_path)
    assert torch.equal(first.moments.covariance, second.moments.covariance)
    assert torch.equal(first.features, second.features)


class Broken:
    """Features of which one is no number."""

    name = PixelFeatures.name

    def __call__(self, images):
        features = PixelFeatures()(images)
        features[0, 0] = float("nan")
        return features


def test_features_that_are_not_finite_give_no_distance_and_are_not_kept(store, tmp_path):
    reference = reference_of(store, PixelFeatures())
    with pytest.raises(FloatingPointError, match="features of 1 of 64 images, from number 0, are not finite"):
        quality_of([images_of(store, np.arange(64))], reference, Broken(), "made")
    with pytest.raises(FloatingPointError, match="not finite"):
        reference_of(store, Broken(), tmp_path)
    assert not list(tmp_path.iterdir())
    whole = reference_of(store, PixelFeatures(), tmp_path)
    (file,) = tmp_path.iterdir()
    module._write(
        file, module.Reference(Moments(1797, whole.moments.mean, whole.moments.covariance * np.nan), whole.features)
    )
    assert reference_of(store, PixelFeatures(), tmp_path).moments.covariance.isfinite().all()


def test_a_place_where_nothing_can_be_written_costs_no_features(store, tmp_path):
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="the statistics of the data are not kept for the next time"):
        assert reference_of(store, PixelFeatures(), tmp_path / "file").moments.count == 1797


class Probe(nn.Module):
    """Stands in for the network: gives back what it was shown, in small."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(
            [x.amin((1, 2, 3)), x.amax((1, 2, 3)), x.mean((1, 2, 3)), torch.full_like(x[:, 0, 0, 0], x.shape[-1])],
            1,
        )


def test_the_protocol_of_pytorch_fid(tmp_path):
    torch.jit.script(Probe()).save(tmp_path / "probe.pt")
    features = InceptionFeatures(tmp_path / "probe.pt")
    images = torch.tensor([-1.0, 0.0, 1.0])[:, None, None, None].expand(3, 1, 8, 8)
    low, high, mean, side = features(images).T
    assert side.tolist() == [299] * 3
    torch.testing.assert_close(mean, torch.tensor([-1, 128 / 255 * 2 - 1, 1]).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(low, high, atol=1e-6, rtol=0)


def test_features_do_not_depend_on_how_many_images_come_at_once(tmp_path):
    """A CPU takes them in small pieces: each image keeps its place and its features."""
    torch.jit.script(Probe()).save(tmp_path / "probe.pt")
    features = InceptionFeatures(tmp_path / "probe.pt")
    images = torch.linspace(-1, 1, 19)[:, None, None, None].expand(19, 3, 8, 8)
    together = features(images)
    assert together.shape == (19, 4)
    alone = torch.cat([features(image[None]) for image in images])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=0)


def test_quality_is_json(store):
    reference = reference_of(store, PixelFeatures())
    quality = quality_of([images_of(store, np.arange(50))], reference, PixelFeatures(), "x")
    assert set(json.loads(json.dumps(quality.as_dict()))) >= {"fid", "kid", "precision", "recall", "protocol"}


def test_few_samples_are_cautioned_about(store):
    reference = reference_of(store, PixelFeatures())
    of_64, of_65 = (
        quality_of([images_of(store, np.arange(n))], reference, PixelFeatures(), "x").as_dict() for n in (64, 65)
    )
    assert (
        "64 samples are few for features of 64 numbers: the Fréchet distance is biased upwards" in of_64["caution"]
    )
    assert "caution" not in of_65
    # What it says is so: the same images, fewer of them, are farther away.
    assert quality_of([images_of(store, np.arange(30))], reference, PixelFeatures(), "x").fid > 1.3 * of_65["fid"]


def test_long_work_is_watched(store):
    seen = []

    def progress(items, count):
        seen.append(count)
        return items

    reference = reference_of(store, PixelFeatures(), batch=250, progress=progress)
    quality_of([images_of(store, np.arange(50))], reference, PixelFeatures(), "x", watch=seen.append)
    assert seen == [8, "KID", "precision and recall", "Fréchet distance"]


def test_features_of_another_network_have_another_name(tmp_path):
    """References are cached by name: two networks must not share one."""
    from scalelong.metrics.features import InceptionFeatures, inception_name

    for name in ("one.pt", "two.pt"):
        torch.jit.script(torch.nn.Flatten()).save(tmp_path / name)
    (tmp_path / "two.pt").write_bytes((tmp_path / "two.pt").read_bytes() + b" ")
    names = {InceptionFeatures.name, *(inception_name(tmp_path / name) for name in ("one.pt", "two.pt"))}
    assert len(names) == 3
    assert InceptionFeatures(tmp_path / "one.pt").name == inception_name(tmp_path / "one.pt")


def test_pixels_of_large_images_are_refused_before_a_covariance_of_all_of_them():
    assert PixelFeatures()(torch.zeros(2, 3, 32, 32)).shape == (2, 3072)
    with pytest.raises(ValueError, match=r"at most 3,072 numbers .* got 12,288; use --features inception"):
        PixelFeatures()(torch.zeros(2, 3, 64, 64))


def test_the_order_of_the_data_does_not_matter(store, tmp_path, monkeypatch):
    """Folders of classes are prepared class by class; the images that are kept must not be those of a few."""
    monkeypatch.setattr(module, "_NEIGHBOURS_FROM", 300)
    images, labels = np.array(store.images), np.array(store.labels)
    samples = images_of(store, np.arange(0, 1797, 6))
    found = []
    for name, order in (("mixed", np.random.default_rng(0).permutation(1797)), ("sorted", labels.argsort())):
        items = [Item(str(i), images[i], int(labels[i])) for i in order]
        ordered = prepare(Source(name, len(items), list("0123456789"), partial(iter, items)), tmp_path / name)
        found.append(quality_of([samples], reference_of(ordered, PixelFeatures()), PixelFeatures(), "made"))
    mixed, in_order = found
    assert in_order.fid == pytest.approx(mixed.fid, rel=1e-6)
    assert in_order.kid == pytest.approx(mixed.kid, abs=0.01)
    assert in_order.precision == pytest.approx(mixed.precision, abs=0.1)
