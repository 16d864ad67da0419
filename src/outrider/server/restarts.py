"""Starts of an engine's process: how many in a row, and how long each may take.

The first load takes as long as it takes. Later ones have a limit, for a process that hangs while it
loads says nothing: three times the longest load so far, and twice as long after each that hung.
"""

from __future__ import annotations

import asyncio
from collections import deque
from time import monotonic

from outrider.server.port import NotReadyError

# So many starts in so long, and the engine is given up.
MOST_STARTS = 5
STARTS_SECONDS = 600.0
_LOAD_RATIO = 3.0
# Limits of a load after which a lost engine is overdue: one that hangs, the next try, and more.
_OVERDUE_LOADS = 4.0


class Restarts:
    """Of one engine. `least_seconds` is the least limit of a load."""

    def __init__(self, least_seconds: float) -> None:
        self._least_seconds = least_seconds
        self._starts: deque[float] = deque()
        self._longest_load, self._num_hung = 0.0, 0
        self._lost_at: float | None = None
        self.num = 0

    @property
    def load_seconds(self) -> float | None:
        """The limit of the next load; None before any has come to its end."""
        return self._limit * 2**self._num_hung if self._longest_load else None

    @property
    def is_overdue(self) -> bool:
        """Whether the engine is away for longer than starting it again should take."""
        return self._lost_at is not None and (
            monotonic() - self._lost_at > _OVERDUE_LOADS * self._limit
        )

    def lost(self) -> None:
        """The engine has ended."""
        self.num += 1
        self._lost_at = monotonic()

    def hung(self) -> None:
        """A load was ended at its limit."""
        self._num_hung += 1

    def loaded(self, seconds: float) -> None:
        """The engine is there again."""
        self._longest_load = max(self._longest_load, seconds)
        self._num_hung, self._lost_at = 0, None

    def forgive(self) -> None:
        """Drop the two ends that a request caused which is kept out now: they say nothing of the
        engine, and requests that end it must not use up its starts."""
        for _ in range(min(2, len(self._starts))):
            self._starts.pop()

    async def pause(self) -> None:
        """At once the first time, later and later then. Raises NotReadyError after too many."""
        now = monotonic()
        while self._starts and now - self._starts[0] > STARTS_SECONDS:
            self._starts.popleft()
        if len(self._starts) >= MOST_STARTS:
            raise NotReadyError("failed")
        await asyncio.sleep(0 if not self._starts else 0.1 * 2 ** len(self._starts))
        self._starts.append(now)

    @property
    def _limit(self) -> float:
        return max(self._least_seconds, _LOAD_RATIO * self._longest_load)
