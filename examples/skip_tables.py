"""Every scaling on a diffusers UNet and on U-ViT-S/2: the skip table, then one forward and backward pass.

Needs no GPU and no download. `--quick` takes small nets (the tests do).
"""

import argparse
import time
import warnings

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

import scalelong
from scalelong.skips import AppliedScaling

SCALINGS = (
    "none",
    "1/sqrt2",
    "uniform:0.5",
    "cs:0.7",
    "cs-reversed:0.7",
    "ls",
    "ls-per-skip",
    "ls-channel",
    "scalar",
    "ie",
)
SMALL_UVIT = {"hidden_size": 64, "num_attention_heads": 4}
SMALL_UNET = {"block_out_channels": (32, 32, 32, 32), "attention_head_dim": 32}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small nets, for a look in seconds")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*GroupNorm groups")  # the table says the same
    nets = {
        "diffusers UNet2DModel, the DDPM net of CIFAR-10": ("cifar10-unet", SMALL_UNET if args.quick else {}),
        "U-ViT-S/2": ("cifar10-uvit-s", SMALL_UVIT if args.quick else {}),
    }
    console = Console()
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    results = []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(nets) * len(SCALINGS))
        for title, (preset, changes) in nets.items():
            console.rule(title)
            results.append(Table("scaling", "parameters", "new", "loss", "gradient norm", "seconds", title=preset))
            for spec in SCALINGS:
                progress.update(task, description=f"{preset} {spec}")
                torch.manual_seed(args.seed)
                model = scalelong.build(preset, **changes)
                scaling = scalelong.apply(model, spec)
                torch.manual_seed(args.seed)  # the same images and noise for all, whatever the gates drew
                images, timesteps = torch.randn(2, 3, 32, 32), torch.tensor([10, 900])
                console.print(scaling.summary(images, timesteps), highlight=False)
                console.print()
                results[-1].add_row(spec, *one_step(model, scaling, images, timesteps))
                progress.advance(task)
    for table in results:
        console.print(table)
    console.print(
        "Next: scalelong inspect PRESET --scaling SPEC, or the five lines of README.md on your own model."
    )


def one_step(model: nn.Module, scaling: AppliedScaling, images: torch.Tensor, timesteps: torch.Tensor) -> list[str]:
    start = time.perf_counter()
    loss = (model(images, timesteps).sample - torch.randn_like(images)).square().mean()
    loss.backward()
    seconds = time.perf_counter() - start
    gradient = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    new = sum(p.numel() for p in scaling.parameters())
    total = sum(p.numel() for p in model.parameters())
    return [f"{total:,}", f"{new:,}", f"{loss.item():.4f}", f"{gradient.item():.3f}", f"{seconds:.1f}"]


if __name__ == "__main__":
    main()
