"""A tree that grows level by level, its laws read off a model that is fed the level before.

A greedy tree keeps the worthiest of all nodes that it has looked at (core/tree_nodes.py): each
level feeds only those whose children may still be among them. A drawn tree has a shape that was
settled before the first token was drawn.

Shapes:  V = vocabulary, M = nodes that were fed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.errors import NumericsError, blaming
from outrider.core.protocols import DraftRow
from outrider.core.rng import ROOT
from outrider.core.sampling import PLAIN, Sampling, processed_probs
from outrider.core.tree import (
    LEAST_WORTH,
    Chances,
    Shape,
    best_shape,
    guessed_chances,
    num_worthwhile,
    worthwhile,
)
from outrider.core.tree_nodes import KeptNodes, Level, TreeLimits
from outrider.drafters.growing import drawn_params
from outrider.drafters.trees import DrawInTree, DrawnTree, pick_in_tree
from outrider.models.heads import MAX_WIDTH


class GrowingTree(Protocol):
    """One sequence's draft. It is told what follows the root, and then, as long as there is a next
    level, what follows its nodes."""

    @property
    def row(self) -> DraftRow: ...
    @property
    def level(self) -> Level:
        """The nodes that are to be read next; none when the tree is done."""
        ...

    def grow(self, logits_MV: Tensor) -> None:
        """By the logits after what was read; they may be written over."""
        ...

    def draft(self) -> Draft: ...


class ChosenTree:
    """Greedy. `whose` logits they are is told where those are no numbers."""

    def __init__(self, row: DraftRow, whose: str, sampling: Sampling = PLAIN) -> None:
        self.row, self._whose = row, whose
        self._nodes = sampling.nodes(tree_limits(row))
        self._paths = _Paths(row)

    @property
    def level(self) -> Level:
        return self._nodes.level

    def grow(self, logits_MV: Tensor) -> None:
        self._paths.shape(self.level, logits_MV)
        if not self._nodes.grow(logits_MV):
            raise NumericsError(self._whose)

    def draft(self) -> Draft:
        return chosen_draft(self._nodes.kept())


class SettledTree:
    """Drawn from the model's laws in a shape that was settled before."""

    def __init__(
        self,
        row: DraftRow,
        shape: Shape,
        *,
        draw: DrawInTree = pick_in_tree,
        sampling: Sampling = PLAIN,
    ) -> None:
        self.row, self.level = row, Level()
        self._params, self._sampling = drawn_params(row), sampling
        self._shape = shape.by_depth()
        self._tree = DrawnTree(self._shape, row.noise, draw)
        self._has_children = set(self._shape.parents)
        self._reading: Sequence[int] = (ROOT,)
        self._paths = _Paths(row)

    def grow(self, logits_MV: Tensor) -> None:
        self._paths.shape(self.level, logits_MV)
        laws_MV = processed_probs(logits_MV, self._params, self._sampling)
        laws = dict(zip(self._reading, laws_MV, strict=True))
        tree, parents = self._tree, self._shape.parents
        level: list[int] = []
        while (index := len(tree.nodes)) < len(parents):
            above = parents[index]
            drawn = ROOT if above == ROOT else tree.nodes[above]
            if drawn is not None and drawn not in laws:
                break
            tree.grow(None if drawn is None else laws[drawn])
            node = tree.nodes[index]
            if node is not None and index in self._has_children:
                level.append(node)
        places = {node: place for place, node in enumerate(self._reading)}
        self._reading = level
        self.level = Level(
            [tree.tokens[node] for node in level], [places[tree.parents[node]] for node in level]
        )

    def draft(self) -> Draft:
        return self._tree.draft()


def tree_limits(row: DraftRow) -> TreeLimits:
    """Of a greedy tree for `row`. What is not worth a row of the target's is not worth one of the
    draft's either: children are worth less still."""
    return TreeLimits(row.budget.size, row.budget.depth, MAX_WIDTH, LEAST_WORTH)


def chosen_draft(kept: KeptNodes) -> Draft:
    """Those of a greedy tree that are worth a row."""
    count = num_worthwhile(kept.worths)
    return Draft(tuple(kept.tokens[:count]), tuple(kept.parents[:count]))


def settled_shape(row: DraftRow, chances: Chances = ()) -> Shape:
    """The shape of a drawn tree: by counts, or by guesses where nobody counted."""
    chances = (chances or guessed_chances(row.budget.depth))[: row.budget.depth]
    return worthwhile(best_shape(chances, row.budget.size)).narrowed(MAX_WIDTH)


class _Paths:
    """Shapes logits as the target's will be, after the path of each node of a level."""

    def __init__(self, row: DraftRow) -> None:
        self._row = row
        self._paths: list[list[int]] = [[]]

    def shape(self, level: Level, logits_MV: Tensor) -> None:
        """Shape `logits_MV` in place: those after `level`, or after the root at first."""
        row = self._row
        if row.shaper is None:
            return
        if level.tokens:
            above = (self._paths[place] for place in level.above)
            self._paths = [[*path, t] for path, t in zip(above, level.tokens, strict=True)]
        with blaming(row.seq_id), torch.inference_mode():
            logits_MV.copy_(row.shaper.shape(logits_MV, row.tokens, self._paths))
