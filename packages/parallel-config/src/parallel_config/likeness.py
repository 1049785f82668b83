"""How alike two names are written: what a misspelt key or option was probably meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def likeness(name: str, other: str) -> float:
    """From 0 (nothing in common) to 1 (the same but for case)."""
    return difflib.SequenceMatcher(None, other.lower(), name.lower()).ratio()


def most_alike(name: str, known: Iterable[str], *, at_least: float) -> str | None:
    """The known name most like `name`, if it is alike enough (`at_least` 1.0: only the same)."""
    folded = {choice.lower(): choice for choice in sorted(known)}
    close = difflib.get_close_matches(name.lower(), list(folded), n=1, cutoff=at_least)
    return folded[close[0]] if close else None
