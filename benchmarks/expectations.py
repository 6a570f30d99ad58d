"""What each recipe needs of memory and time, into docs/scaling-out.md: `python -m benchmarks.expectations`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from scalelong import experiment
from scalelong.cli.plan import published_data
from scalelong.config import RunConfig
from scalelong.costs import EFFICIENCY, Costs, costs_of
from scalelong.presets import RUN_PRESETS, model_preset, run_preset

PAGE = Path(__file__).parents[1] / "docs" / "scaling-out.md"
BEGIN, END = "<!-- expectations: begin -->", "<!-- expectations: end -->"
GPUS = 8
TFLOPS = 770  # bf16 matrix products on an H200, as the benchmarks measure them
HEADER = (
    "| recipe | parameters | GFLOP per image | TFLOP per step | weights, gradients, Adam, averages | activations "
    "of a GPU of 8 | checkpointed | GPU-hours |"
)


def recipes() -> list[str]:
    """All that were published with data of their own."""
    return [name for name in RUN_PRESETS if published_data(name) is not None]


def config_of(name: str) -> RunConfig:
    """A recipe on its data, in bf16."""
    data = published_data(name)
    assert data is not None
    config = experiment.fitted_to(run_preset(name), data)
    return replace(config, train=replace(config.train, precision="bf16"))


def gpu_hours(name: str, config: RunConfig, costs: Costs) -> float:
    """All steps of the recipe at the assumed rate."""
    rate = TFLOPS * 1e12 * EFFICIENCY[model_preset(name).backbone]
    return config.train.steps * costs.flops_per_step / rate / 3600


def row(name: str) -> str:
    """A recipe's line."""
    config = config_of(name)
    costs = costs_of(config, processes=GPUS)
    state, plain, again = (
        f"{b / 2**30:.1f} GiB" for b in (costs.state, costs.activations, costs.activations_checkpointed)
    )
    return (
        f"| `{name}` | {costs.parameters:,} | {costs.flops_per_image / 1e9:,.1f} "
        f"| {costs.flops_per_step / 1e12:,.1f} | {state} | {plain} for {costs.images_at_once} images | {again} "
        f"| {gpu_hours(name, config, costs):,.1f} |"
    )


def section() -> str:
    """The table, with what it assumes."""
    rates = f"{EFFICIENCY['uvit']:.0%} of {TFLOPS} TFLOP/s for U-ViTs and {EFFICIENCY['unet']:.0%} for UNets"
    note = (
        f"Computed from FLOP and byte counts, not measured: bf16, the whole batch on {GPUS} GPUs, no accumulation, "
        f"eager steps; hours of one GPU at {rates}."
    )
    return "\n".join([note, "", HEADER, "|---" * 8 + "|", *(row(name) for name in recipes())])


def updated(text: str) -> str:
    """The page with the section in place."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{section()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
