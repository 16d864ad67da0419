"""Time as an argument: whoever measures is given a clock, so a test can say what time it is.

Reading a tensor on the host: the call that waits for a device, so it has a name.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any, Protocol, cast

from torch import Tensor


class Clock(Protocol):
    """Seconds since some fixed moment; it never goes back."""

    def __call__(self) -> float: ...


HOST_CLOCK: Clock = perf_counter
# Whoever is timed may take the whole timeout once more for so many tokens that it must read first.
READ_PER_TIMEOUT = 128


def patience(timeout: float, num_new: int) -> float:
    """Seconds that an answer may take before which `num_new` tokens of text are read."""
    return timeout * (1 + num_new / READ_PER_TIMEOUT)


def host_ints(tensor: Tensor) -> list[int]:
    """The integers of a one-dimensional tensor. Waits for the device."""
    return cast("list[int]", cast("Any", tensor).tolist())


def host_floats(tensor: Tensor) -> list[float]:
    """The numbers of a one-dimensional tensor. Waits for the device."""
    return cast("list[float]", cast("Any", tensor).tolist())


def host_rows(tensor: Tensor) -> list[list[int]]:
    """The rows of a two-dimensional tensor. Waits for the device."""
    return cast("list[list[int]]", cast("Any", tensor).tolist())
