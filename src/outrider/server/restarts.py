"""Limits for restarts of an engine's process: how many, how often, and how long each may take.

If an engine crashes while requests run, a request is considered the cause (blame.py). Such crashes
only limit the number of starts per minute. The engine itself is the cause if it crashes without
requests or does not start; after too many of these failures it is given up.

The first load has no time limit. Later ones have one, because a process that hangs while it loads
sends no report: three times the longest load so far, doubled after each load that hung.
"""

from __future__ import annotations

import asyncio
from collections import deque
from time import monotonic

from outrider.server.port import NotReadyError

# With more failures of its own within this time, the engine is given up.
MOST_ENDS, ENDS_SECONDS = 5, 600.0
# With more starts within this time, further starts wait, whatever their reason.
MOST_STARTS, STARTS_SECONDS = 6, 60.0
_PAUSE_SECONDS, _LOAD_RATIO = 0.1, 3.0
# An engine is overdue after this many time limits of a load: enough for a load that hangs and the
# next try.
_OVERDUE_LOADS = 4.0


class Restarts:
    """Starts and failures of one engine. `least_seconds` is the least time limit of a load."""

    def __init__(self, least_seconds: float) -> None:
        self._least_seconds = least_seconds
        self._starts, self._ends = deque[float](), deque[float]()
        self._longest_load, self._num_hung = 0.0, 0
        self._lost_at: float | None = None
        self.num = 0

    @property
    def load_seconds(self) -> float | None:
        """The time limit of the next load; None before the first load has ended."""
        return self._limit * 2**self._num_hung if self._longest_load else None

    @property
    def is_overdue(self) -> bool:
        """True if the engine is away for longer than a restart should take."""
        return self._lost_at is not None and (
            monotonic() - self._lost_at > _OVERDUE_LOADS * self._limit
        )

    @property
    def is_bounded(self) -> bool:
        """True if the next start must wait because there were too many within a minute."""
        return len(_since(self._starts, STARTS_SECONDS)) >= MOST_STARTS

    def lost(self, *, is_own: bool) -> None:
        """Note that the engine has ended. `is_own` means that no request ran in it."""
        self.num += 1
        self._lost_at = monotonic()
        if is_own:
            self._ends.append(self._lost_at)

    def failed(self) -> None:
        """Note that a start has failed."""
        self._ends.append(monotonic())

    def hung(self) -> None:
        """Note that a load was stopped at its time limit."""
        self._num_hung += 1

    def loaded(self, seconds: float) -> None:
        """Note that the engine has loaded."""
        self._longest_load = max(self._longest_load, seconds)
        self._num_hung, self._lost_at = 0, None

    async def pause(self) -> None:
        """Wait before a start: not at all the first time, then longer each time. Raises
        NotReadyError after too many failures of the engine itself."""
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
    """Drop the times that are more than `seconds` ago; return `times`."""
    while times and monotonic() - times[0] > seconds:
        times.popleft()
    return times
