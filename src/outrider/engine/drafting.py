"""The engine's guard around drafters: open sequences, proposals, checks of drafts, drafting ahead.

Drafters are not trusted: a bad, failing or hanging drafter costs drafts and never text. If a
drafter raises for a batch, each row is requested again alone. A row that fails alone, or whose
draft breaks the contract, gets an empty draft and no further drafts, with a sentence that says why.
A temporary lack of memory is not a fault. A drafter that hangs is never called again, because the
thread that it hangs in still owns it.

A request may choose a drafter by name. It is made when the first request chooses it, and serves all
that do; the other requests of a batch keep the engine's drafter, and one target pass verifies all
drafts. A prediction that a request's drafter does not read is tried before that.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import cast

import torch
from torch import Tensor

from outrider.cache.pages import salted
from outrider.core.clock import HOST_CLOCK, Clock, patience
from outrider.core.draft import Draft, DraftPart, Trim
from outrider.core.errors import (
    MOST_WORDS,
    CapacityError,
    ContractError,
    DrafterError,
    OutriderError,
    SequenceError,
    foreign,
    words_of,
)
from outrider.core.process import breakable, is_interrupt
from outrider.core.protocols import (
    AheadRow,
    CacheStore,
    DraftAhead,
    Drafter,
    DraftNeeds,
    DraftRow,
    HasNotes,
    HiddenStates,
    HiddenStore,
    KeepsApart,
    Remembering,
    ShutsDown,
)
from outrider.drafters.portfolio import ReplayScored
from outrider.drafters.prediction import PredictionDrafter
from outrider.engine.round import LiveSequence
from outrider.estimate.acceptance import FadingMean

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Proposals:
    """Drafts by sequence, the reasons for no further drafts, and the seconds taken."""

    drafts: Mapping[int, Draft]
    faults: Mapping[int, str]
    seconds: float = 0.0

    def give(self, batch: Sequence[LiveSequence]) -> None:
        for seq in batch:
            seq.draft = self.drafts.get(seq.seq_id, Draft.empty())
            seq.no_drafts = self.faults.get(seq.seq_id, seq.no_drafts)


@dataclass(frozen=True, slots=True, eq=False)
class DraftingJob:
    """One job that drafted for several sequences."""

    seconds: float


def guarded_drafts(
    drafter: Drafter, rows: Sequence[DraftRow], vocab_size: int
) -> tuple[dict[int, Draft], dict[int, str]]:
    """Return the proposals of `drafter` for `rows`, and the faults of failed rows."""
    if not rows:
        return {}, {}
    try:
        proposed = _proposed(drafter, rows)
    except BaseException as error:
        if is_interrupt(error):
            raise
        if len(rows) == 1 and isinstance(error, CapacityError):
            _log.info("A round of request %d goes without a draft: %s", rows[0].seq_id, error)
            return {}, {}
        if len(rows) == 1:
            return {}, {rows[0].seq_id: _fault_message(drafter, error)}
        return _one_by_one(drafter, rows, vocab_size)
    drafts: dict[int, Draft] = {}
    faults: dict[int, str] = {}
    for row, draft in zip(rows, proposed, strict=True):
        if draft is Draft.empty():
            continue
        fault = _fault_of(drafter, row, draft, vocab_size)
        if fault:
            faults[row.seq_id] = fault
        else:
            drafts[row.seq_id] = cast("Draft", draft)
    return drafts, faults


def _fault_of(drafter: Drafter, row: DraftRow, draft: object, vocab_size: int) -> str:
    try:
        check_draft(name_of(drafter), row, draft, vocab_size)
    except BaseException as error:
        if is_interrupt(error):
            raise
        return _fault_message(drafter, error)
    return ""


def guarded_ahead(drafter: DraftAhead, rows: Sequence[AheadRow]) -> dict[int, str]:
    """Have `drafter` prepare for `rows`; return the faults of the rows for which it failed."""
    if not rows:
        return {}
    try:
        drafter.propose_after(rows)
    except CapacityError:
        return {}
    except BaseException as error:
        if is_interrupt(error):
            raise
        if len(rows) == 1:
            return {rows[0].seq_id: _fault_message(drafter, error)}
        faults: dict[int, str] = {}
        for row in rows:
            faults |= guarded_ahead(drafter, [row])
        return faults
    return {}


def check_draft(name: str, row: DraftRow, draft: object, vocab_size: int) -> None:
    """Check a draft. Raises DrafterError for a value that is no draft, a draft that is too long or
    too large, a token id outside the vocabulary, or invalid distributions."""
    if type(draft) is not Draft:
        raise DrafterError(f"drafter {name!r} returned {_type_of(draft)} instead of a Draft.")
    _check_tree(name, draft)
    if draft.tokens and not 0 <= min(draft.tokens) <= max(draft.tokens) < vocab_size:
        raise DrafterError(f"drafter {name!r} proposed an id that does not exist.")
    if draft.probs_NV is not None:
        _check_distributions(name, draft.probs_NV, (len(draft), vocab_size))
        # On other devices the host would wait for the sum, and the rule finds out anyway. Greedy
        # rounds do not read distributions.
        if row.params.temperature and draft.probs_NV.is_cpu:
            check_numbers(name, draft)
    if draft.max_depth > row.budget.depth:
        raise DrafterError(
            f"drafter {name!r} proposed {draft.max_depth} tokens in a row "
            f"where {row.budget.depth} were requested."
        )
    if len(draft) > row.budget.size:
        raise DrafterError(
            f"drafter {name!r} proposed a tree of {len(draft)} tokens "
            f"where {row.budget.size} were requested."
        )


def _check_tree(name: str, draft: Draft) -> None:
    """Check that a tree has plain ints: 1.0, True and numpy integers are refused."""
    tokens, parents = draft.tokens, draft.parents
    if type(tokens) is not tuple or type(parents) is not tuple:
        lists = f"{_type_of(tokens)} and {_type_of(parents)}"
        raise DrafterError(f"drafter {name!r} returned {lists} instead of tuples of ids.")
    strange = {*map(type, tokens), *map(type, parents)} - {int}
    if strange:
        kinds = ", ".join(sorted(kind.__name__ for kind in strange))
        raise DrafterError(f"drafter {name!r} returned ids of type {kinds}, not int.")
    if type(draft.by) is not str or type(draft.hit) not in (bool, type(None)):
        raise DrafterError(f"drafter {name!r} returned a draft whose origin is not a string.")
    if type(draft.parts) is not tuple or not all(map(_is_part, draft.parts)):
        raise DrafterError(f"drafter {name!r} returned a draft whose parts are not DraftParts.")
    draft.check()


def _is_part(part: DraftPart) -> bool:
    kinds = tuple(map(type, part)) if type(part) is DraftPart else ()
    return kinds == (str, tuple, float, bool) and {*map(type, part.nodes)} <= {int}


def _check_distributions(name: str, probs_NV: object, shape: tuple[int, int]) -> None:
    if type(probs_NV) is not Tensor or not probs_NV.is_floating_point():
        raise DrafterError(
            f"drafter {name!r} reported distributions that are {_type_of(probs_NV)}."
        )
    if probs_NV.shape[1:] != shape[1:]:
        raise DrafterError(
            f"drafter {name!r} reported distributions that are not over the target's {shape[1]} "
            "tokens."
        )
    if probs_NV.shape != shape:
        raise DrafterError(
            f"drafter {name!r} reported {len(probs_NV)} distributions of {shape[0]} tokens."
        )
    if probs_NV.requires_grad or probs_NV.is_meta or probs_NV.layout is not torch.strided:
        raise DrafterError(
            f"drafter {name!r} reported distributions that cannot be read as plain numbers."
        )


def check_numbers(name: str, draft: Draft) -> None:
    """Raise DrafterError if a draft's distributions are not numbers."""
    # A sum has no temporary of the distributions' size, and is finite only if they all are.
    if draft.probs_NV is not None and not math.isfinite(float(draft.probs_NV.sum())):
        raise DrafterError(f"drafter {name!r} reported distributions that are not numbers (NaN).")


def name_of(drafter: Drafter) -> str:
    """Return the drafter's own name, whatever that is."""
    try:
        return str(drafter.name)[:MOST_WORDS]
    except Exception:  # noqa: BLE001 - a drafter may be any code
        return type(drafter).__name__


def _proposed(drafter: Drafter, rows: Sequence[DraftRow]) -> Sequence[object]:
    """Return one value for each row; only their number has been checked."""
    found = cast("object", drafter.propose(rows))
    if not isinstance(found, list | tuple):
        raise DrafterError(
            f"drafter {name_of(drafter)!r} returned {_type_of(found)} instead of a list."
        )
    answer = cast("Sequence[object]", found)
    drafts = list(islice(answer, len(rows) + 1))
    if len(drafts) != len(rows):
        raise DrafterError(
            f"drafter {name_of(drafter)!r} returned {len(answer)} drafts for {len(rows)} rows."
        )
    return drafts


def _type_of(value: object) -> str:
    """Return a phrase for the type of a value: its own text may be anything."""
    return "None" if value is None else f"a value of type {type(value).__name__}"


def _one_by_one(
    drafter: Drafter, rows: Sequence[DraftRow], vocab_size: int
) -> tuple[dict[int, Draft], dict[int, str]]:
    drafts: dict[int, Draft] = {}
    faults: dict[int, str] = {}
    for row in rows:
        some, broken = guarded_drafts(drafter, [row], vocab_size)
        drafts |= some
        faults |= broken
    return drafts, faults


def _fault_message(drafter: Drafter, error: BaseException) -> str:
    cause = error.__cause__ if isinstance(error, SequenceError) and error.__cause__ else error
    reason = f"drafter {name_of(drafter)!r} failed: {words_of(cause)}"
    _log.warning("Speculation is off for a request: %s", reason)
    return reason


# Rows that request drafts, trimming of drafts, and drafts without a pass.
#
# Drafts without a pass go before those of a drafter: tokens that a grammar leaves no choice of, and
# other chains that were chosen, not drawn. So every exact rule keeps the output's distribution.
def draft_row(seq: LiveSequence, depth: int, *, state: CacheStore, needs: DraftNeeds) -> DraftRow:
    """Return the row that requests a draft `depth` deep. `state` is the target's memory; the
    drafter reads the hidden states that it `needs` from it."""
    budget = seq.budget
    hidden = None
    # `isinstance` would look up every member of the protocol, in every round.
    if needs.hidden_layers and hasattr(state, "hidden"):
        store = cast("HiddenStore", state)
        hidden = HiddenStates(store.length(seq.seq_id), partial(store.hidden, seq.seq_id))
    return DraftRow(
        seq.seq_id,
        seq.tokens,
        seq.last,
        budget if budget.depth == depth else replace(budget, depth=depth),
        seq.params,
        seq.rng,
        prediction=seq.prediction,
        shaper=seq.shaper,
        hidden=hidden,
    )


def ahead_row(seq: LiveSequence, window: float = 0.0) -> AheadRow:
    """Return the row that requests drafts of what follows the draft of `seq`, within `window`
    seconds if that is known."""
    start = len(seq.tokens)
    return AheadRow(
        seq_id=seq.seq_id,
        start=start,
        pending=seq.tokens[-1],
        draft=seq.draft,
        budget=seq.budget,
        params=seq.params,
        rng_after=lambda count: seq.rng_at(start + count),
        window=window,
    )


def trimmed(
    batch: Sequence[LiveSequence], drafts: Mapping[int, Draft], trim: Trim | None, most: int | None
) -> Mapping[int, Draft]:
    """Return the `drafts` of `batch` by sequence, cut by `trim` to the lengths that pay, and to
    `most` tokens in all, if given. Only now is each budget's choice known."""
    if not drafts:
        return drafts
    if trim is not None:
        seq_ids = [seq.seq_id for seq in batch]
        cut, choice = trim(seq_ids, [drafts.get(seq_id, Draft.empty()) for seq_id in seq_ids])
        drafts = dict(zip(seq_ids, cut, strict=True))
        for seq in batch:
            seq.budget = replace(seq.budget, choice=choice)
    if most is None or sum(map(len, drafts.values())) <= most:
        return drafts
    # The share does not depend on drawn tokens, so the drafts stay a fair sample.
    share = max(most // len(drafts), 1)
    return {seq_id: draft.first(share) for seq_id, draft in islice(drafts.items(), most)}


Propose = Callable[[Sequence[DraftRow]], tuple[dict[int, Draft], dict[int, str]]]


def with_forced(rows: Sequence[DraftRow], ask: Propose) -> tuple[dict[int, Draft], dict[int, str]]:
    """Return the drafts of `ask` for `rows`, after the tokens that masks force."""
    forced = {row.seq_id: draft for row in rows if (draft := _forced(row)) is not None}
    return offered_first(rows, forced, ask)


def offered_first(
    rows: Sequence[DraftRow], offered: Mapping[int, Draft], ask: Propose
) -> tuple[dict[int, Draft], dict[int, str]]:
    """Return the drafts of `ask` for `rows`, except where an `offered` draft fills half of the
    budget or `ask` has no draft.

    The choice between the two depends on the text and on whether there is a draft, never on the
    tokens that were drawn for it: otherwise the remaining drafts would be a biased sample.
    """
    if not offered:
        return ask(rows)
    drafts, faults = ask([row for row in rows if not _fills(row, offered)])
    more = {seq_id: draft for seq_id, draft in offered.items() if not drafts.get(seq_id)}
    return drafts | more, faults


def _fills(row: DraftRow, offered: Mapping[int, Draft]) -> bool:
    return 2 * len(offered.get(row.seq_id, ())) >= row.budget.depth


def _forced(row: DraftRow) -> Draft | None:
    shaper = row.shaper
    if shaper is None or shaper.constraint is None or not shaper.constraint.knows_forced:
        return None
    try:
        with foreign():
            tokens = shaper.forced(row.tokens, row.budget.depth)
    except OutriderError:
        # The masks of this round will fail in the same way, and end the request.
        return None
    return replace(Draft.chain(tokens), by="forced") if tokens else None


# (drafter, rows) -> drafts and faults by sequence: guarded_drafts (drafting.py).
ProposeWith = Callable[[Drafter, Sequence[DraftRow]], tuple[dict[int, Draft], dict[int, str]]]


def _none_to_choose(name: str) -> Drafter:
    raise ContractError(f"drafter {name!r} cannot be made here")


def _open(drafter: Drafter, seq: LiveSequence) -> None:
    """Open a sequence. A salt keeps requests from learning of each other by drafts, or by how soon
    the drafter has read their texts."""
    with salted(seq.params.cache_salt):
        if seq.params.cache_salt and isinstance(drafter, KeepsApart):
            drafter.open_apart(seq.seq_id, seq.tokens)
        else:
            drafter.open(seq.seq_id, seq.tokens)


@dataclass(slots=True)
class RequestDrafters:
    """The drafters that requests chose. `make` builds a drafter by its name; each is kept once
    made. How much of a prediction is drafted depends on how much of it was right so far."""

    make: Callable[[str], Drafter] = _none_to_choose
    _made: dict[str, Drafter] = field(default_factory=dict[str, Drafter])
    _chosen: dict[int, str] = field(default_factory=dict[int, str])
    # Made for the first request that has a prediction.
    _guesses: ReplayScored | None = None
    _guided: set[int] = field(default_factory=set[int])

    def open(self, seq: LiveSequence, own: Drafter) -> None:
        """Open `seq` with the drafter that it chose, else with the engine's `own`. Raises any error
        of that drafter."""
        seq_id, name = seq.seq_id, seq.speculation.drafter
        if seq.speculation.has_own:
            if name not in self._made:
                self._made[name] = self.make(name)
            _open(self._made[name], seq)
            self._chosen[seq_id] = name
        else:
            _open(own, seq)
        if seq.speculation.is_guided:
            self._guesses = self._guesses or ReplayScored(PredictionDrafter())
            self._guesses.open(seq_id, seq.tokens)
            self._guided.add(seq_id)

    def close(self, seq_id: int, own: Drafter) -> None:
        if self._guesses is not None and seq_id in self._guided:
            self._guided.remove(seq_id)
            self._guesses.close(seq_id)
        name = self._chosen.pop(seq_id, None)
        (own if name is None else self._made[name]).close(seq_id)

    def forget(self) -> None:
        """Forget what the drafters learned from requests. No request may be open."""
        for drafter in self._made.values():
            if isinstance(drafter, Remembering):
                with foreign():
                    drafter.forget()

    def num_likely(self, batch: Sequence[LiveSequence]) -> int:
        """Return how many of the target's likeliest tokens the drafters of `batch` need."""
        if not self._chosen:
            return 0
        chosen = [self._chosen[seq.seq_id] for seq in batch if seq.seq_id in self._chosen]
        return max((self._made[name].needs.num_likely for name in chosen), default=0)

    def drafts(
        self, rows: Sequence[DraftRow], *, own: Drafter, ask: ProposeWith
    ) -> tuple[dict[int, Draft], dict[int, str]]:
        """Return the drafts of `ask` with each row's drafter, after drafts from predictions."""
        offered: dict[int, Draft] = {}
        if self._guesses is not None:
            guided = [row for row in rows if row.seq_id in self._guided]
            offered = {
                row.seq_id: replace(offer.draft, by=self._guesses.name)
                for row, offer in zip(guided, self._guesses.offers(guided), strict=True)
                if offer.draft.tokens
            }
        return offered_first(rows, offered, partial(self._proposed, own=own, ask=ask))

    def _proposed(
        self, rows: Sequence[DraftRow], *, own: Drafter, ask: ProposeWith
    ) -> tuple[dict[int, Draft], dict[int, str]]:
        if not self._chosen:
            return ask(own, rows)
        parts: dict[str, list[DraftRow]] = {}
        for row in rows:
            parts.setdefault(self._chosen.get(row.seq_id, ""), []).append(row)
        drafts: dict[int, Draft] = {}
        faults: dict[int, str] = {}
        for name, part in parts.items():
            some, broken = ask(self._made[name] if name else own, part)
            drafts |= {i: replace(draft, by=draft.by or name) for i, draft in some.items()}
            faults |= broken
        return drafts, faults


@dataclass(slots=True)
class DrafterHandle:
    """A drafter under the engine's guard. `ahead` says that it drafts ahead, `timeout` how many
    seconds it may take; there is no limit for a drafter in the target's memory, which it could
    still write after being given up. `others` are the drafters that requests chose instead."""

    drafter: Drafter
    ahead: bool = False
    timeout: float = 10.0
    clock: Clock = HOST_CLOCK
    others: RequestDrafters = field(default_factory=RequestDrafters)
    hung: str = ""
    _opened: set[int] = field(default_factory=set[int])
    _late: set[int] = field(default_factory=set[int])
    _window: FadingMean = field(default_factory=partial(FadingMean, 0.25))
    _rounds: dict[int, AheadRow] = field(default_factory=dict[int, AheadRow])
    _jobs: dict[int, DraftingJob] = field(default_factory=dict[int, DraftingJob])

    def open(self, seq: LiveSequence) -> None:
        if self.hung:
            seq.no_drafts = self.hung
        if seq.no_drafts:
            return
        if seq.seq_id in self._opened:
            # It was waiting to be closed until nothing is drafted ahead for it.
            self._late.discard(seq.seq_id)
            return
        try:
            with breakable():
                self.others.open(seq, self.drafter)
        except BaseException as error:
            if is_interrupt(error):
                raise
            chosen = seq.speculation.drafter if seq.speculation.has_own else ""
            name, words = chosen or name_of(self.drafter), words_of(error)
            seq.no_drafts = f"drafter {name!r} did not start: {words}"
            _log.warning("Speculation is off for a request: %s", seq.no_drafts, exc_info=True)
        else:
            self._opened.add(seq.seq_id)

    def close(self, seq_id: int, *, in_use: bool) -> None:
        """Close a sequence now, or as soon as nothing is drafted ahead for it any more."""
        self._rounds.pop(seq_id, None)
        self._jobs.pop(seq_id, None)
        if seq_id not in self._opened:
            return
        if in_use:
            self._late.add(seq_id)
            return
        self._opened.discard(seq_id)
        self._late.discard(seq_id)
        if self.hung:
            return
        try:
            self.others.close(seq_id, self.drafter)
        except BaseException as error:
            if is_interrupt(error):
                raise
            _log.warning("A drafter failed to close a sequence.", exc_info=True)

    def forget(self) -> None:
        """Forget what the drafter learned from requests. No request may be open."""
        if isinstance(self.drafter, Remembering) and not self.hung:
            with foreign():
                self.drafter.forget()
        self.others.forget()

    def drafted(self, batch: Sequence[LiveSequence], proposals: Proposals) -> None:
        """Record the end of a drafting job: its drafts wait for their verification."""
        proposals.give(batch)
        self._jobs |= dict.fromkeys([seq.seq_id for seq in batch], DraftingJob(proposals.seconds))

    def take_seconds(self, batch: Sequence[LiveSequence]) -> float:
        """Return the seconds taken by the drafts of `batch`, which is now verified. They may come
        from several jobs, and each job counts once."""
        jobs = {self._jobs.pop(seq.seq_id) for seq in batch if seq.seq_id in self._jobs}
        return sum([job.seconds for job in jobs], 0.0)

    def released(self, seq_ids: Iterable[int]) -> None:
        """Record that nothing is drafted ahead for these sequences any more."""
        for seq_id in self._late.intersection(seq_ids):
            self.close(seq_id, in_use=False)

    def begin(self, batch: Sequence[LiveSequence]) -> None:
        """Record that the drafts of `batch` are now verified, and may be drafted ahead of."""
        if not self.ahead:
            return
        for seq in batch:
            self._rounds.pop(seq.seq_id, None)
            wants_ahead = seq.shaper is None and not seq.no_drafts and not seq.speculation.has_own
            if seq.budget.depth > 0 and wants_ahead:
                self._rounds[seq.seq_id] = ahead_row(seq, self._window.value or 0.0)

    def verified(self, seconds: float) -> None:
        """Record the seconds of a verification during which drafts may be made ahead."""
        self._window.add(seconds)

    def rounds(self, seq_ids: Sequence[int]) -> list[AheadRow]:
        return [self._rounds[seq_id] for seq_id in seq_ids if seq_id in self._rounds]

    def allowance(self, num_new: int) -> float:
        """Return the seconds allowed for a draft before which `num_new` tokens of text are read."""
        return patience(self.timeout, num_new)

    def overdue(self, deadlines: Mapping[str, float]) -> list[str]:
        """Return the drafting lanes that are past their deadlines."""
        now = self.clock()
        return [lane for lane, deadline in deadlines.items() if now > deadline]

    def patience(self, deadlines: Mapping[str, float]) -> float | None:
        """Return the seconds until the first of these lanes is overdue; None if no lane can be."""
        soonest = min(deadlines.values(), default=math.inf)
        return None if soonest == math.inf else max(soonest - self.clock(), 0.0) + 0.001

    @property
    def notes(self) -> tuple[str, ...]:
        """The drafter's notes for the user."""
        return self.drafter.notes if isinstance(self.drafter, HasNotes) else ()

    def shut_down(self) -> None:
        """End the drafter's process, if it has one."""
        if isinstance(self.drafter, ShutsDown):
            with foreign():
                self.drafter.shut_down()

    def give_up(self) -> None:
        self.hung = f"drafter {self.drafter.name!r} gave no answer for {self.timeout:g} seconds."
        _log.error("Speculation is off: %s", self.hung)
