"""Training steps side by side: ours captured, compiled and eager, and any reference, in one run.

    python -m benchmarks.throughput cifar10-uvit-s --reference PATH/TO/ScaleLong --batch 128 --batch 64
    python -m benchmarks.throughput cifar10-unet
    python -m benchmarks.throughput cifar10-uvit-xs --only eager --precisions bf16,fp32 --batch 32    # on a CPU

A step is all of it: images from the store, noise, forward, backward, guard, AdamW, two averages. References do
forward, backward, AdamW and one average on a batch that is already there.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
import typer

from benchmarks.measure import RESULTS, Contender, race, table, write
from scalelong import experiment
from scalelong.backbones.flops import training_flops_per_image
from scalelong.config import DataConfig, ModelConfig, RunConfig, TrainConfig, with_overrides
from scalelong.data.prepare import prepare
from scalelong.data.sources import Item, Source
from scalelong.data.store import Store
from scalelong.presets import RUN_PRESETS, model_preset, run_preset
from scalelong.training.step import Stepper


def main(
    preset: Annotated[str, typer.Argument(help="A recipe of scalelong train, or a network's preset.")] = (
        "cifar10-uvit-s"
    ),
    batch: Annotated[list[int] | None, typer.Option(help="Images per step; may be given often.")] = None,
    reference: Annotated[Path | None, typer.Option(help="A checkout of the authors' ScaleLong.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C")] = None,
    rounds: Annotated[int, typer.Option(help="How often each contender has its turn.")] = 7,
    steps: Annotated[int, typer.Option(help="Steps per turn.")] = 20,
    only: Annotated[str, typer.Option(help="Which of ours: captured, compiled, eager; by commas.")] = "",
    scalings: Annotated[str, typer.Option(help="Which scalings, by commas.")] = "none,cs:0.7,ls",
    precisions: Annotated[str, typer.Option(help="Which of bf16, fp32, by commas; by default the recipe's.")] = "",
    out: Annotated[Path, typer.Option(help="Where the result file goes.")] = RESULTS,
) -> None:
    """Time training steps side by side, print a table and write a dated result file."""
    config = with_overrides(recipe(preset), settings or [])
    executions = only.split(",") if only else ["captured", "compiled", "eager"][0 if _on_gpu() else 1 :]
    with tempfile.TemporaryDirectory() as folder:
        store = random_store(Path(folder) / "store", config)
        contenders: list[Contender] = []
        for size in batch or [config.train.batch_size]:
            for precision in precisions.split(",") if precisions else [config.train.precision]:
                changed = with_overrides(config, [f"train.precision={precision}"])
                contenders += ours(changed, store, size, executions, scalings.split(","))
            if reference is not None:
                contenders += authors(reference, config, size)
            if preset.endswith("unet"):
                contenders.append(plain(config, store, size))
        rows = race(contenders, rounds=rounds, steps=steps)
    typer.echo(table(rows))
    typer.echo(f"written: {write(rows, f'throughput-{preset}', out)}")


def recipe(preset: str) -> RunConfig:
    """The preset's own, or a plain one around its network. Random images of their shape stand in for latents."""
    if preset in RUN_PRESETS:
        own = with_overrides(run_preset(preset), ["data.space=pixels"])
        if own.data.condition == "text":
            raise typer.BadParameter(f"nets that read text are not timed here, got {preset}; take another preset.")
        return own
    condition = "class" if "num_class_embeds" in model_preset(preset).config else "none"
    return RunConfig(
        model=ModelConfig(preset=preset),
        data=DataConfig(condition=condition, label_dropout=0.0),
        train=TrainConfig(steps=1, batch_size=128, lr=2e-4),
    )


def ours(
    config: RunConfig, store: Store, batch: int, executions: list[str], scalings: list[str]
) -> Iterator[Contender]:
    """Each scaling in the first way of running, and the unscaled net in the others."""
    for execution in executions:
        for scaling in scalings if execution == executions[0] else ("none",):
            changed = with_overrides(
                config,
                [f"model.scaling={scaling}", f"train.batch_size={batch}", f"train.execution={execution}"],
            )
            fitted = experiment.fitted_to(changed, store)
            precision = "" if fitted.train.precision == "auto" else f", {fitted.train.precision}"
            step = partial(step_of, fitted, store)
            yield Contender(f"scalelong, {execution}{precision}", scaling, batch, flops(fitted), step)


def step_of(config: RunConfig, store: Store) -> Callable[[], None]:
    """A fresh run's step, and the host's glance at every tenth; what signals cost is benchmarks.signals' matter."""
    stepper = stepper_for(config, store)
    number = count()

    def step() -> None:
        n = next(number)
        stepper.update(n)
        if n % 10 == 0:  # where the training loop does, too
            stepper.glance()

    return step


def stepper_for(config: RunConfig, store: Store) -> Stepper:
    """A fresh run's stepper, as `experiment.train` makes it."""
    torch._dynamo.config.recompile_limit = 64  # contenders share the model's code, each compiled for its own
    device = experiment.default_device()
    model = experiment.build_model(config, device).train()
    loader = experiment.loader_for(config, store, device)
    return Stepper(model, experiment.process_of(config), loader, config.train)


def authors(checkout: Path, config: RunConfig, batch: int) -> Iterator[Contender]:
    """The published U-ViT with its own scalings, in half precision by autocast, eager, as its recipe has it."""
    c = experiment.build_model(config, "meta").config
    for scaling, mode in (("none", 0), ("cs:0.7", 2), ("ls", 3)):

        def build(mode: int = mode) -> Any:
            sys.path.insert(0, str(checkout))
            try:
                uvit = importlib.import_module("libs.uvit")
            finally:
                sys.path.remove(str(checkout))
            return uvit.UViT(
                img_size=c.sample_size, patch_size=c.patch_size, in_chans=c.in_channels, embed_dim=c.hidden_size,
                depth=c.num_layers, num_heads=c.num_attention_heads, scalelong=mode, kappa=0.7,
            )  # fmt: skip

        step = partial(_plain_step, build, config, batch, lambda model, x, t: model(x, t))
        yield Contender(f"authors' code, {_half()} eager", scaling, batch, flops(config), step)


def plain(config: RunConfig, store: Store, batch: int) -> Contender:
    """diffusers' own model as it comes: half precision by autocast, eager."""
    fitted = experiment.fitted_to(config, store)
    build = partial(experiment.build_model, fitted)
    step = partial(_plain_step, build, fitted, batch, lambda model, x, t: model(x, t).sample)
    return Contender(f"diffusers, {_half()} eager", "none", batch, flops(fitted), step)


def _plain_step(build: Any, config: RunConfig, batch: int, call: Any) -> Callable[[], None]:
    device = experiment.default_device()
    model = build().to(device).train()
    average = [p.detach().clone() for p in model.parameters()]
    optimiser = torch.optim.AdamW(model.parameters(), lr=config.train.lr, betas=config.train.betas)
    scaler = torch.amp.GradScaler(device)
    size = config.model.changes.get("sample_size", 32)
    x = torch.randn(batch, config.model.changes.get("in_channels", 3), size, size, device=device)
    noise, t = torch.randn_like(x), torch.rand(batch, device=device) * 999
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[_half()]

    def step() -> None:
        optimiser.zero_grad()
        with torch.autocast(device, dtype):
            loss = F.mse_loss(call(model, x, t).float(), noise)
        scaler.scale(loss).backward()
        scaler.step(optimiser)
        scaler.update()
        with torch.no_grad():
            torch._foreach_lerp_(average, list(model.parameters()), 1e-4)

    return step


def flops(config: RunConfig) -> float:
    """Per image trained."""
    changes = config.model.changes
    size, channels = changes.get("sample_size", 32), changes.get("in_channels", 3)
    unscaled = with_overrides(config, ["model.scaling=none", "train.checkpoint_activations=false"])
    labels = {"class_labels": lambda: torch.zeros(1, dtype=torch.int64)} if config.data.condition == "class" else {}
    return training_flops_per_image(partial(experiment.build_model, unscaled, "meta"), channels, size, **labels)


def random_store(folder: Path, config: RunConfig, images: int = 10_000) -> Store:
    """Images of noise: what is in them does not change how long a step takes, as long as it is not constant."""
    model = experiment.build_model(config, "meta").config  # type: ignore[union-attr]
    rng = np.random.default_rng(0)
    shape = (images if _on_gpu() else 64, model.sample_size, model.sample_size, model.in_channels)  # type: ignore[union-attr]
    pixels = rng.integers(0, 256, shape, dtype=np.uint8)
    classes = list(map(str, range(model.num_class_embeds))) if model.num_class_embeds else None  # type: ignore[union-attr]
    label = lambda i: i % len(classes) if classes else None  # noqa: E731
    items = lambda: iter(Item(str(i), image, label(i)) for i, image in enumerate(pixels))  # noqa: E731
    return prepare(Source("random images", len(pixels), classes, items), folder)


def _half() -> str:
    """What references compute in: a CPU has no fast fp16."""
    return "fp16" if _on_gpu() else "bf16"


def _on_gpu() -> bool:
    return torch.cuda.is_available()


if __name__ == "__main__":
    typer.run(main)
