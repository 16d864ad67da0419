"""The greedy trees of a batch as one native call (csrc/tree_drafts.cpp).

As in kernels/chains.py, the states that the first pass of heads reads are to lie in the entrance's
`states_ND` when the call is made.

Shapes:  B = rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_int32, c_void_p
from dataclasses import dataclass
from typing import Any

from outrider.core.tree_nodes import KeptNodes, TreeLimits
from outrider.kernels.round_memory import Feed, Lane, RoundModel
from outrider.kernels.trees.native import fits, kept_nodes, new_tree


class TreeRow(Structure):
    """As in csrc/tree_drafts.cpp."""

    _fields_ = [
        ("tree", c_void_p),
        ("tokens", c_void_p),
        ("parents", c_void_p),
        ("length", c_int32),
        ("num_unread", c_int32),
        ("num_staged", c_int32),
        ("unused", c_int32),
    ]


class TreeDrafts(Structure):
    """As in csrc/tree_drafts.cpp."""

    _fields_ = [
        ("team", c_void_p),
        ("memory", c_void_p),
        ("rows", c_void_p),
        ("unread", c_void_p),
        ("num_rows", c_int32),
        ("unused", c_int32),
    ]


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
        self._run: Any = model.forward.library.outrider_tree_drafts
        self._run.argtypes = (c_void_p,)
        self._run.restype = ctypes.c_int

    def fits(self, feeds: Sequence[Sequence[int]], limits: Sequence[TreeLimits]) -> bool:
        """Whether buffers have room for what is read of each text and for the widest levels."""
        return (
            len(feeds) <= len(self._rows)
            and sum(map(widest_level, limits)) <= self._most_rows
            and sum(map(len, feeds)) <= len(self._lane.unread)
            and all(map(fits, limits))
        )

    def __call__(self, feeds: Sequence[Feed], limits: Sequence[TreeLimits]) -> list[Grown] | None:
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
