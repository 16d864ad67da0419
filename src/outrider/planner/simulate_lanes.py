"""Lanes on an invented clock, that may have to share one memory.

A job that runs alone takes its own seconds. With m jobs at once each goes on at the speed

    1 / (1 + c (m - 1))

with the contention c: 0 where every lane has a device of its own, 1 where all of them read one
memory and each gets an equal share of its bandwidth. With c = 1 no arrangement of the same jobs is
faster than one after another: T_round >= sum of bytes / BW. In between is what jobs that want
different resources have, one of them the memory, another arithmetic.

What takes no time, such as looking a draft up, holds nobody up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from outrider.core.errors import ContractError

T = TypeVar("T")
# Ends that differ by rounding alone are one moment.
_SAME = 1e-12


@dataclass(slots=True)
class _Running(Generic[T]):
    """`ends` is right as long as it goes on with the same `slowdown`."""

    task: T
    seconds: float
    ends: float
    slowdown: float = 1.0


@dataclass(slots=True)
class SharedLanes(Generic[T]):
    """Who runs what, and until when. Moments that it is told never go back."""

    contention: float
    _running: dict[str, _Running[T]] = field(default_factory=dict[str, _Running[T]])

    def __post_init__(self) -> None:
        if not 0 <= self.contention <= 1:
            raise ContractError("contention lies between 0 and 1")

    @property
    def busy(self) -> Mapping[str, object]:
        """By lane."""
        return self._running

    @property
    def next_end(self) -> float:
        """The moment at which the first of the jobs that now run ends, if nothing else starts."""
        return min((one.ends for one in self._running.values()), default=math.inf)

    def start(self, lane: str, task: T, seconds: float, *, now: float) -> None:
        """`seconds` is what the job takes alone."""
        if lane in self._running:
            raise ContractError("the lane runs a job")
        self._running[lane] = _Running(task, seconds, now + seconds)
        self._share(now)

    def ended(self, now: float) -> list[T]:
        """The tasks that have ended by `now`, in the order in which they started."""
        until = now + _SAME * abs(now)
        lanes = [lane for lane, one in self._running.items() if one.ends <= until]
        done = [self._running.pop(lane).task for lane in lanes]
        if done:
            self._share(now)
        return done

    def stopped(self) -> list[T]:
        """What still ran, in the order in which it started; nothing runs any more."""
        left = [one.task for one in self._running.values()]
        self._running.clear()
        return left

    def _share(self, now: float) -> None:
        num_working = sum(one.seconds > 0 for one in self._running.values())
        slowdown = 1 + self.contention * max(num_working - 1, 0)
        for one in self._running.values():
            if one.slowdown != slowdown:
                one.ends = now + (one.ends - now) / one.slowdown * slowdown
                one.slowdown = slowdown
