"""A run as a diffusers pipeline folder: a stock DDIMPipeline around the averaged model."""

from __future__ import annotations

from pathlib import Path

from scalelong.backbones.uvit import UViT
from scalelong.diffusion.process import process_named
from scalelong.diffusion.sampling import scheduler_for
from scalelong.experiment import LoadedRun
from scalelong.skips.apply import scaling_of


def export(run: LoadedRun, out: Path, *, fold: bool = False) -> None:
    """Write the pipeline. `fold` moves a constant scaling into the weights first.

    A U-ViT needs `import scalelong` before `DiffusionPipeline.from_pretrained(out)`; a folded UNet needs nothing.
    """
    from diffusers import DDIMPipeline

    if run.config.data.condition != "none":
        raise ValueError("only unconditional runs can be exported so far; this one is class-conditional.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} already exists; choose another --out, or remove it first.")
    handle = scaling_of(run.model)
    if handle is not None and fold:
        handle.fold()
    elif handle is not None and not isinstance(run.model, UViT):
        raise ValueError(
            "a stock pipeline would run this UNet without its scaling; use --fold (for constants trained with "
            "model.placement=norm), or save the model alone and load it with scalelong.load."
        )
    pipeline = DDIMPipeline(run.model.cpu(), scheduler_for(process_named(run.config.process), "ddim"))
    pipeline.save_pretrained(out)
