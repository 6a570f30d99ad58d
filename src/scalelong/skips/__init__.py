"""The method: scale the long skip connections of a network. Needs torch alone."""

from scalelong.skips.apply import apply, find_skips, scaling_of
from scalelong.skips.handle import AppliedScaling
from scalelong.skips.scalers import SkipScales
from scalelong.skips.sites import LongSkip, UnsupportedModelError
from scalelong.skips.spec import CS, IE, LS, LearnedScalar, NoScaling, Scaling, SkipNorm, Uniform, parse_scaling

__all__ = [
    "CS",
    "IE",
    "LS",
    "AppliedScaling",
    "LearnedScalar",
    "LongSkip",
    "NoScaling",
    "Scaling",
    "SkipNorm",
    "SkipScales",
    "Uniform",
    "UnsupportedModelError",
    "apply",
    "find_skips",
    "parse_scaling",
    "scaling_of",
]
