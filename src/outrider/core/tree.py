"""Shapes of draft trees: which nodes are worth a row of the target's pass.

A node's worth is the probability that the text runs through it: the product, along its path, of the
probabilities that the candidate of its rank is the next token. These do not depend on the rest of
the tree, so the best tree of R nodes has the R worthiest nodes, and its expected accepted tokens
are the sum of their worths. No node is worth more than its parent or an elder sibling, hence the
nodes are connected. The dynamic program of Sequoia (Chen et al. 2024, arXiv 2402.12374) finds a
tree of the same worth.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

# The pending token, below which a draft hangs, as a parent.
ROOT = -1
# [depth][rank]: the probability that the candidate of that rank is the next token, given that the
# path before it is the text. Never rising with the rank.
Chances: TypeAlias = Sequence[Sequence[float]]

# Most nodes of a tree level that a drafter reads; memory is allocated for so many.
MAX_WIDTH = 16
# Matrix tiles of CPUs and GPUs take so many rows; a pass of fewer costs the same.
ROW_TILE = 16
# Without a tally: the first candidate is right in three of four cases at the first position,
# somewhat less often at later ones, and those behind it share part of the rest.
_FIRST, _LATER, _BEHIND = 0.75, 0.95, (0.35, 0.16, 0.1, 0.07, 0.05, 0.04, 0.03)


@dataclass(frozen=True, slots=True)
class Shape:
    """A tree without tokens, its worthiest nodes first: parents before children, elder siblings
    before younger ones. `ranks[n]` is the rank of node n among its parent's candidates, 0 best."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    worths: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def depths(self) -> tuple[int, ...]:
        """Tokens before each node on its path: 0 for those below the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @property
    def expected(self) -> float:
        """Expected accepted tokens a round, if the probabilities are right."""
        return sum(self.worths)

    def first(self, count: int) -> Shape:
        """The best tree of `count` nodes."""
        return Shape(self.parents[:count], self.ranks[:count], self.worths[:count])

    def by_depth(self) -> Shape:
        """The same tree, level by level: for drafters that read a level to make the next."""
        depths = self.depths
        order = sorted(range(len(self)), key=lambda node: depths[node])
        return self._of({node: index for index, node in enumerate(order)})

    def narrowed(self, width: int) -> Shape:
        """The tree with only the `width` worthiest parents of each level."""
        depths, index_of = self.depths, {ROOT: ROOT}
        parents: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            level = parents.setdefault(depths[node], [])
            if parent in index_of and parent not in level and len(level) < width:
                level.append(parent)
            if parent in level:
                index_of[node] = len(index_of) - 1
        del index_of[ROOT]
        return self._of(index_of)

    def _of(self, index_of: Mapping[int, int]) -> Shape:
        """The tree of the nodes of `index_of`, in its order and with its numbers."""
        numbers = {**index_of, ROOT: ROOT}
        return Shape(
            tuple(numbers[self.parents[node]] for node in index_of),
            tuple(self.ranks[node] for node in index_of),
            tuple(self.worths[node] for node in index_of),
        )


def best_shape(chances: Chances, num_nodes: int) -> Shape:
    """The tree of at most `num_nodes` nodes with the most expected accepted tokens.

    `len(chances)` bounds its depth. Takes O(R log R); nodes that are worth nothing are left out.
    """
    parents: list[int] = []
    ranks: list[int] = []
    worths: list[float] = []
    # Candidates: the negative worth, and the order of discovery, which breaks ties; then parent,
    # depth, rank and the parent's worth.
    edge: list[tuple[float, int, int, int, int, float]] = []
    found = 0

    def offer(parent: int, depth: int, rank: int, above: float) -> None:
        nonlocal found
        if depth < len(chances) and rank < len(chances[depth]) and chances[depth][rank] > 0:
            entry = (-above * chances[depth][rank], found, parent, depth, rank, above)
            heapq.heappush(edge, entry)
            found += 1

    offer(ROOT, 0, 0, 1.0)
    while edge and len(parents) < num_nodes:
        worth, _, parent, depth, rank, above = heapq.heappop(edge)
        parents.append(parent)
        ranks.append(rank)
        worths.append(-worth)
        offer(len(parents) - 1, depth + 1, 0, -worth)
        offer(parent, depth, rank + 1, above)
    return Shape(tuple(parents), tuple(ranks), tuple(worths))


def chain_shape(depth: int) -> Shape:
    return Shape(tuple(range(ROOT, depth - 1)), (0,) * depth, (1.0,) * depth)


def fill_rows(num_nodes: int, most: int) -> int:
    """`num_nodes`, increased up to `most` to fill the last tile of rows; one row is the pending
    token's. The cost of a pass grows by whole tiles."""
    rows = -(-(num_nodes + 1) // ROW_TILE) * ROW_TILE
    return max(min(rows - 1, most), 0)


def guessed_chances(num_positions: int, num_ranks: int = 8) -> Chances:
    """Default probabilities, without any counts."""
    return with_siblings([_FIRST * _LATER**depth for depth in range(num_positions)], num_ranks)


def with_siblings(firsts: Sequence[float], num_ranks: int = 8) -> Chances:
    """Probabilities of all ranks from those of the first candidates: the others share the rest."""
    behind = ((first, *((1 - first) * share for share in _BEHIND)) for first in firsts)
    return [falling(shares[:num_ranks]) for shares in behind]


def falling(shares: Sequence[float]) -> tuple[float, ...]:
    lowest = 1.0
    falling: list[float] = []
    for share in shares:
        lowest = min(lowest, share)
        falling.append(lowest)
    return tuple(falling)
