"""A linear's weight in the form its kernel reads."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """Made by a `pack` and read by the `linear` chosen with it, by nobody else.

    `pointer` is the address of `descriptor`, which tells the native kernel of `data`. `tile` is the
    number of rows that one call of the reference takes; None is all of them. `scales` are those of
    quantised weights that are not within `data`. `call` is the address of the native function that
    multiplies by it, 0 if there is none.
    """

    num_out: int
    num_in: int
    data: Tensor
    pointer: int = 0
    descriptor: ctypes.Structure | None = None
    tile: int | None = None
    scales: Tensor | None = None
    call: int = 0

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)
