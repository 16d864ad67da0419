"""The drafts of a batch as one native call: what a native round does before it verifies.

See `outrider_drafts` in csrc/round.cpp. For drafters that read hidden states, and so cannot be part
of the round itself: the states that their first pass reads are made in Python, and are to lie in
the entrance's `states_ND` when the call is made.

Shapes:  B = rows, K = depth of the deepest draft, V = vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.kernels.round_memory import MAX_DEPTH, Feed, Lane, Round, RoundModel, Row


@dataclass(frozen=True, slots=True)
class ChainRow:
    """One sequence: what is read of it, how deep to draft, and how tokens are chosen; temperature 0
    is greedy and needs no numbers."""

    feed: Feed
    depth: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    sample: int = 0
    start: int = 0


@dataclass(frozen=True, slots=True)
class Chains:
    """The drafts of all rows; `laws_BKV` are what those at a temperature were drawn from, None if
    all are greedy."""

    drafted: Sequence[Sequence[int]]
    laws_BKV: Tensor | None


class NativeChains:
    """Drafts of up to `batch_size` rows. Not thread-safe: memory is used again by every call."""

    def __init__(self, model: RoundModel, *, batch_size: int, vocab_size: int) -> None:
        self._lane = Lane(model, batch_size)
        self._rows = (Row * batch_size)()
        self._drafts = (c_int32 * (batch_size * MAX_DEPTH))()
        self._best = (c_int64 * batch_size)()
        self._max_logits, self._vocab_size = model.logits_MV.shape[0], vocab_size
        self._round = Round(
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
        self._run: Any = model.forward.library.outrider_drafts
        self._run.argtypes = (c_void_p,)
        self._run.restype = ctypes.c_int

    def fits(self, rows: Sequence[ChainRow]) -> bool:
        """Whether buffers have room for the drafts, each of one token at least."""
        return (
            len(rows) <= min(len(self._rows), self._max_logits)
            and all(0 < row.depth <= MAX_DEPTH for row in rows)
            and sum(len(row.feed.unread) for row in rows) <= len(self._lane.unread)
        )

    def __call__(self, rows: Sequence[ChainRow]) -> Chains | None:
        """None if some logits are no numbers; memory then holds nothing that counts."""
        most, at = max(row.depth for row in rows), 0
        for index, row in enumerate(rows):
            told = self._rows[index]
            told.seed, told.sample, told.start = row.seed, row.sample, row.start
            told.temperature, told.depth = row.temperature, row.depth
            told.top_k, told.top_p, told.min_p = row.top_k, row.top_p, row.min_p
            told.draft_length, told.draft_unread = row.feed.length, len(row.feed.unread)
            at = self._lane.read(index, row.feed, at)
        self._round.num_rows, self._round.most_depth = len(rows), most
        laws_BKV = None
        if any(row.temperature for row in rows):
            laws_BKV = torch.empty(len(rows), most, self._vocab_size)
            self._round.laws = laws_BKV.data_ptr()
        if not self._run(self._address):
            return None
        drafted = [self._drafts[i * most : i * most + row.depth] for i, row in enumerate(rows)]
        return Chains(drafted, laws_BKV)
