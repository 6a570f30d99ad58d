"""The skip table, and what it measures: coefficients as they are, and what a norm leaves of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalelong.skips.scalers import GatedScale, LearnedScale, NormScale, SkipScale
from scalelong.skips.sites import LongSkip

if TYPE_CHECKING:
    from scalelong.skips.handle import AppliedScaling


def summarise(handle: AppliedScaling, inputs: Sequence[Any], named_inputs: Mapping[str, Any]) -> str:
    """The text of `AppliedScaling.summary`."""
    skips, scales = handle.skips, handle.scales
    rows = [
        {
            "i": str(skip.index),
            "module": skip.name,
            "skip shape": skip.shape_text,
            "coefficient": _describe(scale),
        }
        for skip, scale in zip(skips, scales, strict=True)
    ]
    at_concat_before_norm = handle.placement == "concat" and any(skip.norm is not None for skip in skips)
    if at_concat_before_norm:
        for row, skip, scale in zip(rows, skips, scales, strict=True):
            row["undone by norm"] = f"{undone_share(skip):.0%}" if _is_one_number(scale) else "in part"
    if inputs or named_inputs:
        measured = measure(handle.model, skips, scales, inputs, named_inputs, at_concat_before_norm)
        for row, (coefficient, share_measured) in zip(rows, measured, strict=True):
            row["coefficient"] = coefficient
            if at_concat_before_norm:
                row["measured"] = "–" if share_measured is None else f"{share_measured:.0%}"
    title = (
        f"{handle.scaling} at {handle.placement} on {type(handle.model).__name__}: "
        f"{len(skips)} long skips, outermost first"
    )
    lines = [title, *format_table(rows)]
    if at_concat_before_norm and (advice := norm_advice(skips, scales)):
        lines.append(f"! {advice}")
    return "\n".join(lines)


def format_table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Rows of the same keys as aligned lines, the keys on top."""
    columns = {key: max(len(key), *(len(row[key]) for row in rows)) for key in rows[0]}
    lines = [{key: key for key in columns}, *rows]
    return ["  ".join(line[key].ljust(width) for key, width in columns.items()).rstrip() for line in lines]


def undone_share(skip: LongSkip) -> float:
    """The share of this skip's channels whose norm group holds skip channels alone, from widths and groups.

    There the norm divides out what a constant multiplied in. A LayerNorm is one group, with the main path in it.
    """
    if not isinstance(skip.norm, nn.GroupNorm):
        return 0.0
    total = skip.main_channels + skip.shape.channels
    group_size = total // skip.norm.num_groups
    first_pure_group = -(-skip.main_channels // group_size)
    return (total - first_pure_group * group_size) / skip.shape.channels


def undone_in_all(skips: Sequence[LongSkip]) -> float:
    """The same of all skips together: a wide one counts for more."""
    channels = [skip.shape.channels for skip in skips]
    return sum(undone_share(skip) * c for skip, c in zip(skips, channels, strict=True)) / sum(channels)


def measure(
    model: nn.Module,
    skips: Sequence[LongSkip],
    scales: Sequence[SkipScale],
    inputs: Sequence[Any],
    named_inputs: Mapping[str, Any],
    at_concat_before_norm: bool,
) -> list[tuple[str, float | None]]:
    """For each skip its coefficient in one run, as text, and how much of it the following norm undid."""
    entering: dict[int, Tensor] = {}
    with ExitStack() as stack:
        for skip in skips if at_concat_before_norm else ():
            assert skip.norm is not None

            def note(_: nn.Module, args: tuple[Any, ...], index: int = skip.index) -> None:
                entering[index] = args[0]

            stack.callback(skip.norm.register_forward_pre_hook(note).remove)
        coefficients = capture_coefficients(model, scales, inputs, named_inputs)
    result: list[tuple[str, float | None]] = []
    for skip, coefficient in zip(skips, coefficients, strict=True):
        undone = _undone(skip, entering[skip.index], coefficient) if skip.index in entering else None
        result.append((_describe_values(coefficient), undone))
    return result


def capture_coefficients(
    model: nn.Module, scales: Sequence[SkipScale], inputs: Sequence[Any], named_inputs: Mapping[str, Any]
) -> list[Tensor]:
    """Run the model once and return what each scale gave, in the shape in which it multiplies."""
    found: dict[int, Any] = {}
    with ExitStack() as stack:
        for index, scale in enumerate(scales):

            def note(_: nn.Module, args: Any, output: Any, index: int = index) -> None:
                found[index] = output

            stack.callback(scale.register_forward_hook(note).remove)
        stack.enter_context(torch.no_grad())
        stack.enter_context(_eval_mode(model))
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # a compiled graph calls no hooks
        model(*inputs, **named_inputs)
    for index, scale in enumerate(scales):
        if (number := scale.number()) is not None:  # it may act through weights, and then is never asked
            found[index] = torch.tensor(number)
        elif index not in found:
            raise RuntimeError(f"the run did not pass skip {index}: is its block skipped, or run elsewhere?")
    return [found[index].detach() for index in range(len(scales))]


@contextmanager
def _eval_mode(model: nn.Module) -> Any:
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in training.items():
            module.training = mode


def _undone(skip: LongSkip, entering: Tensor, coefficient: Tensor) -> float | None:
    """1 where the norm undoes the scale wholly, 0 where it comes through as c · norm(unscaled)."""
    dim = skip.shape.channel_dim
    sizes = [skip.main_channels, skip.shape.channels]
    main, scaled = entering.double().split(sizes, dim)
    c = coefficient.double()
    if (c == 1).all():
        return None
    raw = _normalise(skip.norm, torch.cat([main, scaled / c], dim)).split(sizes, dim)[1]
    got = _normalise(skip.norm, entering.double()).split(sizes, dim)[1]
    return 1 - ((got - raw).norm() / (c * raw - raw).norm()).item()


def _normalise(norm: nn.Module | None, x: Tensor) -> Tensor:
    """The norm without its learned gain and bias."""
    if isinstance(norm, nn.GroupNorm):
        return F.group_norm(x, norm.num_groups, eps=norm.eps)
    assert isinstance(norm, nn.LayerNorm)
    return F.layer_norm(x, norm.normalized_shape, eps=norm.eps)


def norm_advice(skips: Sequence[LongSkip], scales: Sequence[SkipScale], *, above: float = 0.0) -> str:
    """What to do where channels of a skip are multiplied by one number and a norm divides it out again; or by
    gates, of which it divides out what they have in common.

    Empty where that is so for no more than a share `above` of the channels.
    """
    by_size = any(isinstance(scale, NormScale) for scale in scales)
    gated = any(isinstance(scale, GatedScale) for scale in scales)
    share = undone_in_all(skips)
    if share <= above or not (by_size or gated or any(scale.number() not in (None, 1) for scale in scales)):
        return ""
    what, instead = "a constant", "placement='norm' scales behind the norm"
    if gated:
        what = "what the gates of a group have in common, most of what they do at first"
    if by_size:
        what, instead = "what skip-norm does to an image", "take another scaling with placement='norm'"
    return (
        f"{share:.0%} of the skip channels sit in GroupNorm groups of their own, where the norm undoes "
        f"{what} (only the shortcut still sees it); {instead}."
    )


def _is_one_number(scale: SkipScale) -> bool:
    """For all channels of an image, which a norm of some of them can divide out; a gate has one for each."""
    return scale.number() is not None or isinstance(scale, NormScale)


def _describe(scale: SkipScale) -> str:
    if isinstance(scale, NormScale):
        return f"{scale.gain.item():.6g} / RMS" if not scale.gain.is_meta else f"{scale.init:g} / RMS"
    if (number := scale.number()) is None:
        return "gate"
    return f"{number:.6g} (learned)" if isinstance(scale, LearnedScale) else f"{number:.6g}"


def _describe_values(coefficient: Tensor) -> str:
    if coefficient.dim() == 0:
        return f"{coefficient.item():.6g}"
    return f"{coefficient.mean().item():.4f} ± {coefficient.std().item():.4f}"
