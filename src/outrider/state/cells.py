"""Cells of recurrent memory: a fixed number at most, counted holders, written once and then shared.

On a host a cell is made when it is first needed and never given back, since memory that nobody used
costs nothing there. On a device all are made at once, before weights fill it. A cell that several
hold is never written: whoever goes on from it writes another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import RLock
from typing import Generic, TypeVar

from outrider.core.errors import CapacityError, ContractError

Cell = TypeVar("Cell")


class CellPool(Generic[Cell]):
    """Numbered cells and how many hold each of them."""

    def __init__(self, make: Callable[[], Cell], capacity: int, *, at_once: bool = False) -> None:
        self._make = make
        self.capacity = capacity
        self.cells: list[Cell] = []
        self._holders: list[int] = []
        self._free: list[int] = []
        self._lock = RLock()
        if at_once:
            self.release(self.take(capacity))

    @property
    def num_free(self) -> int:
        return len(self._free) + self.capacity - len(self.cells)

    def take(self, count: int) -> list[int]:
        """Cells for the caller alone. Raises CapacityError, having taken none."""
        with self._lock:
            if count > self.num_free:
                raise CapacityError(
                    f"the recurrent memory is full: {count} more states are needed, and of "
                    f"{self.capacity} {self.num_free} are free.",
                    hint="lower --batch-size, --k or --state-history",
                )
            while len(self._free) < count:
                self.cells.append(self._make())
                self._holders.append(0)
                self._free.append(len(self.cells) - 1)
            taken = [self._free.pop() for _ in range(count)]
            for number in taken:
                self._holders[number] = 1
            return taken

    def share(self, numbers: Sequence[int]) -> None:
        """One more holder of each."""
        with self._lock:
            for number in numbers:
                if self._holders[number] <= 0:
                    raise ContractError("a free cell is shared")
                self._holders[number] += 1

    def release(self, numbers: Sequence[int]) -> None:
        """One holder of each less."""
        with self._lock:
            for number in numbers:
                self._holders[number] -= 1
                if self._holders[number] < 0:
                    raise ContractError("a cell was given back twice")
                if self._holders[number] == 0:
                    self._free.append(number)

    def check(self, held: Sequence[int]) -> None:
        """Assert that every cell has exactly as many holders as `held` names it times."""
        with self._lock:
            counts = [0] * len(self.cells)
            for number in held:
                counts[number] += 1
            if counts != self._holders:
                raise ContractError("holders of cells are counted wrong")
            if sorted(self._free) != [n for n, count in enumerate(counts) if not count]:
                raise ContractError("cells that nobody holds are free")
