"""Greedy draft trees by native code: nodes of a level (csrc/trees.cpp), or trees of a batch.

`NativeTrees` takes contiguous float32 on the CPU; other logits are copied. Trees beyond the limits
of its memory go to the definition in core/tree_nodes.py. `NativeTreeDrafts` grows whole trees
(csrc/tree_drafts.cpp); the states that heads read first must lie in the entrance's `states_ND`.

Shapes:  B = rows, M = nodes of a level, V = vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_double, c_float, c_int32, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.errors import ContractError
from outrider.core.tree import ROOT
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
from outrider.kernels.native.rounds import CacheSpan, Lane, RoundModel

# As in csrc/trees.h.
MOST_NODES, MOST_WIDTH = 256, 16


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


class TreeRow(Structure):
    """As in csrc/tree_drafts.cpp."""

    _fields_ = struct_fields(
        (c_void_p, "tree tokens parents"),
        (c_int32, "length num_unread num_staged unused"),
    )


class TreeDrafts(Structure):
    """As in csrc/tree_drafts.cpp."""

    _fields_ = struct_fields(
        (c_void_p, "team memory rows unread"),
        (c_int32, "num_rows unused"),
    )


@dataclass(frozen=True, slots=True)
class Grown:
    """A tree, and what the model has read for it since the last commit: the text first, then the
    levels, whose parents are places among all of that, or ROOT."""

    kept: KeptNodes
    tokens: Sequence[int]
    parents: Sequence[int]


def widest_level(limits: TreeLimits) -> int:
    """Nodes of one level of such a tree that may be read."""
    return min(limits.width, limits.num_nodes)


def most_fed(limits: TreeLimits) -> int:
    """Nodes of such a tree that may be read: none of the last level."""
    return (limits.depth - 1) * widest_level(limits)


class NativeTreeDrafts:
    """Trees of up to `batch_size` rows. Not thread-safe: memory is used again by every call."""

    def __init__(self, model: RoundModel, *, batch_size: int) -> None:
        self._lane = Lane(model, batch_size)
        self._rows = (TreeRow * batch_size)()
        self._most_rows = min(model.logits_MV.shape[0], model.forward.max_tokens)
        self._drafts = TreeDrafts(
            model.forward.team,
            self._lane.address,
            ctypes.addressof(self._rows),
            ctypes.addressof(self._lane.unread),
        )
        self._address = ctypes.addressof(self._drafts)
        self._run = function(model.forward.library, "tree_drafts")

    def fits(self, feeds: Sequence[Sequence[int]], limits: Sequence[TreeLimits]) -> bool:
        """Whether buffers have room for what is read of each text and for the widest levels."""
        return (
            len(feeds) <= len(self._rows)
            and sum(map(widest_level, limits)) <= self._most_rows
            and sum(map(len, feeds)) <= len(self._lane.unread)
            and all(map(fits, limits))
        )

    def __call__(
        self, feeds: Sequence[CacheSpan], limits: Sequence[TreeLimits]
    ) -> list[Grown] | None:
        """None if some logits are no numbers, or a token is not in the vocabulary; then memory
        holds nothing that counts."""
        trees = [new_tree(limit) for limit in limits]
        counts = [
            len(feed.unread) + most_fed(limit) for feed, limit in zip(feeds, limits, strict=True)
        ]
        staged = [((c_int32 * count)(), (c_int32 * count)()) for count in counts]
        at = 0
        for index, (feed, tree) in enumerate(zip(feeds, trees, strict=True)):
            row = self._rows[index]
            row.tree = ctypes.addressof(tree)
            row.tokens, row.parents = map(ctypes.addressof, staged[index])
            row.length, row.num_unread = feed.length, len(feed.unread)
            at = self._lane.read(index, feed, at)
        self._drafts.num_rows = len(feeds)
        if not self._run(self._address):
            return None
        grown: list[Grown] = []
        for row, tree, (tokens, parents) in zip(self._rows, trees, staged, strict=False):
            count = row.num_staged
            grown.append(Grown(kept_nodes(tree), tokens[:count], parents[:count]))
        return grown
