"""What one sequence has in a paged KV cache: its pages, committed tokens and staged nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.core.tree import ROOT

# Pages in a row that a sequence asks for beyond its prompt: 512 tokens.
GROWTH = 16


@dataclass(frozen=True, slots=True)
class VisibleNodes:
    """What a staged node sees of the staged nodes, itself included: the first `run` of them, which
    lie where a chain would put them, and then those in the slots `extra`."""

    run: int = 0
    extra: tuple[int, ...] = ()

    @property
    def num_nodes(self) -> int:
        return self.run + len(self.extra)

    def followed_by(self, node: int, slot: int) -> VisibleNodes:
        """What a child sees that is staged as `node`, in `slot`."""
        if node == self.run:
            return VisibleNodes(node + 1)
        return VisibleNodes(self.run, (*self.extra, slot))


NOTHING_SEEN = VisibleNodes()


@dataclass(slots=True)
class SequencePages:
    """Memory of one sequence. The first `num_staged` of `staged` and `parents` are the nodes staged
    since the last commit; what is behind them was rolled back, and is written over. `seen` says
    what the first of them see; it is only made where something branches off.

    `num_dropped` of the tokens that were committed first have no rows any more. The first
    `num_freed` of `pages` no window reaches: tables name them, and nobody reads them there.
    `num_expected` pages hold the prompt and the beginning of an answer."""

    pages: list[int] = field(default_factory=list[int])
    tokens: list[int] = field(default_factory=list[int])
    staged: list[int] = field(default_factory=list[int])
    parents: list[int] = field(default_factory=list[int])
    seen: list[VisibleNodes] = field(default_factory=list[VisibleNodes])
    num_staged: int = 0
    num_dropped: int = 0
    num_expected: int = GROWTH
    num_freed: int = 0
    salt: str = ""
    listed: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    num_listed: int = 0

    @property
    def table(self) -> NDArray[np.int32]:
        """`pages` as an array. Pages are only ever added, so only new ones are written."""
        count, done = len(self.pages), self.num_listed
        if count > len(self.listed):
            grown = np.zeros(2 * count, np.int32)
            grown[:done] = self.listed[:done]
            self.listed = grown
        if count > done:
            self.listed[done:count] = self.pages[done:]
            self.num_listed = count
        return self.listed[:count]

    def stage(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        del self.seen[self.num_staged :]
        self.staged[self.num_staged :] = tokens
        self.parents[self.num_staged :] = parents
        self.num_staged = len(self.staged)

    @property
    def num_rows(self) -> int:
        """Committed rows: the physical length, where `tokens` has the logical one."""
        return len(self.tokens) - self.num_dropped

    @property
    def in_window(self) -> Sequence[int]:
        """Pages that later tokens see through a window, or all without one."""
        return self.pages[self.num_freed :] if self.num_freed else self.pages

    @property
    def staged_is_chain(self) -> bool:
        return self.parents == list(range(ROOT, len(self.parents) - 1))
