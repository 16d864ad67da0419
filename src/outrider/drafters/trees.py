"""Trees of tokens: drawn node by node, or chosen, in shapes of `core/tree.py`.

Chances come from a drafter's own laws, where those are known before anything is drawn, or from a
tally of ranks over text (`RankTally`). At temperature > 0 the shape is settled before the first
token is drawn, and siblings are drawn without replacement.

Shapes:  V = vocabulary, N = nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.rng import Noise, Role
from outrider.core.tree import ROOT, Chances, Shape, falling


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
            falling([hit / max(seen, 1) for hit in hits])
            for hits, seen in zip(self._hits, self._seen, strict=True)
        ]


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


def chosen_tree(shape: Shape, candidates: Sequence[Sequence[int]]) -> Draft:
    """A greedy tree whose candidates depend on the depth alone: `candidates[depth][rank]`."""
    tokens = [candidates[d][rank] for d, rank in zip(shape.depths, shape.ranks, strict=True)]
    return Draft(tuple(tokens), shape.parents)
