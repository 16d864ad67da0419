"""Reading a tensor on the host: the call that waits for a device, so it has a name."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor


def host_ints(tensor: Tensor) -> list[int]:
    """The integers of a one-dimensional tensor. Waits for the device."""
    return cast("list[int]", cast("Any", tensor).tolist())


def host_floats(tensor: Tensor) -> list[float]:
    """The numbers of a one-dimensional tensor. Waits for the device."""
    return cast("list[float]", cast("Any", tensor).tolist())


def host_rows(tensor: Tensor) -> list[list[int]]:
    """The rows of a two-dimensional tensor. Waits for the device."""
    return cast("list[list[int]]", cast("Any", tensor).tolist())
