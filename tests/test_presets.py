import pytest

from scalelong.presets import MODEL_PRESETS, RUN_PRESETS, run_preset

# (steps, batch, learning rate, betas, warm-up) as published
PUBLISHED = {
    "cifar10-uvit-s": (500_000, 128, 2e-4, (0.99, 0.999), 2500),
    "celeba64-uvit-s": (500_000, 128, 2e-4, (0.99, 0.99), 5000),
    "imagenet64-uvit-m": (300_000, 1024, 3e-4, (0.99, 0.99), 5000),
    "imagenet64-uvit-l": (300_000, 1024, 3e-4, (0.99, 0.99), 5000),
    "imagenet256-uvit-l": (300_000, 1024, 2e-4, (0.99, 0.99), 5000),
    "imagenet256-uvit-h": (500_000, 1024, 2e-4, (0.99, 0.99), 5000),
    "imagenet512-uvit-l": (500_000, 1024, 2e-4, (0.99, 0.99), 5000),
    "imagenet512-uvit-h": (500_000, 1024, 2e-4, (0.99, 0.99), 5000),
    "coco-uvit-s": (1_000_000, 256, 2e-4, (0.9, 0.9), 5000),
    "coco-uvit-s-deep": (1_000_000, 256, 2e-4, (0.9, 0.9), 5000),
    "cifar10-unet": (800_000, 128, 2e-4, (0.9, 0.999), 5000),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipes_are_the_published_ones(name):
    t = run_preset(name).train
    assert (t.steps, t.batch_size, t.lr, t.betas, t.warmup_steps) == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "label_dropout", "s"),
    [
        ("imagenet256-uvit-l", 0.15, 0.4),
        ("imagenet256-uvit-h", 0.1, 0.4),
        ("imagenet512-uvit-l", 0.15, 0.7),
        ("imagenet512-uvit-h", 0.1, 0.7),
    ],
)
def test_latents_are_guided_as_published(name, label_dropout, s):
    recipe = run_preset(name)
    assert (recipe.data.space, recipe.process, recipe.data.label_dropout) == ("latents", "sd", label_dropout)
    assert recipe.sampling.guidance == pytest.approx(1 + s)
    assert (recipe.sampling.sampler, recipe.sampling.steps) == ("dpm++", 50)
    network = MODEL_PRESETS[name].config
    assert (network["num_class_embeds"], network["timestep_map"]) == (1001, "one-based")
    assert recipe.train.weight_decay == 0.03


def test_imagenet_64_has_no_null_class():
    for name in ("imagenet64-uvit-m", "imagenet64-uvit-l", "imagenet64-unet"):
        assert run_preset(name).data.label_dropout == 0
        assert MODEL_PRESETS[name].config["num_class_embeds"] == 1000


def test_what_the_paper_leaves_open_is_marked():
    assert {name for name, preset in MODEL_PRESETS.items() if preset.our_reading} == {
        "imagenet64-unet",
        "coco-unet",
    }


def test_every_recipe_has_its_network():
    assert set(RUN_PRESETS) <= set(MODEL_PRESETS)
    for name, recipe in RUN_PRESETS.items():
        assert recipe.model.preset == name
        by_class = "num_class_embeds" in MODEL_PRESETS[name].config
        assert (recipe.data.condition == "class") == by_class
        assert (recipe.data.condition == "text") == ("cross_attention_dim" in MODEL_PRESETS[name].config)


@pytest.mark.parametrize("name", ["coco-uvit-s", "coco-uvit-s-deep", "coco-unet"])
def test_coco_is_drawn_as_published(name):
    recipe = run_preset(name)
    assert (recipe.process, recipe.data.label_dropout) == ("sd", 0.1)
    assert (recipe.sampling.sampler, recipe.sampling.steps, recipe.sampling.guidance) == ("dpm++", 50, 2.0)  # s = 1


def test_an_unknown_recipe_gets_the_list():
    with pytest.raises(ValueError, match="unknown recipe 'cifar'; the known ones are digits, cifar10-uvit-xs"):
        run_preset("cifar")
    with pytest.raises(ValueError, match="did you mean celeba64-uvit-s[?] The known ones are digits"):
        run_preset("celeba-uvit-s")
