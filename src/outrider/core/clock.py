"""Time as an argument: whoever measures is given a clock, so a test can say what time it is."""

from __future__ import annotations

from time import perf_counter
from typing import Protocol


class Clock(Protocol):
    """Seconds since some fixed moment; it never goes back."""

    def __call__(self) -> float: ...


HOST_CLOCK: Clock = perf_counter
# Whoever is timed may take the whole timeout once more for so many tokens that it must read first.
READ_PER_TIMEOUT = 128


def patience(timeout: float, num_new: int) -> float:
    """Seconds that an answer may take before which `num_new` tokens of text are read."""
    return timeout * (1 + num_new / READ_PER_TIMEOUT)
