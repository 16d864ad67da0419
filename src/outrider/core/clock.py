"""The host: time as an argument, and tensors read on it.

Code that measures gets a clock, so a test can set the time. Reading a tensor waits for the device.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from torch import Tensor


class Clock(Protocol):
    """Seconds since some fixed moment; it never goes back."""

    def __call__(self) -> float: ...


HOST_CLOCK: Clock = perf_counter
# A timed call may take one more timeout for each so many tokens that it must read first.
READ_PER_TIMEOUT = 128


def patience(timeout: float, num_new: int) -> float:
    """Seconds that an answer may take if `num_new` tokens of text are read before it."""
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
