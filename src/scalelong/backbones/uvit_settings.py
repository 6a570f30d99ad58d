"""What a U-ViT can be built from: its settings are typed by hand, and a wrong one fails far from here."""

from __future__ import annotations

import math

TIMESTEP_MAPS = ("identity", "continuous", "one-based")


def grid_of(sample_size: int | tuple[int, int], patch_size: int) -> tuple[int, int]:
    """How many patches an image has, down and across."""
    sides = tuple(sample_size) if isinstance(sample_size, (tuple, list)) else (sample_size, sample_size)
    if len(sides) != 2 or any(not isinstance(side, int) or side < 1 for side in (*sides, patch_size)):
        raise ValueError(
            f"sample_size is a whole number or (height, width), got {sample_size!r} with {patch_size=}."
        )
    height, width = sides
    if height % patch_size or width % patch_size:
        raise ValueError(
            f"sample_size is a multiple of patch_size, got sample_size={sample_size} and patch_size={patch_size}."
        )
    return height // patch_size, width // patch_size


def check_sizes(num_layers: int, hidden_size: int, num_heads: int, mlp_ratio: float) -> None:
    """Depth and widths."""
    if num_layers < 2 or num_layers % 2:
        raise ValueError(
            f"num_layers is even, so that each encoder block has its decoder block; got {num_layers}, "
            f"try {max(2, num_layers + num_layers % 2)}."
        )
    if hidden_size < 1:
        raise ValueError(f"hidden_size is at least 1, got {hidden_size}.")
    if num_heads < 1 or hidden_size % num_heads:
        raise ValueError(f"num_attention_heads divides hidden_size, got {num_heads} and {hidden_size}.")
    if isinstance(mlp_ratio, bool) or not isinstance(mlp_ratio, int | float) or not 0 < mlp_ratio < math.inf:
        raise ValueError(f"mlp_ratio is a positive number, got {mlp_ratio!r}.")


def check_conditions(num_classes: int | None, text_dim: int | None, timestep_map: str) -> None:
    """What the network is told besides the image."""
    if num_classes is not None and text_dim:
        raise ValueError(
            f"a U-ViT takes class labels or text, got num_class_embeds={num_classes} and "
            f"cross_attention_dim={text_dim}; leave one of them out."
        )
    if num_classes is not None and num_classes < 1:
        raise ValueError(f"num_class_embeds is at least 1, got {num_classes}; None leaves the class token out.")
    if timestep_map not in TIMESTEP_MAPS:
        raise ValueError(f"timestep_map is one of {', '.join(TIMESTEP_MAPS)}, got {timestep_map!r}.")


def check_switches(**switches: bool) -> None:
    """Any text is true, "false" as well."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} is true or false, got {value!r}.")
