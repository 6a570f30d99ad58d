"""Scale the long skip connections of a diffusion UNet or U-ViT, for stabler training.

    scaling = scalelong.apply(unet, "cs:0.7")
    print(scaling.summary())

Names are imported when they are first used (PEP 562), so `import scalelong` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from scalelong.version import __version__

if TYPE_CHECKING:
    from scalelong.backbones.build import build
    from scalelong.backbones.uvit import UViT
    from scalelong.export import load_pipeline
    from scalelong.saving import load
    from scalelong.skips.apply import apply, find_skips, scaling_of
    from scalelong.skips.scalers import SkipScales
    from scalelong.skips.spec import CS, IE, LS, LearnedScalar, Uniform, parse_scaling
    from scalelong.stability.monitor import StabilityMonitor

_HOME = {
    "apply": "scalelong.skips.apply",
    "find_skips": "scalelong.skips.apply",
    "scaling_of": "scalelong.skips.apply",
    "SkipScales": "scalelong.skips.scalers",
    "Uniform": "scalelong.skips.spec",
    "CS": "scalelong.skips.spec",
    "LS": "scalelong.skips.spec",
    "LearnedScalar": "scalelong.skips.spec",
    "IE": "scalelong.skips.spec",
    "parse_scaling": "scalelong.skips.spec",
    "UViT": "scalelong.backbones.uvit",
    "build": "scalelong.backbones.build",
    "load": "scalelong.saving",
    "load_pipeline": "scalelong.export",
    "StabilityMonitor": "scalelong.stability.monitor",
    # Not ours: diffusers looks for its own base class in the module that a pipeline folder names.
    "ModelMixin": "diffusers",
}

__all__ = [
    "CS",
    "IE",
    "LS",
    "LearnedScalar",
    "SkipScales",
    "StabilityMonitor",
    "UViT",
    "Uniform",
    "__version__",
    "apply",
    "build",
    "find_skips",
    "load",
    "load_pipeline",
    "parse_scaling",
    "scaling_of",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'scalelong' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
