"""The runs of `benchmarks.alarms`, by what they are to show.

`TUNED` were looked at while the alarm was made; `HELD_OUT` and `HEALTHY_HELD_OUT` were written
down before the alarm had a threshold, and first run when it was finished. `SCAN` looks for a learning rate × 30
that takes its time, `EDGE` between the rates that do no harm and those that end a run at once, `RECIPE` with the
optimiser of U-ViT's recipe, whose memory is ten times longer (`HEALTHY_RECIPE` without a fault).
`HEALTHY_NEW` was written after a healthy run that was held out had rung, `HEALTHY_LAST` after one of `HEALTHY_NEW`
had, `HEALTHY_RECIPE_NEW` after one of `HEALTHY_RECIPE` had, `HEALTHY_RECIPE_LAST` after two of those had, and
`HEALTHY_RECIPE_FINAL` after three of those, and `HEALTHY_RECIPE_AFTER` after one of those; each was then run once.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from benchmarks.faults import (
    Run,
    corrupted_batches,
    drifting_data,
    growing_layer,
    half_overflow,
    injected_scale,
    lr_times_30,
    negative_decay,
    noisy_targets,
    ramped_gate_bias,
    ramped_scalars,
    residual_gain,
    rising_lr,
    small_beta2,
    unet,
    uvit,
    wrong_sign,
)

TUNED = [
    Run("lr × 30, U-ViT", fault=lr_times_30),
    Run("lr × 30, U-ViT depth 12, ls", make=lambda: uvit(32, 12), scaling="ls", lr=5e-4, seed=1, fault=lr_times_30),
    Run("lr × 30, UNet", make=unet, seed=2, fault=lr_times_30),
    Run("lr × 30, U-ViT, base lr 3e-3", lr=3e-3, warmup=100, seed=8, fault=lr_times_30),
    Run("lr × 30, UNet, base lr 2e-3", make=unet, lr=2e-3, warmup=50, seed=9, fault=lr_times_30),
    Run("lr × 30, U-ViT, clipped", clip=1.0, seed=3, fault=lr_times_30),
    Run("ramped coefficients, U-ViT", scaling="scalar", seed=4, fault=ramped_scalars),
    Run("ramped coefficients, UNet at norm", unet, "scalar", placement="norm", seed=5, fault=ramped_scalars),
    Run("ramped gate bias, U-ViT ls", scaling="ls", seed=6, fault=ramped_gate_bias),
    Run("ramped coefficients, U-ViT in fp16", scaling="scalar", half=True, seed=10, fault=ramped_scalars),
    Run("fp16 overflow, U-ViT", half=True, seed=7, fault=half_overflow("mid_block.mlp.fc2.weight")),
]

# Losses that grow slowly: at 2 % a step tenfold after 116 steps. They were looked at while `rise` was made.
SLOW = [
    Run(f"noise on targets grows {growth - 1:.0%} a step, {name}, batch {batch}", seed=26, steps=420, batch=batch,
        fault=noisy_targets(growth), **how)
    for growth, (name, how), batch in product(
        (1.02, 1.03, 1.04), (("U-ViT", {"scaling": "cs:0.7"}), ("UNet", {"make": unet})), (16, 4)
    )
]  # fmt: skip

HELD_OUT = [
    Run("β2 = 0.1, U-ViT", lr=3e-3, seed=20, fault=small_beta2),
    Run("one layer grows 3 % a step, U-ViT", seed=21, fault=growing_layer("in_blocks.1.attn.proj.weight", 1.03)),
    Run(
        "one layer grows 3 % a step, UNet",
        unet,
        seed=22,
        fault=growing_layer("up_blocks.0.resnets.0.conv2.weight", 1.03),
    ),
    Run("one layer × 100 at once, U-ViT", seed=23, fault=injected_scale("in_blocks.2.mlp.fc2.weight", 100.0)),
    Run("data grows 3 % a step, U-ViT", seed=24, fault=drifting_data),
    Run("every tenth batch 0 … 255, UNet", make=unet, seed=25, fault=corrupted_batches),
    Run("noise on targets grows 4 % a step, U-ViT", scaling="cs:0.7", seed=26, fault=noisy_targets(1.04)),
    Run("residual branches grow 2 % a step, U-ViT", make=lambda: uvit(32, 12), seed=27, fault=residual_gain),
    Run("residual branches grow 2 % a step, UNet", make=unet, seed=28, fault=residual_gain),
    Run("weight decay of the wrong sign, U-ViT", scaling="ls", seed=29, fault=negative_decay),
    Run("weight decay of the wrong sign, UNet", make=unet, seed=30, fault=negative_decay),
    Run("lr grows 2 % a step, U-ViT", seed=31, steps=450, fault=rising_lr),
    Run("lr grows 2 % a step, UNet", make=unet, seed=32, steps=450, fault=rising_lr),
    Run("lr × 30, SGD, U-ViT", optimiser="sgd", lr=0.02, seed=33, fault=lr_times_30),
    Run("lr × 30, v-prediction, UNet", make=unet, target="v_prediction", seed=34, fault=lr_times_30),
    Run("ascent in one block, U-ViT", scaling="1/sqrt2", seed=35, fault=wrong_sign),
    Run(
        "fp16 overflow in attention, UNet",
        make=unet,
        half=True,
        seed=36,
        fault=half_overflow("mid_block.attentions.0.to_out.0.weight"),
    ),
]

HEALTHY = [
    Run("U-ViT", seed=100),
    Run("U-ViT, lr 1e-4", lr=1e-4, seed=101),
    Run("U-ViT, lr 3e-3, warm-up", lr=3e-3, warmup=100, seed=102),
    Run("U-ViT, cs", scaling="cs:0.7", seed=103),
    Run("U-ViT, ls", scaling="ls", seed=104),
    Run("U-ViT, 1/√2, batch 4", scaling="1/sqrt2", batch=4, seed=105),
    Run("U-ViT, scalar, clipped", scaling="scalar", clip=1.0, seed=106),
    Run("U-ViT depth 12", make=lambda: uvit(32, 12), seed=107),
    Run("U-ViT depth 12, ls, cosine", make=lambda: uvit(32, 12), scaling="ls", cosine=True, seed=108),
    Run("U-ViT width 64", make=lambda: uvit(64, 4), batch=32, seed=109),
    Run("UNet", make=unet, seed=110),
    Run("UNet, lr 2e-4, clipped", make=unet, lr=2e-4, clip=1.0, seed=111),
    Run("UNet, lr 3e-3, warm-up", make=unet, lr=3e-3, warmup=200, seed=112),
    Run("UNet, cs at norm", make=unet, scaling="cs:0.7", placement="norm", seed=113),
    Run("UNet, ls, batch 4", make=unet, scaling="ls", batch=4, seed=114),
    Run("UNet, v-prediction", make=unet, target="v_prediction", seed=115),
    Run("U-ViT, v-prediction, Adam", target="v_prediction", optimiser="adam", seed=116),
    Run("U-ViT, SGD", optimiser="sgd", lr=0.02, seed=117),
    Run("UNet, even grey", make=unet, flat=True, cosine=True, seed=118),
    Run("U-ViT, fp16", half=True, seed=119),
]

HEALTHY_HELD_OUT = [
    Run("U-ViT, batch 2", batch=2, lr=5e-4, seed=200),
    Run("U-ViT, lr 2e-3", lr=2e-3, seed=201),
    Run("U-ViT, ie", scaling="ie", seed=202),
    Run("U-ViT, ls-per-skip, warm-up", scaling="ls-per-skip", warmup=300, seed=203),
    Run("U-ViT, cs-reversed", scaling="cs-reversed:0.7", seed=204),
    Run("U-ViT, 500 steps, cosine", steps=500, cosine=True, lr=2e-3, seed=205),
    Run("U-ViT depth 16, width 16", make=lambda: uvit(16, 16), seed=206),
    Run("U-ViT, even grey", flat=True, seed=207),
    Run("U-ViT, SGD, lr 0.1", optimiser="sgd", lr=0.1, seed=208),
    Run("U-ViT, Adam, clipped at 0.1", optimiser="adam", clip=0.1, seed=209),
    Run("U-ViT, v-prediction, ls", target="v_prediction", scaling="ls", seed=210),
    Run("UNet, scalar at norm", make=unet, scaling="scalar", placement="norm", seed=211),
    Run("UNet, batch 2", make=unet, batch=2, lr=5e-4, seed=212),
    Run("UNet, width 32", make=lambda: unet(32), seed=213),
    Run("UNet, SGD", make=unet, optimiser="sgd", lr=0.05, seed=214),
    Run("UNet, 1/√2, cosine", make=unet, scaling="1/sqrt2", cosine=True, seed=215),
    Run("UNet, lr 2e-3, 500 steps", make=unet, lr=2e-3, steps=500, seed=216),
    Run("UNet, ls, norm, v-prediction", make=unet, scaling="ls", placement="norm", target="v_prediction", seed=217),
    Run("UNet, fp16, warm-up", make=unet, half=True, warmup=50, seed=218),
    Run("U-ViT, lr 1e-5", lr=1e-5, seed=219),
]  # fmt: skip


HEALTHY_NEW = [
    Run("UNet, ls, norm, batch 8", make=unet, scaling="ls", placement="norm", batch=8, seed=400),
    Run("UNet, ls, v-prediction, Adam", make=unet, scaling="ls", target="v_prediction", optimiser="adam", seed=401),
    Run("UNet, ls-per-skip, lr 2e-3", make=unet, scaling="ls-per-skip", lr=2e-3, warmup=50, seed=402),
    Run("UNet, ie, norm", make=unet, scaling="ie", placement="norm", seed=403),
    Run("UNet, ls-channel, clipped", make=unet, scaling="ls-channel", clip=0.5, seed=404),
    Run(
        "UNet, ls, norm, v-prediction, 500 steps",
        make=unet, scaling="ls", placement="norm", target="v_prediction", steps=500, seed=405,
    ),
    Run("UNet, ls, even grey", make=unet, scaling="ls", flat=True, seed=406),
    Run("UNet width 24, cs:0.5", make=lambda: unet(24), scaling="cs:0.5", seed=407),
    Run("UNet, Adam, batch 32", make=unet, optimiser="adam", batch=32, lr=5e-4, seed=408),
    Run("UNet, SGD 0.02, clipped", make=unet, optimiser="sgd", lr=0.02, clip=1.0, seed=409),
    Run("U-ViT, ls, lr 2e-3, cosine", scaling="ls", lr=2e-3, cosine=True, seed=410),
    Run("U-ViT, ls-channel", scaling="ls-channel", seed=411),
    Run("U-ViT, ls-per-skip, v-prediction", scaling="ls-per-skip", target="v_prediction", seed=412),
    Run("U-ViT depth 8, width 48, batch 8", make=lambda: uvit(48, 8), batch=8, seed=413),
    Run("U-ViT depth 10, scalar, Adam", make=lambda: uvit(32, 10), scaling="scalar", optimiser="adam", seed=414),
    Run("U-ViT, cs:0.9, clipped at 0.5", scaling="cs:0.9", clip=0.5, seed=415),
    Run("U-ViT, warm-up of 400, 500 steps", lr=2e-3, warmup=400, steps=500, seed=416),
    Run("U-ViT, fp16, ls", half=True, scaling="ls", seed=417),
    Run("U-ViT, even grey, v-prediction", flat=True, target="v_prediction", seed=418),
    Run("U-ViT, SGD 0.05, batch 4", optimiser="sgd", lr=0.05, batch=4, seed=419),
]  # fmt: skip

HEALTHY_LAST = [
    Run(
        f"{make.__name__}, {scaling}, {target}",
        make,
        scaling,
        lr=7e-4,
        batch=12,
        steps=400,
        target=target,
        seed=500 + i,
    )
    for i, (make, scaling, target) in enumerate(
        product((uvit, unet), ("none", "cs:0.8", "scalar", "ls", "ls-channel"), ("epsilon", "v_prediction"))
    )
]

SCAN = [
    Run("lr × 30 of 1e-5, U-ViT", lr=1e-5, seed=300, steps=600, fault=lr_times_30),
    Run("lr × 30 of 3e-5, U-ViT", lr=3e-5, seed=301, steps=600, fault=lr_times_30),
    Run("lr × 30 of 1e-4, U-ViT", lr=1e-4, seed=302, steps=600, fault=lr_times_30),
    Run("lr × 30 of 1e-5, UNet", make=unet, lr=1e-5, seed=303, steps=600, fault=lr_times_30),
    Run("lr × 30 of 1e-4, UNet", make=unet, lr=1e-4, seed=304, steps=600, fault=lr_times_30),
    Run("lr × 30 of 1e-4 at 400, UNet", make=unet, lr=1e-4, seed=305, steps=600, onset=400, fault=lr_times_30),
    Run("lr × 30 at 400, grey, U-ViT", flat=True, lr=3e-4, seed=306, steps=600, onset=400, fault=lr_times_30),
    Run("lr × 30 at 400, grey, UNet", make=unet, flat=True, seed=307, steps=600, onset=400, fault=lr_times_30),
    Run(
        "lr × 30 of 3e-4 at 400, U-ViT width 64, β2 0.999",
        make=lambda: uvit(64, 6), optimiser="adam", lr=3e-4, seed=308, steps=600, onset=400, fault=lr_times_30,
    ),
    Run(
        "lr × 30 of 3e-4 at 400, UNet, β2 0.999",
        make=unet, optimiser="adam", lr=3e-4, seed=309, steps=600, onset=400, fault=lr_times_30,
    ),
    Run(
        "lr × 30 of 2e-3 at 400, SGD, U-ViT",
        optimiser="sgd", lr=2e-3, seed=310, steps=600, onset=400, fault=lr_times_30,
    ),
    Run("lr × 30 of 5e-3, SGD, UNet", make=unet, optimiser="sgd", lr=5e-3, seed=311, steps=600, fault=lr_times_30),
]  # fmt: skip

_FAMILIES = {
    "UNet": (Run("", make=unet, steps=400), 1e-4, 1e-3),
    "UNet, Adam": (Run("", make=unet, optimiser="adam", steps=400), 1e-4, 1e-3),
    "UNet, SGD": (Run("", make=unet, optimiser="sgd", steps=400), 1e-3, 5e-3),
    "U-ViT, SGD": (Run("", optimiser="sgd", steps=400), 2e-3, 2e-2),
}
EDGE = [
    replace(run, name=f"lr × 30 of {lr:.2e}, {name}", lr=lr, seed=600 + k, fault=lr_times_30)
    for name, (run, low, high) in _FAMILIES.items()
    for k, lr in ((k, low * (high / low) ** (k / 12)) for k in range(13))
] + [
    Run(
        f"lr × 30 of {lr:.2e}, SGD, U-ViT, seed {seed}",
        optimiser="sgd",
        lr=lr,
        steps=500,
        seed=seed,
        fault=lr_times_30,
    )
    for lr, seed in ((2e-3 * 1.07 ** (i // 3), 620 + i) for i in range(24))
]


def recipe_run(name: str, *, width: int, depth: int, **how: Any) -> Run:
    """A U-ViT under the optimiser of its recipe."""
    return Run(name, make=partial(uvit, width, depth, identity_final_conv=True), optimiser="recipe", **how)


RECIPE = [
    recipe_run(
        f"lr × 30 of {lr:.1e}, U-ViT depth {depth}, β 0.99 0.999, seed {seed}",
        width=48,
        depth=depth,
        lr=lr,
        steps=400,
        seed=seed,
        fault=lr_times_30,
    )
    for depth, lr, seed in product((12, 16), (8e-4, 1.1e-3, 1.5e-3, 2e-3), (700, 701, 702))
]

HEALTHY_RECIPE = [
    recipe_run(
        f"U-ViT depth {depth}, {scaling}, lr {lr:.0e}, β 0.99 0.999",
        width=48,
        depth=depth,
        scaling=scaling,
        lr=lr,
        warmup=100,
        steps=500,
        seed=800 + i,
    )
    for i, (depth, lr, scaling) in enumerate(
        product((12, 16), (2e-4, 5e-4), ("none", "1/sqrt2", "cs:0.7", "ls", "skip-norm"))
    )
]

HEALTHY_RECIPE_NEW = [
    recipe_run(
        f"U-ViT depth {depth}, {scaling}, batch {batch}, β 0.99 0.999, new",
        width=40,
        depth=depth,
        scaling=scaling,
        lr=4e-4,
        batch=batch,
        warmup=150,
        steps=600,
        seed=900 + i,
    )
    for i, (depth, batch, scaling) in enumerate(
        product((10, 14), (8, 24), ("none", "uniform:0.5", "cs:0.8", "ls-channel", "scalar"))
    )
]

HEALTHY_RECIPE_LAST = [
    recipe_run(
        f"U-ViT depth {depth}, {scaling}, lr {lr:.0e}, β 0.99 0.999, last",
        width=32,
        depth=depth,
        scaling=scaling,
        lr=lr,
        batch=12,
        warmup=120,
        steps=600,
        seed=1000 + i,
    )
    for i, (depth, lr, scaling) in enumerate(
        product((8, 12), (3e-4, 6e-4), ("none", "1/sqrt2", "cs:0.6", "ls", "scalar"))
    )
]

HEALTHY_RECIPE_FINAL = [
    recipe_run(
        f"U-ViT depth {depth}, {scaling}, warm-up {warmup}, β 0.99 0.999, final",
        width=56,
        depth=depth,
        scaling=scaling,
        lr=5e-4,
        batch=20,
        warmup=warmup,
        steps=600,
        seed=1100 + i,
    )
    for i, (depth, warmup, scaling) in enumerate(
        product((6, 12), (60, 250), ("none", "cs:0.7", "ls", "skip-norm", "ie"))
    )
]

HEALTHY_RECIPE_AFTER = [
    recipe_run(
        f"U-ViT depth {depth}, {scaling}, {target}, β 0.99 0.999, after",
        width=44,
        depth=depth,
        scaling=scaling,
        lr=4.5e-4,
        batch=14,
        warmup=90,
        steps=600,
        target=target,
        seed=1200 + i,
    )
    for i, (depth, target, scaling) in enumerate(
        product((8, 14), ("epsilon", "v_prediction"), ("none", "1/sqrt2", "cs:0.7", "ls", "skip-norm"))
    )
]
