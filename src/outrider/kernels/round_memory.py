"""What a native round is made of, laid out as in csrc/round.h: models, rows and room.

Shapes:  M = logits rows, V = vocabulary (of heads: the ids that they draft).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import (
    Structure,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_uint32,
    c_uint64,
    c_void_p,
)
from dataclasses import dataclass

from torch import Tensor

from outrider.kernels.forward import NativeForward
from outrider.kernels.native import Pass

MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class RoundModel:
    """`logits_MV` is room for what a pass wants; `page_size` is that of the model's arena. `ids_V`
    (int64) are the ids that the logits of heads are of, None for the whole vocabulary."""

    forward: NativeForward
    logits_MV: Tensor
    page_size: int
    ids_V: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Feed:
    """What one model reads of a sequence: `unread` tokens after `length` that it holds. `pages` has
    room for them and for the draft: always the same object of a sequence, which only grows."""

    length: int
    unread: Sequence[int]
    pages: Sequence[int]


class Memory(Structure):
    _fields_ = [
        ("decoder", c_void_p),
        ("described", Pass),
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("seq", c_void_p),
        ("visible", c_void_p),
        ("wanted", c_void_p),
        ("logits", c_void_p),
        ("states", c_void_p),
        ("own", c_void_p),
        ("ids", c_void_p),
        ("num_wanted", c_int32),
        ("num_logits", c_int32),
        ("state_size", c_int32),
        ("unused", c_int32),
    ]


class Row(Structure):
    _fields_ = [
        ("seed", c_uint64),
        ("sample", c_uint32),
        ("start", c_uint32),
        ("temperature", c_float),
        ("depth", c_int32),
        ("target_length", c_int32),
        ("target_unread", c_int32),
        ("draft_length", c_int32),
        ("draft_unread", c_int32),
        ("num_accepted", c_int32),
        ("next", c_int32),
        ("top_k", c_int64),
        ("top_p", c_double),
        ("min_p", c_double),
    ]


class Round(Structure):
    _fields_ = [
        ("team", c_void_p),
        ("target", c_void_p),
        ("draft", c_void_p),
        ("rows", c_void_p),
        ("num_rows", c_int32),
        ("most_depth", c_int32),
        ("vocab_size", c_int32),
        ("rule", c_int32),
        ("drafts", c_void_p),
        ("unread_target", c_void_p),
        ("unread_draft", c_void_p),
        ("laws", c_void_p),
        ("leftover", c_void_p),
        ("best", c_void_p),
        ("draft_seconds", c_double),
        ("verify_seconds", c_double),
    ]


class Lane:
    """One model's side: room for the plan of a pass, and the tokens that it is given to read."""

    def __init__(self, model: RoundModel, batch_size: int) -> None:
        self._model = model  # whose tensors `memory` points to
        forward, size = model.forward, model.forward.max_tokens
        self._batch_size = batch_size
        self.unread = (c_int32 * size)()
        self._columns = [(c_int32 * size)() for _ in range(6)]
        self.memory = Memory(forward.address, forward.blank_pass(model.page_size))
        described = self.memory.described
        tokens, positions, slots, seq, visible, wanted = map(ctypes.addressof, self._columns)
        described.positions, described.slots = positions, slots
        described.seq, described.visible = seq, visible
        self.memory.tokens, self.memory.positions, self.memory.slots = tokens, positions, slots
        self.memory.seq, self.memory.visible, self.memory.wanted = seq, visible, wanted
        self.memory.logits = model.logits_MV.data_ptr()
        self.memory.num_logits = model.logits_MV.shape[1]
        if forward.entrance is not None:
            self.memory.states = forward.entrance.states_ND.data_ptr()
            self.memory.own = forward.entrance.own_ND.data_ptr()
            self.memory.state_size = forward.entrance.states_ND.shape[1]
        if model.ids_V is not None:
            self.memory.ids = model.ids_V.data_ptr()
        self._held: list[tuple[Sequence[int], int]] = [((), 0)] * batch_size
        self._num_columns, self._pages = 0, (c_int32 * 0)()
        self._widen(16)

    @property
    def address(self) -> int:
        return ctypes.addressof(self.memory)

    def read(self, row: int, feed: Feed, start: int) -> int:
        """Note `feed` as that of `row`, its tokens from `start` on; where the next ones begin."""
        end = start + len(feed.unread)
        self.unread[start:end] = feed.unread
        held, num_listed = self._held[row]
        pages, count = feed.pages, len(feed.pages)
        if pages is held and count == num_listed:
            return end
        # Until all are written, which an interrupt may prevent, the row holds none.
        self._held[row] = (), 0
        if count > self._num_columns:
            self._widen(2 * count)
        at = row * self._num_columns
        self._pages[at : at + count] = pages
        self._held[row] = pages, count
        return end

    def _widen(self, num_columns: int) -> None:
        """Make room for so many pages a row; rows keep those that they have."""
        pages = (c_int32 * (num_columns * self._batch_size))()
        for row, (_, count) in enumerate(self._held):
            old, new = row * self._num_columns, row * num_columns
            pages[new : new + count] = self._pages[old : old + count]
        described, address = self.memory.described, ctypes.addressof(pages)
        # One statement, which no interrupt divides: the old table is freed by it.
        self._pages, self._num_columns, described.pages, described.num_page_columns = (
            pages, num_columns, address, num_columns,
        )  # fmt: skip
