"""Which waiting requests may start: first come, first served, as memory and batch allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be in flight at once."""

    num_sequences: int
    num_tokens: int


def num_admissible(waiting: Sequence[int], running: Sequence[int], limits: Limits) -> int:
    """How many of `waiting`, in order, fit beside `running`.

    Both list the arena tokens that each sequence may come to hold. Reserving the most a sequence
    can need means that none is ever stopped half-way for want of pages.
    """
    room = limits.num_tokens - sum(running)
    places = limits.num_sequences - len(running)
    count = 0
    for need in waiting[: max(places, 0)]:
        room -= need
        if room < 0:
            break
        count += 1
    return count
