"""A tree that grows level by level, its laws read off a model that is fed the level before.

A greedy tree keeps the worthiest of all nodes that it has looked at, where a node is worth the
product of the model's own chances along its path (EAGLE-2, Li et al. 2024, arXiv 2406.16858):
each level feeds only those nodes whose children may still be among them. A drawn tree has a shape
that was settled before the first token was drawn.

Shapes:  V = vocabulary, M = nodes that were fed, R = ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.errors import NumericsError, blaming
from outrider.core.host import host_floats, host_rows
from outrider.core.laws import processed_probs
from outrider.core.noise import ROOT
from outrider.core.protocols import DraftRow
from outrider.core.sampling import PLAIN, Sampling
from outrider.core.tree_shape import (
    Chances,
    Shape,
    best_shape,
    guessed_chances,
    num_worthwhile,
    worthwhile,
)
from outrider.drafters.growing import drawn_params
from outrider.drafters.trees import DrawInTree, DrawnTree, pick_in_tree, sharp_shares
from outrider.models.heads import MAX_WIDTH


class GrowingTree(Protocol):
    """One sequence's draft. `feed` and `grow` take turns until nothing is fed any more."""

    @property
    def row(self) -> DraftRow: ...
    def feed(self) -> Sequence[int]:
        """Nodes of this tree to be read next, ROOT the first time."""
        ...

    def grow(self, logits_MV: Tensor) -> None:
        """By the logits after what was fed; they may be written over."""
        ...

    def token(self, node: int) -> int: ...
    def parent(self, node: int) -> int: ...
    def path(self, node: int) -> list[int]:
        """Tokens from below the root to `node`, itself included."""
        ...

    def draft(self) -> Draft: ...


@dataclass(slots=True)
class ChosenTree:
    """Greedy. `whose` logits they are is told where those are no numbers."""

    row: DraftRow
    whose: str
    _tokens: list[int] = field(default_factory=list[int])
    _parents: list[int] = field(default_factory=list[int])
    _worths: list[float] = field(default_factory=list[float])
    # The worthiest of all so far, worthiest first: who is not among them will never be.
    _kept: Sequence[int] = ()
    _level: Sequence[int] = (ROOT,)
    _depth: int = 0

    def feed(self) -> Sequence[int]:
        return self._level

    def grow(self, logits_MV: Tensor) -> None:
        _shape_logits(self, self._level, logits_MV)
        num_ranks = min(MAX_WIDTH, self.row.budget.size, logits_MV.shape[-1])
        best_MR, ids_MR = logits_MV.topk(num_ranks)
        if bool(best_MR.isnan().any()):
            raise NumericsError(self.whose)
        shares = iter(host_floats(sharp_shares(best_MR, logits_MV).flatten()))
        first = len(self._tokens)
        for parent, ids in zip(self._level, host_rows(ids_MR), strict=True):
            above = 1.0 if parent == ROOT else self._worths[parent]
            self._tokens += ids
            self._parents += [parent] * len(ids)
            self._worths += [above * share for share in islice(shares, len(ids))]
        self._keep(range(first, len(self._tokens)))
        self._depth += 1
        self._level = self._promising(range(first, len(self._tokens)))

    def token(self, node: int) -> int:
        return self._tokens[node]

    def parent(self, node: int) -> int:
        return self._parents[node]

    def path(self, node: int) -> list[int]:
        return _path(node, self._tokens, self._parents)

    def draft(self) -> Draft:
        kept = self._kept[: num_worthwhile([self._worths[node] for node in self._kept])]
        place = {node: index for index, node in enumerate(kept)} | {ROOT: ROOT}
        tokens = tuple(self._tokens[node] for node in kept)
        return Draft(tokens, tuple(place[self._parents[node]] for node in kept))

    def _promising(self, newest: range) -> Sequence[int]:
        """Those of the newest nodes whose children may be kept, as many as one level may have."""
        if self._depth >= self.row.budget.depth:
            return ()
        return [node for node in self._kept if node in newest][:MAX_WIDTH]

    def _keep(self, newest: range) -> None:
        """Of equal nodes those that were found first, so that parents come before children."""
        nodes = [*self._kept, *(node for node in newest if self._worths[node] > 0)]
        nodes.sort(key=lambda node: (-self._worths[node], node))
        self._kept = nodes[: self.row.budget.size]


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
        self.row = row
        self._params, self._sampling = drawn_params(row), sampling
        self._shape = shape.by_depth()
        self._tree = DrawnTree(self._shape, row.noise, draw)
        self._has_children = set(self._shape.parents)
        self._level: Sequence[int] = (ROOT,)

    def feed(self) -> Sequence[int]:
        return self._level

    def grow(self, logits_MV: Tensor) -> None:
        _shape_logits(self, self._level, logits_MV)
        laws_MV = processed_probs(logits_MV, self._params, self._sampling)
        laws = dict(zip(self._level, laws_MV, strict=True))
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
        self._level = level

    def token(self, node: int) -> int:
        return self._tree.tokens[node]

    def parent(self, node: int) -> int:
        return self._tree.parents[node]

    def path(self, node: int) -> list[int]:
        return _path(node, self._tree.tokens, self._tree.parents)

    def draft(self) -> Draft:
        return self._tree.draft()


def settled_shape(row: DraftRow, chances: Chances = ()) -> Shape:
    """The shape of a drawn tree: by counts, or by guesses where nobody counted."""
    chances = (chances or guessed_chances(row.budget.depth))[: row.budget.depth]
    return worthwhile(best_shape(chances, row.budget.size)).narrowed(MAX_WIDTH)


def _path(node: int, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    path: list[int] = []
    while node != ROOT:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]


def _shape_logits(tree: GrowingTree, level: Sequence[int], logits_MV: Tensor) -> None:
    """Shape logits in place as the target's will be, after each node's own path."""
    row = tree.row
    if row.shaper is not None:
        suffixes = [tree.path(node) for node in level]
        with blaming(row.seq_id), torch.inference_mode():
            logits_MV.copy_(row.shaper.shape(logits_MV, row.tokens, suffixes))
