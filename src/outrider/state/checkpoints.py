"""States after known beginnings of texts, so that a later text with the same one can start there.

Keys and values lie in pages that are shared whole; a recurrent state is only of use for the very
token it stood after. So states are kept where a page ends, a bounded number of them, and the least
recently used goes first. A key is the whole beginning: no two texts can be taken for one another.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import RLock

from outrider.kernels.reference.delta import StateCell
from outrider.state.cells import CellPool

Beginning = tuple[int, ...]


class Checkpoints:
    """Holds each of its cells once."""

    def __init__(self, pool: CellPool[StateCell], capacity: int) -> None:
        self._pool = pool
        self.capacity = capacity
        self._cells: OrderedDict[Beginning, int] = OrderedDict()
        self._lock = RLock()

    @property
    def held(self) -> list[int]:
        return list(self._cells.values())

    def longest(self, tokens: Sequence[int], most: int) -> tuple[int, int | None]:
        """How many of the first `most` tokens the best state has read, and its cell, of which the
        caller becomes a holder; (0, None) if there is none."""
        with self._lock:
            fits = [
                key for key in self._cells if len(key) <= most and key == tuple(tokens[: len(key)])
            ]
            if not fits:
                return 0, None
            best = max(fits, key=len)
            self._cells.move_to_end(best)
            cell = self._cells[best]
            self._pool.share([cell])
            return len(best), cell

    def add(self, beginning: Beginning, cell: int) -> None:
        """One that is known already keeps the cell it has: both hold the same bits."""
        with self._lock:
            if not self.capacity:
                return
            if beginning not in self._cells:
                self._pool.share([cell])
                self._cells[beginning] = cell
            self._cells.move_to_end(beginning)
            if len(self._cells) > self.capacity:
                self._drop_oldest()

    def drop(self, beginning: Beginning) -> None:
        with self._lock:
            cell = self._cells.pop(beginning, None)
            if cell is not None:
                self._pool.release([cell])

    def make_room(self, count: int) -> None:
        """Drop the oldest until `count` cells are free, or none is left."""
        with self._lock:
            while self._cells and self._pool.num_free < count:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, cell = self._cells.popitem(last=False)
        self._pool.release([cell])
