"""The closest valid name to what a user typed, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """One sentence naming the nearest of `known`, then all of them."""
    names = sorted(known)
    return nearest(name, names, f"Known: {', '.join(names)}.")


def nearest(name: str, known: Iterable[str], where: str) -> str:
    """A hint that names the nearest of `known`, if one is near, and then says `where` all are."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}? {where}" if close else where
