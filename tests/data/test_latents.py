"""Latents against direct encodings, with tiny autoencoders made on the spot."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import (
    AsymmetricAutoencoderKL,
    AutoencoderDC,
    AutoencoderKL,
    AutoencoderKLKVAE,
    AutoencoderKLTemporalDecoder,
    AutoencoderTiny,
    UNet2DModel,
    VQModel,
)
from safetensors.torch import load_file, save_file

from scalelong.data.images import Item, Source
from scalelong.data.latents import AutoencoderError, as_float16, load_autoencoder, spread_of
from scalelong.data.loader import Loader
from scalelong.data.prepare import prepare
from scalelong.data.store import StoreError, open_store

WEIGHTS = "diffusion_pytorch_model.safetensors"


def tiny_kl(seed=0, blocks=2, **config):
    torch.manual_seed(seed)
    vae = AutoencoderKL(
        block_out_channels=(8,) * blocks,
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        norm_num_groups=4,
        **config,
    )
    with torch.no_grad():
        # Deviations of about 0.2, so that what is drawn from them shows.
        vae.quant_conv.bias[vae.config.latent_channels :] = -3
    return vae.eval()


def made_images(count, size=8, channels=3):
    return np.random.default_rng(0).integers(0, 256, (count, size, size, channels), dtype=np.uint8)


def source_of(images, labels=True, **more):
    def items():
        for i, image in enumerate(images):
            yield Item(f"picture {i}", image, i % 2 if labels else None)

    return Source("made images", len(images), ["even", "odd"] if labels else None, items, **more)


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    folder = tmp_path_factory.mktemp("autoencoder") / "vae"
    tiny_kl(scaling_factor=0.5, shift_factor=0.25).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def store(vae, tmp_path_factory):
    out = tmp_path_factory.mktemp("data") / "store"
    return prepare(source_of(made_images(6)), out, autoencoder=load_autoencoder(vae))


def encoded(vae, images):
    """Both flips by hand, in float64: [N, 2, 2 C, h, w]."""
    network = AutoencoderKL.from_pretrained(vae).double()
    x = torch.from_numpy(images).permute(0, 3, 1, 2).double() / 127.5 - 1
    with torch.no_grad():
        found = [network.encode(side).latent_dist for side in (x, x.flip(3))]
    return torch.stack([torch.cat([d.mean, d.std], dim=1) for d in found], dim=1).numpy()


def test_the_store_keeps_the_moments_of_both_flips(vae, store):
    images = made_images(6)
    np.testing.assert_array_equal(store.images, images)
    assert store.latents.dtype == np.float16
    assert store.latents.shape == (6, 2, 8, 4, 4)
    np.testing.assert_allclose(store.latents, encoded(vae, images), rtol=2**-10, atol=1e-6)
    direct = load_autoencoder(vae).moments(torch.from_numpy(images))
    np.testing.assert_allclose(direct.numpy(), encoded(vae, images), rtol=1e-4, atol=1e-5)
    assert np.abs(store.latents[:, 0, :4] - store.latents[:, 1, :4, :, ::-1]).max() > 0.01  # flips do not commute


def test_the_manifest_says_what_they_are(vae, store):
    space = json.loads((store.folder / "manifest.json").read_text())["latents"]
    assert space.pop("weights") == open_store(store.folder).manifest.latents.weights
    assert space == {
        "autoencoder": str(vae),
        "kind": "AutoencoderKL",
        "scaling_factor": 0.5,
        "shift_factor": 0.25,
        "channels": 4,
        "height": 4,
        "width": 4,
    }


def test_many_images_are_encoded_a_few_at_a_time(vae, tmp_path, monkeypatch):
    monkeypatch.setattr("scalelong.data.latents._PIXELS_AT_ONCE", 2 * 8 * 8)
    images = made_images(5)
    store = prepare(source_of(images), tmp_path / "store", autoencoder=load_autoencoder(vae))
    np.testing.assert_allclose(store.latents, encoded(vae, images), rtol=2**-10, atol=1e-6)
    autoencoder = load_autoencoder(vae)
    decoded = autoencoder.decoded(torch.from_numpy(store.latents[:, 0, :4].astype(np.float32)))
    assert decoded.shape == (5, 3, 8, 8)


@pytest.mark.parametrize("resident_bytes", [8 << 30, 0])
def test_the_stream_is_drawn_from_the_moments(store, resident_bytes):
    loader = Loader(store, seed=3, flip=True, label_dropout=0.0, latents=True, resident_bytes=resident_bytes)
    batch = loader.batch(4, 5)  # crosses an epoch
    rows = torch.cat([loader._order(0)[4:], loader._order(1)[:3]])
    flipped = loader.flips.bits(batch.indices, 1)[:, 0] & 1
    assert 0 < flipped.sum() < 5
    moments = torch.from_numpy(np.array(store.latents)).float()[rows, flipped]
    noise = loader.posterior.normal(batch.indices, (4, 4, 4))
    torch.testing.assert_close(batch.images, (moments[:, :4] + moments[:, 4:] * noise - 0.25) * 0.5)
    torch.testing.assert_close(batch.condition, torch.from_numpy(store.labels)[rows])
    again = loader.batch(4 + 6, 5)  # the same images in another epoch have other noise
    assert not torch.equal(batch.images, again.images)
    plain = Loader(store, seed=3, latents=True).batch(0, 6)
    unflipped = torch.from_numpy(np.array(store.latents[:, 0])).float()[loader._order(0)]
    assert (plain.images - (unflipped[:, :4] - 0.25) * 0.5).abs().max() < 6 * unflipped[:, 4:].max() * 0.5


def test_draws_from_an_image_have_its_mean_and_deviation(vae, tmp_path):
    store = prepare(source_of(made_images(1)), tmp_path / "one", autoencoder=load_autoencoder(vae, scale=2.0))
    moments = torch.from_numpy(np.array(store.latents[:, 0])).expand(4000, -1, -1, -1)
    drawn = Loader(store, seed=0, latents=True).finish(moments, None, torch.arange(4000)).images
    mean, deviation = torch.from_numpy(np.array(store.latents[0, 0])).float().split(4)
    error = deviation * 2 / 4000**0.5
    assert ((drawn.mean(0) - (mean - 0.25) * 2).abs() < 5 * error).all()
    torch.testing.assert_close(drawn.std(0), deviation * 2, rtol=0.06, atol=0)


def test_the_spread_is_that_of_the_stream(store):
    drawn = torch.cat([Loader(store, seed=seed, latents=True).batch(0, 6).images for seed in range(100)])
    assert spread_of(store.latents, store.manifest.latents) == pytest.approx(drawn.std().item(), rel=0.02)
    means = replace(store.manifest.latents, channels=8)  # as if nothing were random
    assert spread_of(store.latents, means) == pytest.approx(0.5 * store.latents[:, 0].astype(float).std(), rel=1e-4)


def test_decoding_undoes_the_scale_and_clips(vae):
    autoencoder = load_autoencoder(vae, scale=0.1)
    z = 3 * torch.randn(2, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = AutoencoderKL.from_pretrained(vae).decode(z / 0.1 + 0.25).sample
    assert expected.abs().max() > 1
    torch.testing.assert_close(autoencoder.decoded(z), expected.clamp(-1, 1))


@pytest.mark.parametrize("kind", ["tiny", "dc", "vq"])
def test_autoencoders_without_randomness(tmp_path, kind):
    torch.manual_seed(0)
    if kind == "tiny":
        blocks = {"encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8)}
        network = AutoencoderTiny(**blocks, num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1))
    elif kind == "dc":
        sides = {"block_types": "ResBlock", "block_out_channels": 8, "layers_per_block": 1, "qkv_multiscales": ()}
        both = {f"{side}_{name}": (value,) * 2 for side in ("encoder", "decoder") for name, value in sides.items()}
        network = AutoencoderDC(latent_channels=4, attention_head_dim=4, scaling_factor=0.4, **both)
    else:
        down, up = ("DownEncoderBlock2D",) * 2, ("UpDecoderBlock2D",) * 2
        network = VQModel(
            block_out_channels=(8, 8), down_block_types=down, up_block_types=up, norm_num_groups=4, vq_embed_dim=5
        )
    network.save_pretrained(tmp_path / "net")
    autoencoder = load_autoencoder(tmp_path / "net")
    images = made_images(3)
    store = prepare(source_of(images), tmp_path / "store", autoencoder=autoencoder)
    x = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        found = network.eval().encode(x)
        direct = found.latent if kind == "dc" else found.latents
    assert store.latents.shape == (3, 2, *direct.shape[1:])
    np.testing.assert_allclose(store.latents[:, 0], direct.numpy(), rtol=2**-10, atol=1e-3)
    batch = Loader(store, seed=0, latents=True).batch(0, 3)
    order = Loader(store, seed=0)._order(0)
    expected = torch.from_numpy(np.array(store.latents[:, 0])).float()[order]
    torch.testing.assert_close(batch.images, expected * network.config.scaling_factor)
    assert autoencoder.decoded(batch.images).shape == (3, 3, 8, 8)


def test_an_asymmetric_autoencoder_has_moments_too(tmp_path):
    torch.manual_seed(0)
    network = AsymmetricAutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        down_block_out_channels=(8, 8),
        up_block_types=("UpDecoderBlock2D",) * 2,
        up_block_out_channels=(8, 16),
        norm_num_groups=4,
        sample_size=8,
    ).eval()
    network.save_pretrained(tmp_path / "net")
    autoencoder = load_autoencoder(tmp_path / "net")
    images = made_images(3)
    store = prepare(source_of(images), tmp_path / "store", autoencoder=autoencoder)
    with torch.no_grad():
        direct = network.encode(torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1).latent_dist
    expected = torch.cat([direct.mean, direct.std], dim=1).numpy()
    np.testing.assert_allclose(store.latents[:, 0], expected, rtol=2**-10, atol=1e-3)
    assert autoencoder.decoded(torch.randn(2, 4, 4, 4)).shape == (2, 3, 8, 8)


def kvae():
    torch.manual_seed(0)
    return AutoencoderKLKVAE(channels=32, num_enc_blocks=1, num_dec_blocks=1, z_channels=4, ch_mult=(1, 2)).eval()


def test_an_autoencoder_of_a_class_with_a_config_of_its_own(tmp_path):
    network = kvae()
    network.save_pretrained(tmp_path / "net")
    autoencoder = load_autoencoder(tmp_path / "net", scale=0.7)
    images = made_images(2, size=16)
    store = prepare(source_of(images), tmp_path / "store", autoencoder=autoencoder)
    with torch.no_grad():
        direct = network.encode(torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1).latent_dist
        back = network.decode(direct.mean).sample
    expected = torch.cat([direct.mean, direct.std], dim=1).numpy()
    np.testing.assert_allclose(store.latents[:, 0], expected, rtol=2**-10, atol=1e-3)
    torch.testing.assert_close(autoencoder.decoded(0.7 * direct.mean), back.clamp(-1, 1), rtol=1e-4, atol=1e-5)


def test_a_pipelines_folder_is_searched(vae, tmp_path, monkeypatch):
    shutil.copytree(vae, tmp_path / "pipeline" / "vae")
    (tmp_path / "pipeline" / "model_index.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    found = load_autoencoder("pipeline")
    assert found.place == str(tmp_path / "pipeline")  # wherever it is asked for later
    assert found.space(8, 8, 3).weights == load_autoencoder(vae).space(8, 8, 3).weights


def test_latents_alone_leave_no_images(vae, tmp_path):
    store = prepare(
        source_of(made_images(4)), tmp_path / "store", autoencoder=load_autoencoder(vae), latents_only=True
    )
    assert not (store.folder / "images.npy").exists()
    assert Loader(store, seed=0, latents=True).batch(0, 4).images.shape == (4, 4, 4, 4)
    with pytest.raises(StoreError, match="prepared with --latents-only and keeps no images"):
        store.images[0]
    with pytest.raises(StoreError, match="--latents-only"):
        Loader(store, seed=0)


def test_spoilt_latents_are_noticed(store, tmp_path):
    shutil.copytree(store.folder, tmp_path / "store")
    with (tmp_path / "store" / "latents.npy").open("r+b") as file:
        file.seek(400)
        file.write(b"\1\2\3")
    with pytest.raises(StoreError, match="latents.npy does not have the checksum"):
        open_store(tmp_path / "store")


# What is wrong gets a sentence, and leaves nothing behind.


def broken(change):
    def make(folder):
        tiny_kl().save_pretrained(folder)
        weights = load_file(folder / WEIGHTS)
        change(weights)
        save_file(weights, folder / WEIGHTS)

    return make


def spoil(weights):
    weights["encoder.conv_in.weight"][0] = float("nan")


def other_kind(folder):
    UNet2DModel(
        block_out_channels=(8,), norm_num_groups=2, down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",)
    ).save_pretrained(folder)


def cut_short(folder):
    tiny_kl().save_pretrained(folder)
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:1000])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (broken(spoil), "weights that are not finite, in encoder.conv_in.weight"),
        (
            broken(lambda w: w.pop("decoder.conv_out.bias")),
            "lack 1 tensors, the first of them decoder.conv_out.bias",
        ),
        (cut_short, "cannot be loaded"),
        (other_kind, "a class of diffusers such as .*AutoencoderDC, got a 'UNet2DModel'"),
        (
            lambda f: AutoencoderKLTemporalDecoder(block_out_channels=(32,), layers_per_block=1).save_pretrained(f),
            r"decodes what comes of it, and .*TemporalDecoder, does not \(.*'num_frames'\); take one for images",
        ),
        (lambda f: kvae().save_pretrained(f), "has no scaling_factor of its own; give .*--scale"),
        (lambda f: f.mkdir(), "holds no autoencoder: there is no config.json in it, in its vae or in its vqvae"),
        (lambda f: None, "there is no folder"),
        (
            lambda f: tiny_kl(latents_mean=(0.0,) * 4, latents_std=(1.0,) * 4).save_pretrained(f),
            "normalises each channel by its latents_mean",
        ),
    ],
)
def test_odd_autoencoders_are_refused(tmp_path, make, says):
    make(tmp_path / "odd")
    with pytest.raises(AutoencoderError, match=says):
        load_autoencoder(tmp_path / "odd")


@pytest.mark.parametrize("scale", [0, -1, float("nan")])
def test_odd_scales_are_refused(vae, scale):
    with pytest.raises(AutoencoderError, match="scale of latents is a positive number"):
        load_autoencoder(vae, scale=scale)


def test_a_name_without_a_hub_says_so():
    with pytest.raises(AutoencoderError, match="nobody/nothing is no folder here, is not in the local cache, and"):
        load_autoencoder("nobody/nothing")


@pytest.mark.parametrize(
    ("images", "says"),
    [
        (made_images(2, channels=1), "takes 3 channels and gives 3, and the images have 1"),
        (made_images(2, size=9), "each 2×2 pixels, so that the sides .* multiples of 2, got 9×9; give --size 8"),
    ],
)
def test_images_that_do_not_fit_leave_nothing(vae, tmp_path, images, says):
    with pytest.raises(AutoencoderError, match=says):
        prepare(source_of(images), tmp_path / "store", autoencoder=load_autoencoder(vae))
    assert list(tmp_path.iterdir()) == []


def test_what_float16_cannot_hold_names_the_image():
    moments = torch.zeros(2, 2, 8, 4, 4)
    moments[1, 0, 0, 0, 0] = 1e5
    with pytest.raises(AutoencoderError, match=r"encodes b to values of up to 100000; .* below 65,504"):
        as_float16(moments, ["a", "b"])


def test_an_interrupted_preparation_leaves_nothing(vae, tmp_path):
    def stop(items, count):
        for i, item in enumerate(items):
            if i == 3:
                raise KeyboardInterrupt
            yield item

    with pytest.raises(KeyboardInterrupt):
        prepare(source_of(made_images(6)), tmp_path / "store", progress=stop, autoencoder=load_autoencoder(vae))
    assert list(tmp_path.iterdir()) == []
