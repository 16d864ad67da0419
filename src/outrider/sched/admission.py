"""Which waiting requests may start: first come, first served, as memory and batch allow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be in flight at once: `num_sequences` of them, in `num_tokens` of the arena.

    A round may stage `spare` tokens beside those that a sequence has, and `beyond` past what it may
    finally keep, if that is less. A sequence counts for what it has and for the share `reserve` of
    what it may still emit, in whole pages. With a share of 1 none is ever stopped half-way for want
    of pages; with less more run at once, and some may have to be pre-empted. `max_waiting` requests
    may wait.
    """

    num_sequences: int
    num_tokens: int
    page_size: int = 1
    spare: int = 0
    reserve: float = 1.0
    max_waiting: int = 1_000_000
    beyond: int | None = None

    def expected(self, num_tokens: int, num_left: int) -> int:
        """Arena tokens that a sequence with so many, which may emit `num_left` more, counts for."""
        tokens = num_tokens + math.ceil(num_left * self.reserve) + self.spare
        return min(self.most(num_tokens + num_left), self._whole_pages(tokens))

    def most(self, num_tokens: int) -> int:
        """Arena tokens, in whole pages, that a sequence which may keep `num_tokens` ever holds."""
        return self._whole_pages(num_tokens + self.past_end)

    @property
    def past_end(self) -> int:
        """Tokens that a round may stage past the last that is kept."""
        return self.spare if self.beyond is None else min(self.spare, self.beyond)

    def _whole_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size) * self.page_size


def num_admissible(waiting: Sequence[int], running: Sequence[int], limits: Limits) -> int:
    """How many of `waiting`, in order, fit beside `running`: arena tokens that each counts for."""
    room = limits.num_tokens - sum(running)
    places = limits.num_sequences - len(running)
    count = 0
    for need in waiting[: max(places, 0)]:
        room -= need
        if room < 0:
            break
        count += 1
    return count
