"""Drafts that a native call chooses by itself: chains and trees from logits of a head or a block.

See csrc/choices.h. Trees of positions that are drafted at once have the shape that `TreeShapes`
give.

Shapes:  B = texts, K = positions, N = nodes of a draft, V = vocabulary, W = ids that are drafted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_float, c_int32, c_void_p
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from outrider.core.draft import Budget, Draft
from outrider.core.protocols import DraftRow
from outrider.core.tree import ROOT, Shape, chain_shape
from outrider.drafters.common.growth import DraftSampler
from outrider.drafters.common.native import (
    grown_draft,
    keyed_draws,
    planned_tree,
)
from outrider.kernels.native.ops import function, struct_fields
from outrider.kernels.native.rounds import (
    CacheSpan,
    Draws,
    NativeLookups,
    Row,
    describe_draws,
)
from outrider.kernels.native.sampling import PlannedTree, TreeBuffers, TreeRow, fits, is_plain
from outrider.kernels.native.shaping import DraftShaping, Shapings


class ChoiceStruct(Structure):
    """The struct `Choice` of csrc/choice.h, with which those of calls begin."""

    _fields_ = struct_fields(
        (c_void_p, "team rows drafted trees wide ids logits"),
        (c_int32, "num_texts depth num_logits vocab_size at_once unused"),
    )


@dataclass(frozen=True, slots=True)
class PlannedChain:
    """A chain of `depth` tokens, each from logits after `shaping`, if there is any."""

    depth: int
    draws: Draws
    shaping: DraftShaping | None


class Chains:
    """The chains of a call, one for each text, over `vocab_size` ids."""

    def __init__(
        self, planned: Sequence[PlannedChain], vocab_size: int, shapings: Shapings
    ) -> None:
        count, self._planned = len(planned), planned
        self._rows = (Row * count)()
        self._drafted = (c_int32 * 0)()
        self._probs_BKV: Tensor | None = None
        if any(one.draws.temperature for one in planned):
            self._probs_BKV = torch.empty(count, max(one.depth for one in planned), vocab_size)
        for index, one in enumerate(planned):
            describe_draws(self._rows[index], one.draws, one.depth)
            self._rows[index].shaping = shapings.of(index, one.shaping)
            if self._probs_BKV is not None:
                self._rows[index].drawn_from = self._probs_BKV[index].data_ptr()

    @property
    def most_rows(self) -> int:
        """The most rows of logits at one depth."""
        return len(self._planned)

    def describe(self, choice: ChoiceStruct) -> None:
        """Let `choice` point here."""
        self._drafted = (c_int32 * (len(self._planned) * choice.depth))()
        choice.rows, choice.drafted = map(ctypes.addressof, (self._rows, self._drafted))

    def drafts(self) -> list[Draft]:
        found: list[Draft] = []
        size = len(self._drafted) // len(self._planned)
        for index, one in enumerate(self._planned):
            probs_KV = None
            if self._probs_BKV is not None and one.draws.temperature:
                probs_KV = self._probs_BKV[index, : one.depth]
            start = index * size
            found.append(Draft.chain(self._drafted[start : start + one.depth], probs_KV))
        return found


class Trees:
    """The trees of a call, one for each text, over `vocab_size` ids; `budgets` end them."""

    def __init__(
        self,
        planned: Sequence[PlannedTree],
        budgets: Sequence[Budget],
        vocab_size: int,
        shapings: Shapings,
    ) -> None:
        self._budgets = budgets
        self._trees = [TreeBuffers(one, vocab_size) for one in planned]
        self._rows, self._drawn = (TreeRow * len(planned))(), (Row * len(planned))()
        self.most_rows = sum(one.widest_level for one in planned)
        for index, tree in enumerate(self._trees):
            tree.describe(self._rows[index], self._drawn[index])
            self._rows[index].shaping = shapings.of(index, planned[index].shaping)

    def describe(self, choice: ChoiceStruct) -> None:
        choice.trees = ctypes.addressof(self._rows)

    def drafts(self) -> list[Draft]:
        return [
            grown_draft(tree.grown(0), budget)
            for tree, budget in zip(self._trees, self._budgets, strict=True)
        ]


class TreeShapes(Protocol):
    """The choice of trees of positions that are drafted at once, in medusa.py."""

    def num_ranks(self, row: DraftRow, num_ids: int) -> int:
        """Return the number of candidates of a position of a greedy tree."""
        ...

    def ranked(
        self,
        row: DraftRow,
        ids: Sequence[Sequence[int]],
        shares: Sequence[Sequence[float]],
    ) -> Draft:
        """Return a greedy tree of candidates, the likeliest first, and their probabilities."""
        ...

    def drawn_shape(self, row: DraftRow, num_positions: int) -> Shape:
        """Return the shape of a drawn tree."""
        ...


class _Wide(Structure):
    """The struct `WideTree` of csrc/choice.h."""

    _fields_ = struct_fields(
        (c_void_p, "row parents depths nodes tokens shares"),
        (c_int32, "depth num_places num_ranks num_nodes"),
    )


class _WideTree:
    """Buffers of one tree, or chain, of positions that are drafted at once."""

    def __init__(
        self, row: DraftRow, planned: PlannedChain, shapes: TreeShapes, num_ids: int, size: int
    ) -> None:
        self._row, self._shapes = row, shapes
        self._probs_NV: Tensor | None = None
        depth, self._shape, self._num_ranks = planned.depth, chain_shape(0), 0
        if row.params.greedy:
            self._num_ranks = shapes.num_ranks(row, num_ids)
            count = depth * self._num_ranks
        else:
            self._shape = shapes.drawn_shape(row, depth)
            count = len(self._shape)
            self._probs_NV = torch.empty(count, size)
        self._parents = (c_int32 * count)(*self._shape.parents)
        self._depths = (c_int32 * count)(*self._shape.depths)
        self._nodes, self._tokens = (c_int32 * count)(), (c_int32 * count)()
        self._shares = (c_float * count)()

    def describe(self, wide: _Wide, drawn: Row) -> None:
        wide.row = ctypes.addressof(drawn)
        wide.parents, wide.depths, wide.nodes, wide.tokens, wide.shares = map(
            ctypes.addressof,
            (self._parents, self._depths, self._nodes, self._tokens, self._shares),
        )
        wide.depth, wide.num_ranks = self._row.budget.depth, self._num_ranks
        wide.num_places = len(self._shape)
        if self._probs_NV is not None:
            drawn.drawn_from = self._probs_NV.data_ptr()

    def draft(self, num_nodes: int) -> Draft:
        if self._probs_NV is None:
            size = self._num_ranks
            starts = range(0, len(self._tokens), size)
            ids = [self._tokens[at : at + size] for at in starts]
            return self._shapes.ranked(
                self._row, ids, [self._shares[at : at + size] for at in starts]
            )
        if not num_nodes:
            return Draft.empty()
        drawn = [at for at, node in enumerate(self._nodes) if node >= 0]
        above = (self._shape.parents[at] for at in drawn)
        parents = [ROOT if at == ROOT else self._nodes[at] for at in above]
        return Draft(tuple(self._tokens[:num_nodes]), tuple(parents), self._probs_NV[:num_nodes])


class WideTrees:
    """The trees of a call whose positions are drafted at once, one for each text."""

    def __init__(
        self,
        rows: Sequence[DraftRow],
        planned: Sequence[PlannedChain],
        shapes: TreeShapes,
        *,
        num_ids: int,
        vocab_size: int,
        shapings: Shapings,
    ) -> None:
        count = self.most_rows = len(rows)
        self._wide, self._drawn = (_Wide * count)(), (Row * count)()
        self._trees: list[_WideTree] = []
        for index, (row, one) in enumerate(zip(rows, planned, strict=True)):
            tree = _WideTree(row, one, shapes, num_ids, vocab_size)
            drawn = self._drawn[index]
            describe_draws(drawn, one.draws, one.depth)
            drawn.shaping = shapings.of(index, one.shaping)
            tree.describe(self._wide[index], drawn)
            self._trees.append(tree)

    def describe(self, choice: ChoiceStruct) -> None:
        choice.wide = ctypes.addressof(self._wide)

    def drafts(self) -> list[Draft]:
        pairs = zip(self._trees, self._wide, strict=True)
        return [tree.draft(wide.num_nodes) for tree, wide in pairs]


Made: TypeAlias = Chains | Trees | WideTrees


def describe(made: Made | None, choice: ChoiceStruct) -> None:
    """Let `choice` point to what a call makes, and to nothing of an earlier call."""
    choice.rows = choice.trees = choice.wide = None
    if made is not None:
        made.describe(choice)


class Chooser:
    """A planner of the drafts that a call makes, with the choices of `sampler`, from logits of the
    `ids_W`, None for all. With `trees` all positions are drafted at once; without, logits depend on
    the drafted tokens before, and trees grow by them."""

    def __init__(
        self,
        sampler: DraftSampler,
        vocab_size: int,
        ids_W: Tensor | None = None,
        trees: TreeShapes | None = None,
    ) -> None:
        self._sampler, self._vocab_size, self._trees = sampler, vocab_size, trees
        self._num_ids = vocab_size if ids_W is None else len(ids_W)
        self.shapings, self.model_name = Shapings(vocab_size), sampler.model_name

    def made(self, rows: Sequence[DraftRow]) -> Made | None:
        """Return the drafts to make; None if a call cannot make all of them."""
        size, along = self._vocab_size, self._trees is None
        no_trees = all(row.budget.size <= row.budget.depth for row in rows)
        if along and self._sampler.branches and not no_trees:
            none = CacheSpan(0, (), ())
            trees = [planned_tree(self._sampler, row, none, size) for row in rows]
            known = [one for one in trees if one is not None and fits(one.limits)]
            budgets = [row.budget for row in rows]
            made = len(known) == len(rows)
            return Trees(known, budgets, size, self.shapings) if made else None
        drawn = [keyed_draws(self._sampler, row, row.rng, size) for row in rows]
        chains = [
            PlannedChain(row.budget.depth, draws, DraftShaping.of(row))
            for row, draws in zip(rows, drawn, strict=True)
            if draws is not None
        ]
        if len(chains) < len(rows):
            return None
        if self._trees is None or no_trees:
            return Chains(chains, size, self.shapings)
        return WideTrees(
            rows,
            chains,
            self._trees,
            num_ids=self._num_ids,
            vocab_size=size,
            shapings=self.shapings,
        )


class NativeChoice:
    """Drafts of one text, planned by `chooser`, from logits of all positions, in one call."""

    def __init__(self, native: NativeLookups, chooser: Chooser) -> None:
        self._chooser, self._choice = chooser, ChoiceStruct(team=native.team, num_texts=1)
        self._choice.at_once = True
        self._run = function(native.library, "choose")

    def __call__(self, row: DraftRow, logits_KV: Tensor) -> Draft | None:
        """Return the draft; None if a call cannot make it, or for logits that are no numbers."""
        made, choice = self._chooser.made([row]), self._choice
        if made is None or not is_plain(logits_KV):
            return None
        choice.depth, choice.num_logits = logits_KV.shape
        choice.vocab_size, choice.logits = choice.num_logits, logits_KV.data_ptr()
        describe(made, choice)
        if not self._run(ctypes.addressof(choice)):
            self._chooser.shapings.check()
            return None
        return made.drafts()[0]
