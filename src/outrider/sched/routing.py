"""Routing: which of several engines of one model gets a request, for server and simulator.

A request goes to the engine that has already read the longest beginning of its prompt. If that
engine has clearly more to do than another, the request goes to the least busy one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import Final, Protocol, TypeVar

# Tokens of a block, and the most blocks remembered for an engine.
BLOCK_TOKENS: Final = 16
_MOST_BLOCKS = 1 << 15
# An engine that read the prompt before may have at most so many requests more than the least busy.
_MOST_AHEAD = 2


class KnownBlocks:
    """The beginnings of prompts that an engine has read; of many only the most recently used."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def note(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > _MOST_BLOCKS:
            self._blocks.popitem(last=False)

    def num_known(self, blocks: Sequence[int]) -> int:
        """Return how many of the first blocks the engine has read."""
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
    """Return the engine for a request of these blocks; there must be at least one. Of equals the
    one that has read least, so that idle engines share out families of prompts."""
    least = least_busy(engines).num_in_flight
    near = [one for one in engines if one.num_in_flight <= least + _MOST_AHEAD]

    def worth(one: R) -> tuple[int, int, int]:
        return one.known.num_known(blocks), -one.num_in_flight, -one.known.num_blocks

    return max(near, key=worth)


def least_busy(engines: Sequence[R]) -> R:
    """Return the engine with the fewest requests; the first of equals."""
    return min(engines, key=lambda one: one.num_in_flight)


def blocks_of(ids: Sequence[int], salt: Hashable = None) -> Iterator[int]:
    """Yield a number for each whole block of a prompt; it identifies the block and everything
    before it. Prompts of different salts have no beginning in common."""
    so_far = hash(salt)
    for start in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        so_far = hash((so_far, *ids[start : start + BLOCK_TOKENS]))
        yield so_far
