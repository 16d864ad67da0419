"""Starts of an engine's process: how many, how often, and how long each may take.

What ends an engine while requests run is one of these (blame.py), and says nothing of the engine:
such ends only have their starts bounded by the minute. Ends of an engine that nothing ran in, and
starts that come to no working engine, are its own, and too many of them give it up.

The first load takes as long as it takes. Later ones have a limit, for a process that hangs while it
loads says nothing: three times the longest load so far, and twice as long after each that hung.
"""

from __future__ import annotations

import asyncio
from collections import deque
from time import monotonic

from outrider.server.port import NotReadyError

# More ends of its own in so long, and the engine is given up.
MOST_ENDS, ENDS_SECONDS = 5, 600.0
# More starts in so long wait, whatever they are for.
MOST_STARTS, STARTS_SECONDS = 6, 60.0
_PAUSE_SECONDS, _LOAD_RATIO = 0.1, 3.0
# Limits of a load after which a lost engine is overdue: one that hangs, the next try, and more.
_OVERDUE_LOADS = 4.0


class Restarts:
    """Of one engine. `least_seconds` is the least limit of a load."""

    def __init__(self, least_seconds: float) -> None:
        self._least_seconds = least_seconds
        self._starts, self._ends = deque[float](), deque[float]()
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

    @property
    def is_bounded(self) -> bool:
        """True if the next start waits, for there were as many in a minute as there may be."""
        return len(_since(self._starts, STARTS_SECONDS)) >= MOST_STARTS

    def lost(self, *, is_own: bool) -> None:
        """The engine has ended, while nothing ran in it if the end is its own."""
        self.num += 1
        self._lost_at = monotonic()
        if is_own:
            self._ends.append(self._lost_at)

    def failed(self) -> None:
        """A start came to no engine that works."""
        self._ends.append(monotonic())

    def hung(self) -> None:
        """A load was ended at its limit."""
        self._num_hung += 1

    def loaded(self, seconds: float) -> None:
        """The engine is there again."""
        self._longest_load = max(self._longest_load, seconds)
        self._num_hung, self._lost_at = 0, None

    async def pause(self) -> None:
        """At once the first time, later and later then. Raises NotReadyError after too many ends
        of the engine's own."""
        if len(_since(self._ends, ENDS_SECONDS)) > MOST_ENDS:
            raise NotReadyError("failed")
        starts = _since(self._starts, STARTS_SECONDS)
        if self.is_bounded:
            seconds = starts[-MOST_STARTS] + STARTS_SECONDS - monotonic()
        else:
            seconds = _PAUSE_SECONDS * 2 ** len(starts) if starts else 0.0
        await asyncio.sleep(seconds)
        starts.append(monotonic())

    @property
    def _limit(self) -> float:
        return max(self._least_seconds, _LOAD_RATIO * self._longest_load)


def _since(times: deque[float], seconds: float) -> deque[float]:
    """`times` without those that are longer ago."""
    while times and monotonic() - times[0] > seconds:
        times.popleft()
    return times
