"""Draft trees by native code: nodes of a greedy level (csrc/trees.cpp), or trees of a batch.

`NativeTrees` takes contiguous float32 on the CPU; other logits are copied. Trees beyond the limits
of its memory go to the definition in core/tree.py. `NativeTreeDrafts` grows whole trees,
greedy or drawn (csrc/tree_drafts.cpp); the states that heads read first must lie in the entrance's
`states_ND`.

Shapes:  M = nodes of a level, N = nodes of a tree, V = vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_double, c_float, c_int32, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.errors import ContractError
from outrider.core.tree import ROOT, Shape
from outrider.core.tree_nodes import (
    SHARPNESS,
    ChosenNodes,
    KeptNodes,
    Level,
    NodeChoice,
    Ranked,
    TreeLimits,
    rank,
)
from outrider.kernels.native.ops import function, struct_fields
from outrider.kernels.native.rounds import MOST_NODES, CacheSpan, Draws, Lane, RoundModel, Row, tell

# As in csrc/trees.h.
MOST_WIDTH = 16


class TreeStruct(Structure):
    """As in csrc/trees.h."""

    _fields_ = struct_fields(
        (c_int32, "num_nodes most_depth width"),
        (c_float, "sharpness"),
        (c_int32, "num_kept depth num_level unused"),
        (c_double, "least_read"),
        (c_double * MOST_NODES, "worths"),
        (c_int32 * MOST_NODES, "tokens parents"),
        (c_int32 * MOST_WIDTH, "level above"),
    )


def new_tree(limits: TreeLimits) -> TreeStruct:
    """Of the root alone, which is to be read next."""
    tree = TreeStruct(limits.num_nodes, limits.depth, limits.width, SHARPNESS)
    tree.num_level, tree.level[0], tree.least_read = 1, ROOT, limits.least_read
    return tree


def kept_nodes(tree: TreeStruct) -> KeptNodes:
    count: int = tree.num_kept
    return KeptNodes(tree.tokens[:count], tree.parents[:count], tree.worths[:count])


def fits(limits: TreeLimits) -> bool:
    return limits.num_nodes <= MOST_NODES and limits.width <= MOST_WIDTH


class NativeTrees:
    """The operators of `library` on the team at this address (`kernels/native/ops.py`)."""

    def __init__(self, library: ctypes.CDLL, team: int) -> None:
        self._team = team
        self._grow, self._rank = function(library, "grow_tree"), function(library, "rank")

    def nodes(self, limits: TreeLimits) -> NodeChoice:
        """As MakeNodes says."""
        return _NativeNodes(self, limits) if fits(limits) else ChosenNodes(limits, self.rank)

    def grow(self, tree: TreeStruct, logits_MV: Tensor) -> bool:
        if len(logits_MV) != tree.num_level:
            raise ContractError("there is a row of logits for each node of the level")
        address, size = logits_MV.data_ptr(), logits_MV.shape[1]
        return bool(self._grow(self._team, ctypes.addressof(tree), address, size))

    def rank(self, logits_MV: Tensor, num_ranks: int, sharpness: float) -> Ranked | None:
        """As `rank` of core; what has no chance at all is told as token 0."""
        num_rows, size = logits_MV.shape
        if not is_plain(logits_MV) or max(num_rows, num_ranks) > MOST_WIDTH:
            return rank(logits_MV, num_ranks, sharpness)
        tokens = ((c_int32 * num_ranks) * num_rows)()
        shares = ((c_float * num_ranks) * num_rows)()
        told = ctypes.addressof(tokens), ctypes.addressof(shares)
        address = logits_MV.data_ptr()
        if not self._rank(self._team, address, num_rows, size, num_ranks, sharpness, *told):
            return None
        return Ranked([row[:] for row in tokens], [row[:] for row in shares])


class _NativeNodes:
    """NodeChoice over memory that a call grows."""

    def __init__(self, ops: NativeTrees, limits: TreeLimits) -> None:
        self._ops, self._tree = ops, new_tree(limits)
        self.level = Level()

    def grow(self, logits_MV: Tensor) -> bool:
        if not is_plain(logits_MV):
            logits_MV = logits_MV.to("cpu", torch.float32).contiguous()
        if not self._ops.grow(self._tree, logits_MV):
            return False
        count: int = self._tree.num_level
        self.level = Level(self._read_next(count), self._tree.above[:count])
        return True

    def kept(self) -> KeptNodes:
        return kept_nodes(self._tree)

    def _read_next(self, count: int) -> list[int]:
        tokens = self._tree.tokens
        return [tokens[node] for node in self._tree.level[:count]]


def is_plain(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.is_cpu and tensor.is_contiguous()


class Drawing(Structure):
    """As in csrc/tree_drafts.cpp."""

    _fields_ = struct_fields(
        (c_void_p, "row shape"), (c_int32, "num_places num_done"), (c_int32 * MOST_NODES, "nodes")
    )


class TreeRow(Structure):
    """As in csrc/tree_drafts.cpp."""

    _fields_ = struct_fields(
        (c_void_p, "tree drawing tokens parents"), (c_int32, "length num_unread num_staged unused")
    )


class TreeDrafts(Structure):
    """As in csrc/tree_drafts.cpp."""

    _fields_ = struct_fields(
        (c_void_p, "team memory rows unread"), (c_int32, "num_rows vocab_size")
    )


@dataclass(frozen=True, slots=True)
class PlannedTree:
    """One sequence: what is read of it, and the limits of its tree. A tree that is drawn has a
    shape, level by level and within the limits; a greedy one has none."""

    feed: CacheSpan
    limits: TreeLimits
    draws: Draws
    shape: Shape | None = None

    @property
    def widest_level(self) -> int:
        """Nodes of one level that may be read."""
        return min(self.limits.width, self.limits.num_nodes)

    @property
    def most_fed(self) -> int:
        """Nodes that may be read: none of the last level."""
        if self.shape is not None:
            return len({*self.shape.parents} - {ROOT})
        return (self.limits.depth - 1) * self.widest_level


@dataclass(frozen=True, slots=True)
class Grown:
    """A tree, and what the model has read for it since the last commit: the text first, then the
    levels, whose parents are places among all of that, or ROOT. `probs_NV` are what drawn nodes
    were drawn from; they come in their order, and have no worths."""

    kept: KeptNodes
    tokens: Sequence[int]
    parents: Sequence[int]
    probs_NV: Tensor | None = None


class NativeTreeDrafts:
    """Trees of up to `batch_size` rows. Not thread-safe: memory is used again by every call."""

    def __init__(self, model: RoundModel, *, batch_size: int, vocab_size: int) -> None:
        self._lane, self._vocab_size = Lane(model, batch_size), vocab_size
        self._rows, self._drawn = (TreeRow * batch_size)(), (Row * batch_size)()
        self._most_rows = min(model.logits_MV.shape[0], model.forward.max_tokens)
        self._drafts = TreeDrafts(
            model.forward.team,
            self._lane.address,
            ctypes.addressof(self._rows),
            ctypes.addressof(self._lane.unread),
            vocab_size=vocab_size,
        )
        self._address = ctypes.addressof(self._drafts)
        self._run = function(model.forward.library, "tree_drafts")

    def fits(self, trees: Sequence[PlannedTree]) -> bool:
        """Whether buffers have room for what is read of each text and for the widest levels."""
        return (
            len(trees) <= len(self._rows)
            and sum(tree.widest_level for tree in trees) <= self._most_rows
            and sum(len(tree.feed.unread) for tree in trees) <= len(self._lane.unread)
            and all(fits(tree.limits) for tree in trees)
        )

    def __call__(self, trees: Sequence[PlannedTree]) -> list[Grown] | None:
        """None if some logits are no numbers, or a token is not in the vocabulary; then memory
        holds nothing that counts."""
        rooms = [self._room(index, tree) for index, tree in enumerate(trees)]
        at = 0
        for index, tree in enumerate(trees):
            at = self._lane.read(index, tree.feed, at)
        self._drafts.num_rows = len(trees)
        if not self._run(self._address):
            return None
        return [room.grown(row.num_staged) for room, row in zip(rooms, self._rows, strict=False)]

    def _room(self, index: int, tree: PlannedTree) -> _Room:
        """Room for `tree`, which the row of this index points to."""
        room, row = _Room(tree, self._vocab_size), self._rows[index]
        row.tree, row.drawing = ctypes.addressof(room.tree), None
        row.tokens, row.parents = map(ctypes.addressof, room.staged)
        row.length, row.num_unread = tree.feed.length, len(tree.feed.unread)
        if room.probs_NV is not None:
            told = self._drawn[index]
            tell(told, tree.draws, len(room.probs_NV))
            told.drawn_from = room.probs_NV.data_ptr()
            room.drawing.row = ctypes.addressof(told)
            row.drawing = ctypes.addressof(room.drawing)
        return room


class _Room:
    """Memory of one tree that a call grows."""

    def __init__(self, planned: PlannedTree, vocab_size: int) -> None:
        count = len(planned.feed.unread) + planned.most_fed
        self.tree = new_tree(planned.limits)
        self.staged = (c_int32 * count)(), (c_int32 * count)()
        self.probs_NV, self.drawing = None, Drawing()
        if planned.shape is not None:
            parents = planned.shape.parents
            self._shape = (c_int32 * len(parents))(*parents)
            self.drawing.shape = ctypes.addressof(self._shape)
            self.drawing.num_places = len(parents)
            self.probs_NV = torch.empty(len(parents), vocab_size)

    def grown(self, num_staged: int) -> Grown:
        tokens, parents = self.staged
        kept, probs_NV = kept_nodes(self.tree), self.probs_NV
        if probs_NV is not None:
            probs_NV = probs_NV[: len(kept.tokens)]
        return Grown(kept, tokens[:num_staged], parents[:num_staged], probs_NV)
