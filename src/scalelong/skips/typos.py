"""The name that was meant, for errors about names that are not known."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def unknown(what: str, name: str, known: Iterable[str], such_as: Iterable[str] | None = None) -> str:
    """The sentence: what was given, the known name that is nearest to it, and those that there are.

    `such_as` is what is listed, where that is not all that is known.

    >>> unknown("scaling", "skipnorm", ["cs", "skip-norm"])
    "unknown scaling 'skipnorm'; did you mean skip-norm? The known ones are cs, skip-norm."
    """
    known = list(known)
    listed = ", ".join(known if such_as is None else such_as)
    return f"unknown {what} {name!r}; {meant(name, known)} known ones are {listed}."


def meant(name: str, known: Iterable[str]) -> str:
    """How a sentence that goes on with a list begins: with a question, where a name is near enough to ask."""
    near = get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]}? The" if near else "the"
