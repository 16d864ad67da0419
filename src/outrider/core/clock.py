"""Time as an argument: whoever measures is given a clock, so a test can say what time it is."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Protocol


class Clock(Protocol):
    """Seconds since some fixed moment; it never goes back."""

    def __call__(self) -> float: ...


HOST_CLOCK: Clock = perf_counter


@dataclass(slots=True)
class FakeClock:
    """Stands still until it is told to go on."""

    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, "a clock never goes back"
        self.seconds += seconds
