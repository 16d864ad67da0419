"""Whole speculative rounds of a batch as one native call: draft, verify, accept.

See csrc/round.cpp; rows and models are laid out as in csrc/round.h. The stages in Python
(engine/stages.py) define a round; the native round gives the same tokens, and returns nothing where
a number is NaN, so that the stages can say what went wrong. Chains alone are in chains.py, trees in
trees.py.

What is made for each row of each round is not frozen, since that takes three times as long.

Shapes:  V = vocabulary (of drafts: the ids that are drafted), M = logits rows, N = nodes of a
         draft, L = drafted tokens of all rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.errors import given
from outrider.core.logits import SparseShaping
from outrider.kernels.native.forward import NativeForward
from outrider.kernels.native.ops import PassStruct, function, struct_fields

# Of one draft; as in csrc/trees.h.
MOST_NODES = 256
# Acceptance rules, as in csrc/round.h.
RULES = {"token": 0, "block": 1, "match": 2, "coupled": 3}


@dataclass(frozen=True, slots=True)
class RoundModel:
    """`logits_MV` is room for what a pass wants; `page_size` is that of the model's arena. `ids_V`
    (int64) are the ids that the first logits of a row are of, the others being of none; None for
    the whole vocabulary."""

    forward: NativeForward
    logits_MV: Tensor
    page_size: int
    ids_V: Tensor | None = None


@dataclass(slots=True)
class CacheSpan:
    """What one model reads of a sequence: `unread` tokens after `length` that it holds. `pages` has
    room for them and for the draft: always the same object of a sequence, which only grows."""

    length: int
    unread: Sequence[int]
    pages: Sequence[int]


class MemoryStruct(Structure):
    _fields_ = struct_fields(
        (c_void_p, "decoder"),
        (PassStruct, "described"),
        (c_void_p, "tokens positions slots seq visible wanted logits states own ids"),
        (c_int32, "num_wanted num_logits state_size num_ids"),
    )


class Row(Structure):
    _fields_ = struct_fields(
        (c_uint64, "seed"),
        (c_uint32, "sample start"),
        (c_float, "temperature"),
        (c_int32, "num_drafted target_length target_unread draft_length draft_unread"),
        (c_int32, "num_accepted next wants_laws branch_place rule unused"),
        (c_int64, "top_k"),
        (c_double, "top_p min_p"),
        (c_void_p, "shaping parents drawn_from"),
    )


class ShapingStruct(Structure):
    _fields_ = struct_fields(
        (c_void_p, "bias_ids seen_ids biases counts"),
        (c_int32, "num_biases num_seen"),
        (c_float, "repetition frequency presence unused"),
    )

    def tell(self, shaping: SparseShaping) -> None:
        """Points into lists that may move when the text grows."""
        self.bias_ids, self.num_biases = shaping.bias_ids.buffer_info()
        self.seen_ids, self.num_seen = shaping.seen_ids.buffer_info()
        self.biases, _ = shaping.biases.buffer_info()
        self.counts, _ = shaping.counts.buffer_info()
        self.repetition = shaping.repetition
        self.frequency, self.presence = shaping.frequency, shaping.presence


class RoundStruct(Structure):
    _fields_ = struct_fields(
        (c_void_p, "team target draft rows"),
        (c_int32, "num_rows most_drafted vocab_size unused"),
        (c_void_p, "drafts paths unread_target unread_draft leftover best"),
        (c_double, "draft_seconds verify_seconds"),
    )


class Lane:
    """One model's side: room for the plan of a pass, and the tokens that it is given to read."""

    def __init__(self, model: RoundModel, batch_size: int) -> None:
        self._model = model  # whose tensors `memory` points to
        forward, size = model.forward, model.forward.max_tokens
        self._batch_size = batch_size
        self.unread = (c_int32 * size)()
        self._columns = [(c_int32 * size)() for _ in range(6)]
        self.memory = MemoryStruct(forward.address, forward.blank_pass(model.page_size))
        described = self.memory.described
        tokens, positions, slots, seq, visible, wanted = map(ctypes.addressof, self._columns)
        described.positions, described.slots = positions, slots
        described.seq, described.visible = seq, visible
        self.memory.tokens, self.memory.positions, self.memory.slots = tokens, positions, slots
        self.memory.seq, self.memory.visible, self.memory.wanted = seq, visible, wanted
        self.memory.logits = model.logits_MV.data_ptr()
        self.memory.num_logits = self.memory.num_ids = model.logits_MV.shape[1]
        if forward.entrance is not None:
            self.memory.states = forward.entrance.states_ND.data_ptr()
            self.memory.own = forward.entrance.own_ND.data_ptr()
            self.memory.state_size = forward.entrance.states_ND.shape[1]
        if model.ids_V is not None:
            self.memory.ids, self.memory.num_ids = model.ids_V.data_ptr(), len(model.ids_V)
        self._held: list[tuple[Sequence[int], int]] = [((), 0)] * batch_size
        self._num_columns, self._pages = 0, (c_int32 * 0)()
        self._widen(16)

    @property
    def address(self) -> int:
        return ctypes.addressof(self.memory)

    def read(self, row: int, feed: CacheSpan, start: int) -> int:
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


@dataclass(frozen=True, slots=True)
class Draws:
    """How the tokens of one draft are chosen; temperature 0 is greedy and needs no numbers. `rule`
    is a name in RULES: for the coupled one they are drawn by races."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    sample: int = 0
    start: int = 0
    rule: str = "token"


def tell(told: Row, draws: Draws | RoundRow, num_drafted: int) -> None:
    """How so many tokens are chosen."""
    told.seed, told.sample, told.start = draws.seed, draws.sample, draws.start
    told.temperature, told.num_drafted = draws.temperature, num_drafted
    told.top_k, told.top_p, told.min_p = draws.top_k, draws.top_p, draws.min_p
    told.rule = RULES[draws.rule]


@dataclass(slots=True)
class RoundRow:
    """One sequence of a round. `drafted` are tokens of somebody else's draft, drawn from `probs_NV`
    (plain float32) or chosen if that is None; a chain without `parents`. Else `draft` is what the
    draft model reads, and `depth` is how many tokens it drafts, none without a `draft`. `rule` is a
    name in RULES."""

    seed: int
    sample: int
    start: int
    temperature: float
    target: CacheSpan
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    drafted: Sequence[int] = ()
    parents: Sequence[int] | None = None
    probs_NV: Tensor | None = None
    draft: CacheSpan | None = None
    depth: int = 0
    shaping: SparseShaping | None = None
    wants_laws: bool = False
    rule: str = "token"

    @property
    def num_drafted(self) -> int:
        return self.depth or len(self.drafted)


@dataclass(slots=True)
class RoundVerdict:
    """The drafted tokens, which of them were kept, and the target's own token after that."""

    drafted: tuple[int, ...]
    path: tuple[int, ...]
    next_token: int


@dataclass(frozen=True, slots=True)
class Decided:
    """A verdict a row; seconds are those of all draft passes, and of the target's."""

    verdicts: Sequence[RoundVerdict]
    draft_seconds: float
    verify_seconds: float


class Drafts:
    """What a call is told of the drafts of up to `batch_size` rows, and what it says of them; there
    is room for `most` tokens a row."""

    def __init__(self, batch_size: int, most: int = MOST_NODES) -> None:
        self.rows = (Row * batch_size)()
        self._tokens, self._parents, self._paths = (
            (c_int32 * (batch_size * most))() for _ in range(3)
        )
        self._parents_address = ctypes.addressof(self._parents)

    def described_in(self, described: RoundStruct) -> None:
        described.rows = ctypes.addressof(self.rows)
        described.drafts = ctypes.addressof(self._tokens)
        described.paths = ctypes.addressof(self._paths)

    def tell(self, index: int, row: RoundRow, start: int) -> Row:
        """`row` as that of this index, whose draft begins at `start` of all."""
        told, count = self.rows[index], row.num_drafted
        tell(told, row, count)
        told.wants_laws = row.wants_laws
        told.parents = told.drawn_from = None
        if row.drafted:
            self._tokens[start : start + count] = row.drafted
        if row.parents is not None:
            self._parents[start : start + count] = row.parents
            told.parents = self._parents_address + start * ctypes.sizeof(c_int32)
        if row.probs_NV is not None:
            told.drawn_from = row.probs_NV.data_ptr()
        return told

    def verdict(self, index: int, start: int) -> RoundVerdict:
        told = self.rows[index]
        drafted = tuple(self._tokens[start : start + told.num_drafted])
        return RoundVerdict(
            drafted, tuple(self._paths[start : start + told.num_accepted]), told.next
        )


class NativeRounds:
    """Rounds of up to `batch_size` rows. Not thread-safe: memory is used again by every round.

    Without a `draft` the rows bring their drafts.
    """

    def __init__(self, target: RoundModel, draft: RoundModel | None, *, batch_size: int) -> None:
        self._target = Lane(target, batch_size)
        self._draft = None if draft is None else Lane(draft, batch_size)
        self._drafts = Drafts(batch_size)
        self._rows, self._shapings = self._drafts.rows, (ShapingStruct * batch_size)()
        num_logits, vocab_size = target.logits_MV.shape
        self._best = (c_int64 * num_logits)()
        self._leftover_V = torch.empty(vocab_size)
        self._probs_LV = torch.empty(0)
        self._round = RoundStruct(
            target.forward.team,
            self._target.address,
            None if self._draft is None else self._draft.address,
            vocab_size=vocab_size,
            unread_target=ctypes.addressof(self._target.unread),
            unread_draft=None if self._draft is None else ctypes.addressof(self._draft.unread),
            leftover=self._leftover_V.data_ptr(),
            best=ctypes.addressof(self._best),
        )
        self._drafts.described_in(self._round)
        self._address = ctypes.addressof(self._round)
        self._run = function(target.forward.library, "round")

    def fits(self, rows: Sequence[RoundRow]) -> bool:
        """Whether buffers have room for the round."""
        num_drafted = [row.num_drafted for row in rows]
        num_logits = sum(num_drafted) + len(rows)
        num_read = sum(len(row.target.unread) for row in rows) + sum(num_drafted)
        num_drafting = sum(len(row.draft.unread) for row in rows if row.draft)
        return (
            len(rows) <= len(self._rows)
            and max(num_drafted) <= MOST_NODES
            and num_logits <= len(self._best)
            and num_read <= len(self._target.unread)
            and (self._draft is None or num_drafting <= len(self._draft.unread))
        )

    def __call__(self, rows: Sequence[RoundRow]) -> Decided | None:
        """None if some distribution is none or a token is foreign; memory then holds nothing of
        it."""
        most = max(row.num_drafted for row in rows)
        self._take(rows, most)
        self._round.num_rows, self._round.most_drafted = len(rows), most
        if not self._run(self._address):
            return None
        verdicts = [self._drafts.verdict(index, index * most) for index in range(len(rows))]
        return Decided(verdicts, self._round.draft_seconds, self._round.verify_seconds)

    def _take(self, rows: Sequence[RoundRow], most: int) -> None:
        at_target = at_draft = 0
        for index, row in enumerate(rows):
            told = self._drafts.tell(index, row, index * most)
            told.shaping = None
            if row.shaping is not None:
                self._shapings[index].tell(row.shaping)
                told.shaping = ctypes.addressof(self._shapings[index])
            told.target_length, told.target_unread = row.target.length, len(row.target.unread)
            at_target = self._target.read(index, row.target, at_target)
            if row.draft is not None:
                told.draft_length, told.draft_unread = row.draft.length, len(row.draft.unread)
                at_draft = given(self._draft, "draft").read(index, row.draft, at_draft)
                if row.temperature:
                    room = self._distributions(len(rows) * most)
                    told.drawn_from = room[index * most].data_ptr()

    def _distributions(self, count: int) -> Tensor:
        """Room for so many distributions. A longer batch or draft than ever before makes it
        anew."""
        if self._probs_LV.shape[0] < count:
            self._probs_LV = torch.empty(count, self._leftover_V.shape[0])
        return self._probs_LV
