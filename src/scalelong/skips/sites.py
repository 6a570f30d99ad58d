"""A long skip as the rest of `skips` sees it, and what an adapter must know about a family of models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

Layout = Literal["nchw", "tokens"]
PLACEMENTS = ("concat", "norm")


def check_placement_name(placement: str) -> None:
    """Refuse what is no placement at all; whether a model has it is for its adapter to say."""
    if placement not in PLACEMENTS:
        raise ValueError(f"placement is one of {', '.join(map(repr, PLACEMENTS))}, got {placement!r}.")


class UnsupportedModelError(ValueError):
    """The model, or the place asked for in it, is not one that skip scaling can be attached to."""


@dataclass(frozen=True)
class SkipShape:
    """The part of a skip's shape that its gate depends on."""

    layout: Layout
    channels: int
    tokens: int | None = None

    def gate_width(self, over: str) -> int:
        """How many coefficients a gate gives this skip: its channels, or its tokens in the paper's U-ViT."""
        if self.layout == "nchw" or over == "channel":
            return self.channels
        if self.tokens is None:
            raise ValueError(
                "a gate over tokens is built for one token count, and none is known for this skip; "
                "give the token count, or use 'ls-channel', which works at any resolution."
            )
        return self.tokens

    @property
    def channel_dim(self) -> int:
        """The dimension along which the skip is concatenated to the main path."""
        return 1 if self.layout == "nchw" else -1


@dataclass(frozen=True)
class LongSkip:
    """One long skip, named after the block in which it meets the main path. Index 0 is the outermost."""

    index: int
    name: str
    block: Any = field(repr=False)  # the module that merges skip and main path, and owns this skip's scale
    shape: SkipShape
    main_channels: int
    pixels: tuple[int, int] | None = None  # height and width in a conv net, where the config gives them
    norm: nn.Module | None = field(default=None, repr=False)  # sees the concatenation first, where there is one

    def __str__(self) -> str:
        return f"skip {self.index} at {self.name}: {self.shape_text}"

    @property
    def shape_text(self) -> str:
        """Tokens × channels, or channels × height × width; `?` where the model's config does not say."""
        if self.shape.layout == "tokens":
            sizes: list[Any] = [self.shape.tokens, self.shape.channels]
        else:
            sizes = [self.shape.channels, *(self.pixels or (None, None))]
        return "×".join("?" if size is None else str(size) for size in sizes)


class Adapter(ABC):
    """All that is known about one family of models. Stateless: everything that lasts lives in the model."""

    placements: tuple[str, ...] = PLACEMENTS

    @abstractmethod
    def find(self, model: Any) -> list[LongSkip]:
        """The model's long skips, outermost first, or `UnsupportedModelError` with what was found instead."""

    def check_placement(self, skips: Sequence[LongSkip], placement: str) -> None:  # noqa: B027 - most have nothing to check
        """Refuse a placement that these skips do not have, before anything is changed."""

    @abstractmethod
    def attach(self, model: Any, skips: Sequence[LongSkip], placement: str) -> list[RemovableHandle]:
        """Make the model multiply its skips by their blocks' `skip_scale`; called when those are in place."""

    @abstractmethod
    def merge_weights(self, skip: LongSkip, placement: str) -> list[Tensor]:
        """Views of the weights that read this skip and nothing else.

        Multiplying them by c is then exactly the same as multiplying the skip by c. Empty where a
        normalisation stands between the two.
        """

    @abstractmethod
    def merge_inputs(
        self, skip: LongSkip, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """From a call of the merging block: the main path, and the skip as it meets it."""

    def record(self, model: Any, entry: Mapping[str, Any] | None) -> None:
        """Write what is attached into the model's config, or clear it, so that `save_pretrained` keeps it."""
        from diffusers.configuration_utils import FrozenDict

        config = {key: value for key, value in model.config.items() if key != CONFIG_KEY}
        model._internal_dict = FrozenDict(config | ({CONFIG_KEY: dict(entry)} if entry else {}))

    def recorded(self, model: Any) -> Mapping[str, Any] | None:
        """What `record` wrote."""
        entry: Mapping[str, Any] | None = model.config.get(CONFIG_KEY)
        return entry


CONFIG_KEY = "scalelong"
