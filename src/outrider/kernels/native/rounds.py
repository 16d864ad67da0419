"""Whole speculative rounds of a batch as one native call: draft, verify, accept.

See csrc/round.cpp; rows and models are laid out as in csrc/round.h. The stages in Python
(engine/stages.py) define a round. The native round gives the same tokens, and returns None if a
number is NaN, so that the stages can report what went wrong. `NativeChains` drafts chains without
a round (`outrider_drafts` of csrc/round.cpp), for drafters that read hidden states: the caller has
written these to the entrance's `states_ND`. sampling.py has trees. `NativeLookups`
reads the new tokens of a text and drafts its continuation (csrc/suffix.cpp, csrc/ngram.cpp), as
drafters/suffix.py and drafters/ngram.py define it, with the same bits.

Dataclasses that are made for each row of each round are not frozen, which would take three times as
long.

Shapes:  V = vocabulary (of drafts: the ids that are drafted), M = logits rows, N = nodes of a
         draft, L = drafted tokens of all rows, B = rows, K = depth of the deepest draft.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import Structure, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.draft import Budget
from outrider.core.errors import ContractError, given
from outrider.core.logits import NodeLimits, SparseShaping
from outrider.kernels.native.forward import NativeForward
from outrider.kernels.native.ops import PassStruct, function, struct_fields
from outrider.kernels.native.shaping import DraftShaping, Shapings, ShapingStruct

# Nodes of one draft at most; as in csrc/trees.h.
MOST_NODES = 256
# Acceptance rules, as in csrc/round.h.
RULES = {"token": 0, "block": 1, "match": 2, "coupled": 3}


@dataclass(frozen=True, slots=True)
class RoundModel:
    """A model in a round. `logits_MV` is the buffer for the logits of a pass; `page_size` is that
    of the model's arena. `ids_V` (int64) are the token ids of the first logits of a row, and the
    other logits belong to no token; None if logits are those of the whole vocabulary."""

    forward: NativeForward
    logits_MV: Tensor
    page_size: int
    ids_V: Tensor | None = None


@dataclass(slots=True)
class CacheSpan:
    """The tokens of a sequence that a model reads: `unread`, after `length` cached ones. `pages`
    have slots for these and for the draft: always the same object, which only grows."""

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


class RoundStruct(Structure):
    _fields_ = struct_fields(
        (c_void_p, "team target draft rows"),
        (c_int32, "num_rows most_drafted vocab_size mask_token"),
        (c_void_p, "drafts paths unread_target unread_draft leftover best"),
        (c_double, "draft_seconds verify_seconds"),
        (c_void_p, "likely shares"),
        (c_int32, "num_likely unused"),
    )


class Lane:
    """One model's side: buffers for the plan of a pass and for the tokens that the model reads."""

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
        """Set `feed` of `row`, with its tokens from `start` of the buffer on; return their end."""
        end = start + len(feed.unread)
        self.unread[start:end] = feed.unread
        held, num_listed = self._held[row]
        pages, count = feed.pages, len(feed.pages)
        if pages is held and count == num_listed:
            return end
        # Until all pages are written, which an interrupt may prevent, the row counts as empty.
        self._held[row] = (), 0
        if count > self._num_columns:
            self._widen(2 * count)
        at = row * self._num_columns
        self._pages[at : at + count] = pages
        self._held[row] = pages, count
        return end

    def _widen(self, num_columns: int) -> None:
        """Enlarge the table to `num_columns` pages for each row, and copy the rows' pages."""
        pages = (c_int32 * (num_columns * self._batch_size))()
        for row, (_, count) in enumerate(self._held):
            old, new = row * self._num_columns, row * num_columns
            pages[new : new + count] = self._pages[old : old + count]
        described, address = self.memory.described, ctypes.addressof(pages)
        # One statement, which no interrupt divides: it frees the old table.
        self._pages, self._num_columns, described.pages, described.num_page_columns = (
            pages, num_columns, address, num_columns,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Draws:
    """The sampling of one draft. Temperature 0 is greedy and needs no random numbers. `rule` is a
    name in RULES; for the coupled rule, tokens are drawn by races."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    sample: int = 0
    start: int = 0
    rule: str = "token"


def describe_draws(native: Row, draws: Draws | RoundRow, num_drafted: int) -> None:
    """Write to `native_row` the sampling of a draft of `num_drafted` tokens."""
    native.seed, native.sample, native.start = draws.seed, draws.sample, draws.start
    native.temperature, native.num_drafted = draws.temperature, num_drafted
    native.top_k, native.top_p, native.min_p = draws.top_k, draws.top_p, draws.min_p
    native.rule = RULES[draws.rule]


@dataclass(slots=True)
class RoundRow:
    """One sequence of a round. `drafted` are tokens of a draft made outside the round: sampled from
    `probs_NV` (contiguous float32), or greedy if that is None; a chain if `parents` is None.
    Otherwise the draft model reads the span `draft` and drafts `depth` tokens; without a `draft`
    there are none. Only a row with `shaping` may have `limits`, and only for a draft made outside.
    `rule` is a name in RULES."""

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
    limits: NodeLimits | None = None
    wants_laws: bool = False
    rule: str = "token"

    @property
    def num_drafted(self) -> int:
        return self.depth or len(self.drafted)


@dataclass(slots=True)
class RoundVerdict:
    """The drafted tokens, the path of the accepted ones, and the target's own token after it."""

    drafted: tuple[int, ...]
    path: tuple[int, ...]
    next_token: int


@dataclass(frozen=True, slots=True)
class Decided:
    """A verdict for each row, and the seconds of all draft passes and of the target's pass; the
    likeliest tokens after each row of logits, best first, if any were requested."""

    verdicts: Sequence[RoundVerdict]
    draft_seconds: float
    verify_seconds: float
    likely: tuple[tuple[int, ...], ...] = ()


class Drafts:
    """The drafts of up to `batch_size` rows, of at most `most` tokens each, and the verdicts."""

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

    def describe(self, index: int, row: RoundRow, start: int) -> Row:
        """Write `row` to the native row `index`; its draft begins at `start` of all tokens."""
        native, count = self.rows[index], row.num_drafted
        describe_draws(native, row, count)
        native.wants_laws = row.wants_laws
        native.parents = native.drawn_from = None
        if row.drafted:
            self._tokens[start : start + count] = row.drafted
        if row.parents is not None:
            self._parents[start : start + count] = row.parents
            native.parents = self._parents_address + start * ctypes.sizeof(c_int32)
        if row.probs_NV is not None:
            native.drawn_from = row.probs_NV.data_ptr()
        return native

    def verdict(self, index: int, start: int) -> RoundVerdict:
        native = self.rows[index]
        if not native.num_drafted:
            return RoundVerdict((), (), native.next)
        drafted = tuple(self._tokens[start : start + native.num_drafted])
        return RoundVerdict(
            drafted, tuple(self._paths[start : start + native.num_accepted]), native.next
        )


class NativeRounds:
    """Runs rounds of up to `batch_size` rows. Not thread-safe: every round reuses the buffers.

    Without a `draft` model, rows come with their drafts. A `mask` is that of NativeChains.
    """

    def __init__(
        self, target: RoundModel, draft: RoundModel | None, *, batch_size: int, mask: int = -1
    ) -> None:
        self._target = Lane(target, batch_size)
        self._draft = None if draft is None else Lane(draft, batch_size)
        self._max_drafted = 0 if draft is None else len(draft.logits_MV)
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
            mask_token=mask,
            unread_target=ctypes.addressof(self._target.unread),
            unread_draft=None if self._draft is None else ctypes.addressof(self._draft.unread),
            leftover=self._leftover_V.data_ptr(),
            best=ctypes.addressof(self._best),
        )
        self._drafts.described_in(self._round)
        self._address = ctypes.addressof(self._round)
        self._run = function(target.forward.library, "round")

    def fits(self, rows: Sequence[RoundRow]) -> bool:
        """True if the buffers are large enough for the round."""
        num_drafted = [row.num_drafted for row in rows]
        num_logits = sum(num_drafted) + len(rows)
        num_read = sum(len(row.target.unread) for row in rows) + sum(num_drafted)
        num_drafting = sum(len(row.draft.unread) for row in rows if row.draft)
        num_masks = 0
        if self._round.mask_token >= 0:
            num_masks = sum(max(number - 1, 0) for number in num_drafted)
        return (
            len(rows) <= len(self._rows)
            and max(num_drafted) <= MOST_NODES
            and num_logits <= len(self._best)
            and num_read <= len(self._target.unread)
            and (self._draft is None or num_drafting + num_masks <= len(self._draft.unread))
            and (num_masks == 0 or sum(num_drafted) <= self._max_drafted)
        )

    def __call__(self, rows: Sequence[RoundRow], num_likely: int = 0) -> Decided | None:
        """Run a round. None for NaN or a token outside the vocabulary; then nothing is cached."""
        most, described = max(row.num_drafted for row in rows), self._round
        self._take(rows, most)
        described.num_rows, described.most_drafted = len(rows), most
        num_logits = len(rows) + sum(row.num_drafted for row in rows)
        likely = ((c_int32 * num_likely) * num_logits)()
        shares = ((c_float * num_likely) * num_logits)()
        described.likely, described.shares = map(ctypes.addressof, (likely, shares))
        described.num_likely = num_likely
        if not self._run(self._address):
            return None
        verdicts = [self._drafts.verdict(index, index * most) for index in range(len(rows))]
        ranked = tuple(tuple(row) for row in likely) if num_likely else ()
        return Decided(verdicts, described.draft_seconds, described.verify_seconds, ranked)

    def _take(self, rows: Sequence[RoundRow], most: int) -> None:
        at_target = at_draft = 0
        for index, row in enumerate(rows):
            native = self._drafts.describe(index, row, index * most)
            native.shaping = None
            if row.shaping is not None:
                native.shaping = self._shapings[index].of(row.shaping, row.limits)
            native.target_length, native.target_unread = (
                row.target.length,
                len(row.target.unread),
            )
            at_target = self._target.read(index, row.target, at_target)
            if row.draft is not None:
                native.draft_length, native.draft_unread = (
                    row.draft.length,
                    len(row.draft.unread),
                )
                at_draft = given(self._draft, "draft").read(index, row.draft, at_draft)
                if row.temperature:
                    probs_LV = self._distributions(len(rows) * most)
                    native.drawn_from = probs_LV[index * most].data_ptr()

    def _distributions(self, count: int) -> Tensor:
        """A buffer for `count` distributions, allocated anew if the last one is too small."""
        if self._probs_LV.shape[0] < count:
            self._probs_LV = torch.empty(count, self._leftover_V.shape[0])
        return self._probs_LV


@dataclass(frozen=True, slots=True)
class ChainRow:
    """One sequence: the span that the model reads, the depth of the draft, and the sampling, after
    `shaping`, if there is any. A chain that branches off a staged one sees `feed.length` positions;
    its own tokens get positions from `branch_place` on, after all staged ones."""

    feed: CacheSpan
    depth: int
    draws: Draws
    branch_place: int = 0
    shaping: DraftShaping | None = None


@dataclass(frozen=True, slots=True)
class DraftedChains:
    """The drafts of all rows; `probs_BKV` are the distributions of samples, None if all greedy."""

    drafted: Sequence[Sequence[int]]
    probs_BKV: Tensor | None


class NativeChains:
    """Drafts chains of up to `batch_size` rows. With a `mask`, which is read in place of tokens not
    drafted yet, one pass drafts them all. Not thread-safe: every call reuses the buffers."""

    def __init__(
        self, model: RoundModel, *, batch_size: int, vocab_size: int, mask: int = -1
    ) -> None:
        self._lane = Lane(model, batch_size)
        self._rows, self._shapings = (Row * batch_size)(), Shapings(vocab_size)
        self._drafts = (c_int32 * (batch_size * MOST_NODES))()
        self._best = (c_int64 * batch_size)()
        self._max_logits, self._vocab_size = model.logits_MV.shape[0], vocab_size
        self._round = RoundStruct(
            model.forward.team,
            None,
            self._lane.address,
            ctypes.addressof(self._rows),
            vocab_size=vocab_size,
            mask_token=mask,
            drafts=ctypes.addressof(self._drafts),
            unread_draft=ctypes.addressof(self._lane.unread),
            best=ctypes.addressof(self._best),
        )
        self._address = ctypes.addressof(self._round)
        self._run = function(model.forward.library, "drafts")

    def fits(self, rows: Sequence[ChainRow]) -> bool:
        """True if the buffers are large enough for the drafts, each of one token at least."""
        num_masks = 0
        if self._round.mask_token >= 0:
            num_masks = sum(row.depth - 1 for row in rows)
        return (
            len(rows) <= len(self._rows)
            and len(rows) + num_masks <= self._max_logits
            and all(0 < row.depth <= MOST_NODES for row in rows)
            and sum(len(row.feed.unread) for row in rows) + num_masks <= len(self._lane.unread)
        )

    def __call__(self, rows: Sequence[ChainRow]) -> DraftedChains | None:
        """Draft all rows. None for NaN logits, after which the KV cache has nothing valid of it.
        Raises SequenceError for a mask that fails."""
        most, at = max(row.depth for row in rows), 0
        probs_BKV = None
        if any(row.draws.temperature for row in rows):
            probs_BKV = torch.empty(len(rows), most, self._vocab_size)
        for index, row in enumerate(rows):
            native = self._rows[index]
            describe_draws(native, row.draws, row.depth)
            native.shaping = self._shapings.of(index, row.shaping)
            native.draft_length, native.draft_unread = row.feed.length, len(row.feed.unread)
            native.branch_place = row.branch_place
            if probs_BKV is not None:
                native.drawn_from = probs_BKV[index].data_ptr()
            at = self._lane.read(index, row.feed, at)
        self._round.num_rows, self._round.most_drafted = len(rows), most
        if not self._run(self._address):
            self._shapings.check()
            return None
        drafted = [self._drafts[i * most : i * most + row.depth] for i, row in enumerate(rows)]
        return DraftedChains(drafted, probs_BKV)


class SuffixSettings(Structure):
    """The struct of the same name in csrc/suffix.cpp."""

    _fields_ = struct_fields(
        (c_double * 20, "first_hits"),
        (c_double, "first_trials fade shared_fade likeness evenness highest"),
        (c_double, "least_kept least_in_tree"),
        (c_int64, "most_states"),
        (c_int32, "most_children unused"),
    )


class NgramSettings(Structure):
    """The struct of the same name in csrc/ngram.cpp."""

    _fields_ = struct_fields(
        (c_double * 6, "first"),
        (c_double, "weight evenness fade highest least_begun least_gone_on"),
        (c_int32 * 16, "kinds"),
        (c_int32, "max_n min_n"),
    )


class LookupRoom(Structure):
    """The struct of the same name in csrc/lookups.h: buffers of a call."""

    _fields_ = struct_fields((c_void_p, "unread tokens parents kept"))


class NativeTexts:
    """Texts of requests. One thread at a time may call `offer`, whose buffers are reused; other
    threads may open and close texts at the same time."""

    branches = False

    def __init__(self, library: ctypes.CDLL, make: str, settings: Structure) -> None:
        self._address: int = function(library, make)(ctypes.addressof(settings))
        weakref.finalize(self, function(library, "lookup_free"), self._address)
        self._open, self._offer, self._close = (
            function(library, f"lookup_{name}") for name in ("open", "offer", "close")
        )
        # The sequences that native code has, also at the moment of an interrupt.
        self._num_read: dict[int, int] = {}
        self._most_unread = self._most_nodes = 0
        self._widen(64, 64)

    def open(self, seq_id: int, prompt_length: int) -> None:
        self._open(self._address, seq_id, prompt_length)
        self._num_read[seq_id] = 0

    def offer(
        self, seq_id: int, tokens: Sequence[int], budget: Budget
    ) -> tuple[tuple[int, ...], tuple[float, ...], tuple[int, ...] | None] | None:
        """Draft the continuation of a text, as `Texts` in drafters/common/context.py defines it."""
        start, depth, size = self._num_read[seq_id], budget.depth, budget.size
        unread = tokens[start:]
        count = len(unread)
        if count > self._most_unread or size > self._most_nodes:
            self._widen(count, size)
        self._unread[:count] = unread
        self._num_read[seq_id] = start + count
        found = self._offer(self._address, seq_id, count, depth, size, self._buffers_address)
        if not found:
            return None
        parents = tuple(self._parents[:found]) if self.branches and size > depth else None
        return tuple(self._tokens[:found]), tuple(self._kept[:found]), parents

    def close(self, seq_id: int) -> None:
        del self._num_read[seq_id]
        self._close(self._address, seq_id)

    def _widen(self, num_unread: int, num_nodes: int) -> None:
        most_unread = max(num_unread, self._most_unread)
        most_nodes = max(num_nodes, self._most_nodes)
        unread, kept = (c_int32 * most_unread)(), (c_double * most_nodes)()
        tokens, parents = (c_int32 * most_nodes)(), (c_int32 * most_nodes)()
        buffers = LookupRoom(*map(ctypes.addressof, (unread, tokens, parents, kept)))
        address = ctypes.addressof(buffers)
        # One statement, which no interrupt divides: it frees the old buffers.
        (
            self._buffers, self._buffers_address, self._most_unread, self._most_nodes,
            self._unread, self._tokens, self._parents, self._kept,
        ) = buffers, address, most_unread, most_nodes, unread, tokens, parents, kept  # fmt: skip


class NativeSuffix(NativeTexts):
    """Texts that are remembered after their requests, and a corpus."""

    branches = True

    def __init__(self, library: ctypes.CDLL, settings: SuffixSettings) -> None:
        super().__init__(library, "suffix", settings)
        self._learn, self._forget, self._states = (
            function(library, f"suffix_{name}") for name in ("learn", "forget", "states")
        )

    @property
    def num_states(self) -> int:
        return self._states(self._address)

    def learn(self, text: Sequence[int]) -> None:
        tokens = (c_int32 * len(text))()
        tokens[:] = text
        self._learn(self._address, ctypes.addressof(tokens), len(text))

    def forget(self) -> None:
        if self._num_read:
            raise ContractError("requests are open")
        self._forget(self._address)


@dataclass(frozen=True, slots=True)
class NativeLookups:
    """Makes objects that look texts up with `library`. `team` is the address of the kernels' team,
    for other calls of drafters (`kernels/native/ops.py`)."""

    library: ctypes.CDLL
    team: int = 0

    def suffix(self, settings: SuffixSettings) -> NativeSuffix:
        return NativeSuffix(self.library, settings)

    def ngram(self, settings: NgramSettings) -> NativeTexts:
        return NativeTexts(self.library, "ngram", settings)
