"""Shapes of draft trees: which nodes are worth a row of the target's pass.

What a node is worth is the chance that the text runs through it: the product, along its path, of
the chances that a candidate of that rank is the text's next token. These chances do not depend on
what else is in the tree, so the best tree of R nodes is the R worthiest nodes. No node is worth
more than its parent or than an elder sibling, hence they hang together, and the expected number of
accepted tokens is the sum of their worths. The dynamic program of Sequoia (Chen et al. 2024,
arXiv 2402.12374), whose chances depend on the rank alone, finds a tree of the same worth.

Chances come from a drafter's own laws, where those are known before anything is drawn, or from a
tally of ranks over text (`RankTally`). At temperature > 0 the shape is settled before the first
token is drawn, and siblings are drawn without replacement.

Shapes:  V = vocabulary, N = nodes, M = laws, R = ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.noise import ROOT, Noise, Role

# [depth][rank]: the chance that the candidate of that rank is the next token, where the path
# before it is the text. Never rising with the rank.
Chances: TypeAlias = Sequence[Sequence[float]]

# Matrix tiles of CPUs and GPUs take so many rows; a pass of fewer costs the same.
ROW_TILE = 16
# A node that is accepted less often than that is only drafted where its row costs nothing.
LEAST_WORTH = 0.02
# The target's likeliest token is a draft model's first more often than its law gives it mass, so
# greedy trees take chances from a sharper law. On the embedded pair, 15 nodes a round: 5.1 to 5.5
# tokens a round at 1, 6.2 to 6.3 at 1.5, 6.0 at 2; a chain of 15 has 5.4 to 5.9.
SHARPNESS = 1.5
# Where no tally is known: the first candidate is right in three of four cases at the first place,
# somewhat less often at later ones, and those behind it share part of the rest.
_FIRST, _LATER, _BEHIND = 0.75, 0.95, (0.35, 0.16, 0.1, 0.07, 0.05, 0.04, 0.03)


@dataclass(frozen=True, slots=True)
class Shape:
    """A tree without tokens, its worthiest nodes first: parents before children, elder siblings
    before younger ones. `ranks[n]` says which of its parent's candidates node n is, 0 the best."""

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
        """Accepted tokens a round, if the chances are right."""
        return sum(self.worths)

    def first(self, count: int) -> Shape:
        """The best tree of `count` nodes."""
        return Shape(self.parents[:count], self.ranks[:count], self.worths[:count])

    def by_depth(self) -> Shape:
        """The same tree, level by level: for drafters that read a level to make the next."""
        depths = self.depths
        order = sorted(range(len(self)), key=lambda node: depths[node])
        place = {node: index for index, node in enumerate(order)} | {ROOT: ROOT}
        return Shape(
            tuple(place[self.parents[node]] for node in order),
            tuple(self.ranks[node] for node in order),
            tuple(self.worths[node] for node in order),
        )

    def narrowed(self, width: int) -> Shape:
        """Without what hangs below all but the `width` worthiest parents of each level."""
        depths, place = self.depths, {ROOT: ROOT}
        parents: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            level = parents.setdefault(depths[node], [])
            if parent in place and parent not in level and len(level) < width:
                level.append(parent)
            if parent in level:
                place[node] = len(place) - 1
        kept = [node for node in place if node != ROOT]
        return Shape(
            tuple(place[self.parents[node]] for node in kept),
            tuple(self.ranks[node] for node in kept),
            tuple(self.worths[node] for node in kept),
        )


def best_shape(chances: Chances, num_nodes: int) -> Shape:
    """The tree of at most `num_nodes` nodes through which most of the text is expected to run.

    `len(chances)` bounds its depth. Takes O(R log R); nodes that are worth nothing are left out.
    """
    parents: list[int] = []
    ranks: list[int] = []
    worths: list[float] = []
    # What may be taken next: the worth, negative, and when it was found, which breaks ties; then
    # parent, depth, rank and the parent's worth.
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


def worthwhile(shape: Shape) -> Shape:
    """Its nodes that are worth a row, and those that fill the last tile of rows."""
    return shape.first(num_worthwhile(shape.worths))


def num_worthwhile(worths: Sequence[float]) -> int:
    """How many of the nodes of these worths, which never rise, to draft."""
    wanted = sum(worth >= LEAST_WORTH for worth in worths)
    return fill_rows(wanted, len(worths))


def chain_shape(depth: int) -> Shape:
    return Shape(tuple(range(ROOT, depth - 1)), (0,) * depth, (1.0,) * depth)


def fill_rows(num_nodes: int, most: int, tile: int = ROW_TILE) -> int:
    """At least `num_nodes`, and as many more, up to `most`, as fill the last tile of rows; one row
    is the pending token's. What a pass costs grows by whole tiles."""
    rows = -(-(num_nodes + 1) // tile) * tile
    return max(min(rows - 1, most), 0)


def guessed_chances(num_places: int, num_ranks: int = 8) -> Chances:
    """Where nobody counted."""
    chances: list[Sequence[float]] = []
    for place in range(num_places):
        first = _FIRST * _LATER**place
        behind = ((1 - first) * share for share in _BEHIND)
        chances.append(_falling((first, *behind)[:num_ranks]))
    return chances


class RankTally:
    """Counts at which rank among a drafter's candidates the text's own token stood.

    A place counts only where the text's tokens before it were candidates, so that products of
    chances are chances of paths.
    """

    def __init__(self, num_places: int, num_ranks: int) -> None:
        self._hits = [[0] * num_ranks for _ in range(num_places)]
        self._seen = [0] * num_places

    def note(self, ranks: Sequence[int | None]) -> None:
        """The ranks at places 0, 1, ... after one position of a text; None is none of those
        counted, and nothing behind it counts."""
        for place, rank in enumerate(ranks[: len(self._seen)]):
            self._seen[place] += 1
            if rank is None or rank >= len(self._hits[place]):
                return
            self._hits[place][rank] += 1

    def chances(self) -> Chances:
        """Shares, made not to rise with the rank: a few counts more of a later one are noise."""
        return [
            _falling([hit / max(seen, 1) for hit in hits])
            for hits, seen in zip(self._hits, self._seen, strict=True)
        ]


def _falling(shares: Sequence[float]) -> tuple[float, ...]:
    lowest = 1.0
    falling: list[float] = []
    for share in shares:
        lowest = min(lowest, share)
        falling.append(lowest)
    return tuple(falling)


# (law_V, noise, node, depth): a token from the law of draft node `node`, `depth` tokens below the
# pending one.
DrawInTree: TypeAlias = Callable[[Tensor, Noise, int, int], int]


def pick_in_tree(law_V: Tensor, noise: Noise, node: int, depth: int) -> int:
    """With a number of the node's own, as rules that compare p with q need it."""
    del depth
    return noise.pick(law_V, node, Role.DRAFT)


def race_in_tree(law_V: Tensor, noise: Noise, node: int, depth: int) -> int:
    """With the numbers that the coupled rule will draw with at the node's position. A younger
    sibling is the runner-up of the same race."""
    del node
    return noise.race_at(law_V, depth)


def without(law_V: Tensor, tokens: Sequence[int]) -> Tensor | None:
    """`law_V` given that none of `tokens` was drawn; None if they are all it has."""
    if not tokens:
        return law_V
    left_V = law_V.clone()
    left_V[list(tokens)] = 0
    total = left_V.sum(dtype=torch.float64)
    return left_V.div_(total) if float(total) > 0 else None


class DrawnTree:
    """A tree of the shape given, drawn node by node, siblings without replacement.

    A node for which its law has no token left is not drawn, nor is anything below it. That depends
    on the laws alone and on earlier siblings, so what the rule keeps follows the target's law.
    """

    def __init__(self, shape: Shape, noise: Noise, draw: DrawInTree = pick_in_tree) -> None:
        self.shape, self._noise, self._draw = shape, noise, draw
        self._depths = shape.depths
        # For each node of the shape: its node of the draft, None if it could not be drawn.
        self.nodes: list[int | None] = []
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._laws: list[Tensor] = []

    def grow(self, law_V: Tensor | None) -> None:
        """Draw the shape's next node from what follows its parent, None if that was not drawn."""
        index = len(self.nodes)
        parent = self._parent(index)
        left_V = None
        if law_V is not None and parent is not None:
            left_V = without(law_V, self._drawn_below(parent))
        if left_V is None or parent is None:
            self.nodes.append(None)
            return
        node = len(self.tokens)
        self.tokens.append(self._draw(left_V, self._noise, node, self._depths[index]))
        self.parents.append(parent)
        self._laws.append(left_V)
        self.nodes.append(node)

    def draft(self) -> Draft:
        if not self.tokens:
            return Draft.empty()
        return Draft(tuple(self.tokens), tuple(self.parents), torch.stack(self._laws))

    def _parent(self, index: int) -> int | None:
        parent = self.shape.parents[index]
        return ROOT if parent == ROOT else self.nodes[parent]

    def _drawn_below(self, parent: int) -> list[int]:
        return [t for t, p in zip(self.tokens, self.parents, strict=True) if p == parent]


def sharp_shares(best_MR: Tensor, logits_MV: Tensor, sharpness: float = SHARPNESS) -> Tensor:
    """Chances of candidates by the logits of a whole law: shares_MR, 1 at most in all."""
    total_M1 = (sharpness * logits_MV).logsumexp(-1, keepdim=True)
    return (sharpness * best_MR - total_M1).exp().clamp_max(1.0)


def chosen_tree(shape: Shape, candidates: Sequence[Sequence[int]]) -> Draft:
    """A greedy tree whose candidates depend on the depth alone: `candidates[depth][rank]`."""
    tokens = [candidates[d][rank] for d, rank in zip(shape.depths, shape.ranks, strict=True)]
    return Draft(tuple(tokens), shape.parents)
