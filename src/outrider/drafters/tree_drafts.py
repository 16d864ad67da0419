"""Parts of draft trees: their limits and shapes, and nodes drawn without replacement.

Shapes:  N = nodes of a draft, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from outrider.core.budget import Budget
from outrider.core.draft import Draft
from outrider.core.protocols import DraftRow
from outrider.core.rng import DrawNode, Rng, pick_node
from outrider.core.sampling import PLAIN, Leftover
from outrider.core.tree import MAX_WIDTH, ROOT, Shape, best_shape, guessed_chances
from outrider.core.tree_nodes import KeptNodes, TreeLimits
from outrider.estimate.cost import LEAST_WORTH, num_worthwhile


class SampledNodes:
    """The nodes of a tree of the given shape, drawn one by one, siblings without replacement.

    A node whose distribution has no token left is not drawn, nor is anything below it. That depends
    on the distributions alone and on earlier siblings, so the accepted tokens follow the target's
    distribution.
    """

    def __init__(
        self,
        shape: Shape,
        rng: Rng,
        draw: DrawNode = pick_node,
        leftover: Leftover = PLAIN.leftover,
    ) -> None:
        self.shape, self._rng, self._draw, self._leftover = shape, rng, draw, leftover
        self._depths = shape.depths
        # The newest child of each node that has any.
        self._newest: dict[int, int] = {}
        # The draft node of each node of the shape, None if it could not be drawn.
        self.drawn: list[int | None] = []
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._probs: list[Tensor] = []

    def grow(self, probs_V: Tensor | None) -> None:
        """Draw the shape's next node from its parent's distribution; None: not drawn."""
        index = len(self.drawn)
        parent = self._parent(index)
        left_V = None
        if probs_V is not None and parent is not None:
            left_V = self._left(probs_V, parent)
        if left_V is None or parent is None:
            self.drawn.append(None)
            return
        node = len(self.tokens)
        self.tokens.append(self._draw(left_V, self._rng, node, self._depths[index]))
        self.parents.append(parent)
        self._probs.append(left_V)
        self.drawn.append(node)
        self._newest[parent] = node

    def draft(self) -> Draft:
        if not self.tokens:
            return Draft.empty()
        return Draft(tuple(self.tokens), tuple(self.parents), torch.stack(self._probs))

    def _parent(self, index: int) -> int | None:
        parent = self.shape.parents[index]
        return ROOT if parent == ROOT else self.drawn[parent]

    def _left(self, probs_V: Tensor, parent: int) -> Tensor | None:
        """Return the distribution of the next child of `parent`: all of `probs_V`, or the rest
        after the newest child."""
        newest = self._newest.get(parent)
        if newest is None:
            return probs_V
        return without(self._probs[newest], self.tokens[newest], self._leftover)


def without(probs_V: Tensor, token: int, leftover: Leftover = PLAIN.leftover) -> Tensor | None:
    """Return `probs_V` given that `token` was not drawn; None if that is all it has."""
    left_V, total = leftover(probs_V, token)
    return (left_V / total).to(probs_V.dtype) if total > 0 else None


def chosen_tree(shape: Shape, candidates: Sequence[Sequence[int]]) -> Draft:
    """Return a greedy tree of `candidates[depth][rank]`, whatever the path."""
    tokens = [candidates[d][rank] for d, rank in zip(shape.depths, shape.ranks, strict=True)]
    return Draft(tuple(tokens), shape.parents)


def tree_limits(row: DraftRow) -> TreeLimits:
    """Return the limits of a greedy tree for `row`. A node that is not worth a row of the target's
    pass is not worth one of the draft's either: its children are worth less still."""
    budget = row.budget
    least = max(budget.price or 0.0, LEAST_WORTH)
    return TreeLimits(budget.size, budget.depth, MAX_WIDTH, least)


def chosen_draft(kept: KeptNodes, budget: Budget) -> Draft:
    """Return the nodes of a greedy tree that are worth a row."""
    count = num_worthwhile(kept.worths, budget.price)
    return Draft(tuple(kept.tokens[:count]), tuple(kept.parents[:count]))


def settled_shape(budget: Budget) -> Shape:
    """Return the shape of a drawn tree, level by level; by guessed probabilities, since the
    accuracy of candidates was never counted."""
    best = _best(budget.depth, budget.size)
    return _settled(budget.depth, budget.size, num_worthwhile(best.worths, budget.price))


@lru_cache(maxsize=128)
def _best(depth: int, size: int) -> Shape:
    return best_shape(guessed_chances(depth), size)


@lru_cache(maxsize=512)
def _settled(depth: int, size: int, count: int) -> Shape:
    """Return the best tree's first `count` nodes: prices change all the time, counts are few."""
    return _best(depth, size).first(count).narrowed(MAX_WIDTH).by_depth()
