"""The draft chains of a batch as one native call (`outrider_drafts` of csrc/round.cpp).

Drafters that read hidden states cannot be part of a native round. This call makes their drafts from
the states that the caller has written to the entrance's `states_ND`.

Shapes:  B = rows, K = depth of the deepest draft, V = vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_int64
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.native.ops import function
from outrider.kernels.native.rounds import (
    MOST_NODES,
    CacheSpan,
    Draws,
    Lane,
    RoundModel,
    RoundStruct,
    Row,
    describe_draws,
)


@dataclass(frozen=True, slots=True)
class ChainRow:
    """One sequence: the span that the model reads, the depth of the draft, and the sampling. A
    chain that branches off a staged one sees `feed.length` positions; its own tokens get positions
    from `branch_place` on, after all staged ones."""

    feed: CacheSpan
    depth: int
    draws: Draws
    branch_place: int = 0


@dataclass(frozen=True, slots=True)
class DraftedChains:
    """The drafts of all rows; `probs_BKV` are the distributions of samples, None if all greedy."""

    drafted: Sequence[Sequence[int]]
    probs_BKV: Tensor | None


class NativeChains:
    """Drafts chains of up to `batch_size` rows. Not thread-safe: every call reuses the buffers."""

    def __init__(self, model: RoundModel, *, batch_size: int, vocab_size: int) -> None:
        self._lane = Lane(model, batch_size)
        self._rows = (Row * batch_size)()
        self._drafts = (c_int32 * (batch_size * MOST_NODES))()
        self._best = (c_int64 * batch_size)()
        self._max_logits, self._vocab_size = model.logits_MV.shape[0], vocab_size
        self._round = RoundStruct(
            model.forward.team,
            None,
            self._lane.address,
            ctypes.addressof(self._rows),
            vocab_size=vocab_size,
            drafts=ctypes.addressof(self._drafts),
            unread_draft=ctypes.addressof(self._lane.unread),
            best=ctypes.addressof(self._best),
        )
        self._address = ctypes.addressof(self._round)
        self._run = function(model.forward.library, "drafts")

    def fits(self, rows: Sequence[ChainRow]) -> bool:
        """True if the buffers are large enough for the drafts, each of one token at least."""
        return (
            len(rows) <= min(len(self._rows), self._max_logits)
            and all(0 < row.depth <= MOST_NODES for row in rows)
            and sum(len(row.feed.unread) for row in rows) <= len(self._lane.unread)
        )

    def __call__(self, rows: Sequence[ChainRow]) -> DraftedChains | None:
        """Draft all rows. None for NaN logits, after which the KV cache has nothing valid of it."""
        most, at = max(row.depth for row in rows), 0
        probs_BKV = None
        if any(row.draws.temperature for row in rows):
            probs_BKV = torch.empty(len(rows), most, self._vocab_size)
        for index, row in enumerate(rows):
            native = self._rows[index]
            describe_draws(native, row.draws, row.depth)
            native.draft_length, native.draft_unread = row.feed.length, len(row.feed.unread)
            native.branch_place = row.branch_place
            if probs_BKV is not None:
                native.drawn_from = probs_BKV[index].data_ptr()
            at = self._lane.read(index, row.feed, at)
        self._round.num_rows, self._round.most_drafted = len(rows), most
        if not self._run(self._address):
            return None
        drafted = [self._drafts[i * most : i * most + row.depth] for i, row in enumerate(rows)]
        return DraftedChains(drafted, probs_BKV)
