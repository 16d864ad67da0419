"""Routing: which of several engines of one model gets a request, for server and simulator.

A request goes where most of its prompt's beginning was read before, unless that engine has clearly
more to do than another; then it goes to the one with the least.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import Final, Protocol, TypeVar

# Tokens whose common beginning is looked up as one, and how many of those an engine is known by.
BLOCK_TOKENS: Final = 16
_MOST_BLOCKS = 1 << 15
# An engine that read the prompt before may have so many requests more than the least busy one.
_MOST_AHEAD = 2


class KnownBlocks:
    """Which beginnings of prompts an engine has read; those that were used last, if many."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def note(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > _MOST_BLOCKS:
            self._blocks.popitem(last=False)

    def num_known(self, blocks: Sequence[int]) -> int:
        """How many of the first blocks it has read."""
        for number, block in enumerate(blocks):
            if block not in self._blocks:
                return number
        return len(blocks)

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    def forget(self) -> None:
        self._blocks.clear()


class Routed(Protocol):
    """An engine that requests can go to."""

    @property
    def known(self) -> KnownBlocks: ...

    @property
    def num_in_flight(self) -> int: ...


R = TypeVar("R", bound=Routed)


def best_known(engines: Sequence[R], blocks: Sequence[int]) -> R:
    """Where a request of these blocks goes; there is an engine at least. Of equals the one that has
    read least, so that idle engines share out the families of prompts."""
    least = least_busy(engines).num_in_flight
    near = [one for one in engines if one.num_in_flight <= least + _MOST_AHEAD]

    def worth(one: R) -> tuple[int, int, int]:
        return one.known.num_known(blocks), -one.num_in_flight, -one.known.num_blocks

    return max(near, key=worth)


def least_busy(engines: Sequence[R]) -> R:
    """The first of equals."""
    return min(engines, key=lambda one: one.num_in_flight)


def blocks_of(ids: Sequence[int], salt: Hashable = None) -> Iterator[int]:
    """A number for each whole block of a prompt, of it and all before it. Prompts of different
    salts have no beginning in common."""
    so_far = hash(salt)
    for start in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        so_far = hash((so_far, *ids[start : start + BLOCK_TOKENS]))
        yield so_far
