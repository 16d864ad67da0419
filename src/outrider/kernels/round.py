"""A whole speculative round of a batch as one native call: draft, verify, accept.

See csrc/round.cpp. The stages in Python (`engine/stages.py`) define what a round gives; this one
gives the same tokens, and where a number is none it gives nothing, so that the stages can say what.

Shapes:  M = logits rows, V = vocabulary, L = drafted tokens of all rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch

from outrider.core.errors import ContractError
from outrider.kernels.round_memory import MAX_DEPTH, Feed, Lane, Round, RoundModel, Row

RULES = {"token": 0, "block": 1, "match": 2}


@dataclass(frozen=True, slots=True)
class RoundRow:
    """One sequence of a round. `drafted` is a chain that somebody else chose; else `draft` is what
    the draft model reads, and `depth` is how many tokens it drafts, none without a `draft`."""

    seed: int
    sample: int
    start: int
    temperature: float
    target: Feed
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    drafted: Sequence[int] = ()
    draft: Feed | None = None
    depth: int = 0


@dataclass(frozen=True, slots=True)
class RoundVerdict:
    """The chain, how much of it was kept, and the target's own token after that."""

    drafted: tuple[int, ...]
    num_accepted: int
    next_token: int


@dataclass(frozen=True, slots=True)
class Decided:
    """A verdict a row; seconds are those of all draft passes, and of the target's."""

    verdicts: Sequence[RoundVerdict]
    draft_seconds: float
    verify_seconds: float


class NativeRounds:
    """Rounds of up to `batch_size` rows. Not thread-safe: memory is used again by every round.

    `rule` is a name in RULES. Without a `draft` the rows bring their drafts.
    """

    def __init__(
        self, target: RoundModel, draft: RoundModel | None, *, batch_size: int, rule: str
    ) -> None:
        self._target = Lane(target, batch_size)
        self._draft = None if draft is None else Lane(draft, batch_size)
        self._rows = (Row * batch_size)()
        self._drafts = (c_int32 * (batch_size * MAX_DEPTH))()
        num_logits, vocab_size = target.logits_MV.shape
        self._best = (c_int64 * num_logits)()
        self._leftover_V = torch.empty(vocab_size)
        self._laws_LV = torch.empty(0)
        self._round = Round(
            target.forward.team,
            self._target.address,
            None if self._draft is None else self._draft.address,
            ctypes.addressof(self._rows),
            vocab_size=vocab_size,
            rule=RULES[rule],
            drafts=ctypes.addressof(self._drafts),
            unread_target=ctypes.addressof(self._target.unread),
            unread_draft=None if self._draft is None else ctypes.addressof(self._draft.unread),
            leftover=self._leftover_V.data_ptr(),
            best=ctypes.addressof(self._best),
        )
        self._address = ctypes.addressof(self._round)
        self._run: Any = target.forward.library.outrider_round
        self._run.argtypes = (c_void_p,)
        self._run.restype = ctypes.c_int

    def fits(self, rows: Sequence[RoundRow]) -> bool:
        """Whether buffers have room for the round."""
        num_drafted = [row.depth or len(row.drafted) for row in rows]
        num_logits = sum(num_drafted) + len(rows)
        num_read = sum(len(row.target.unread) for row in rows) + sum(num_drafted)
        num_drafting = sum(len(row.draft.unread) for row in rows if row.draft)
        return (
            len(rows) <= len(self._rows)
            and max(num_drafted) <= MAX_DEPTH
            and num_logits <= len(self._best)
            and num_read <= len(self._target.unread)
            and (self._draft is None or num_drafting <= len(self._draft.unread))
        )

    def __call__(self, rows: Sequence[RoundRow]) -> Decided | None:
        """None if some law is none or a token is foreign; memory then holds nothing of it."""
        depths = [row.depth or len(row.drafted) for row in rows]
        most = max(depths)
        self._take(rows, depths, most)
        self._round.num_rows, self._round.most_depth = len(rows), most
        if self._draft is not None and any(row.temperature for row in rows):
            self._round.laws = self._laws(len(rows) * most)
        if not self._run(self._address):
            return None
        verdicts = [
            RoundVerdict(
                tuple(self._drafts[index * most : index * most + depth]),
                self._rows[index].num_accepted,
                self._rows[index].next,
            )
            for index, depth in enumerate(depths)
        ]
        return Decided(verdicts, self._round.draft_seconds, self._round.verify_seconds)

    def _take(self, rows: Sequence[RoundRow], depths: Sequence[int], most: int) -> None:
        at_target = at_draft = 0
        for index, (row, depth) in enumerate(zip(rows, depths, strict=True)):
            told = self._rows[index]
            told.seed, told.sample, told.start = row.seed, row.sample, row.start
            told.temperature, told.depth = row.temperature, depth
            told.top_k, told.top_p, told.min_p = row.top_k, row.top_p, row.min_p
            told.target_length, told.target_unread = row.target.length, len(row.target.unread)
            at_target = self._target.read(index, row.target, at_target)
            if row.drafted:
                self._drafts[index * most : index * most + depth] = row.drafted
            if row.draft is not None:
                if self._draft is None:
                    raise ContractError("there is no draft")
                told.draft_length, told.draft_unread = row.draft.length, len(row.draft.unread)
                at_draft = self._draft.read(index, row.draft, at_draft)

    def _laws(self, count: int) -> int:
        """Room for so many laws. A longer batch or draft than ever before makes it anew."""
        if self._laws_LV.shape[0] < count:
            self._laws_LV = torch.empty(count, self._leftover_V.shape[0])
        return self._laws_LV.data_ptr()
