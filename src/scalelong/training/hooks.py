"""Hooks that stay on a model for a whole training, and that its copies and pickles must not take along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Unkept:
    """A hook; in a deep copy (an average of the weights, say) or a pickle of the model it does nothing."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> None:
        """As torch calls a hook."""
        self.function(*args)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return do_nothing

    def __reduce__(self) -> Any:
        return _make_nothing, ()


def do_nothing(*args: Any) -> None:
    """In the place of a hook that was not taken along."""


def _make_nothing() -> Callable[..., None]:
    return do_nothing
