"""Drafters of requests besides the engine's own: drafters that they chose, and predictions.

A request chooses a drafter by name. It is made when the first request chooses it, and serves all
that do; the other requests of a batch keep the engine's drafter, and one target pass verifies all
drafts. A prediction that a request's drafter does not read is tried before that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import cast

from outrider.core.draft import Draft, Trim
from outrider.core.errors import ContractError, OutriderError, foreign
from outrider.core.protocols import (
    AheadRow,
    CacheStore,
    Drafter,
    DraftNeeds,
    DraftRow,
    HiddenStates,
    HiddenStore,
    KeepsApart,
    Remembering,
)
from outrider.core.sequence import LiveSequence
from outrider.drafters.portfolio import ReplayScored
from outrider.drafters.prediction import PredictionDrafter


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
    """Open a sequence. A salt keeps requests from learning of each other by drafts."""
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
    _guesses: ReplayScored = field(default_factory=lambda: ReplayScored(PredictionDrafter()))
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
            self._guesses.open(seq_id, seq.tokens)
            self._guided.add(seq_id)

    def close(self, seq_id: int, own: Drafter) -> None:
        if seq_id in self._guided:
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
        proposed = partial(self._proposed, own=own, ask=ask)
        guided = [row for row in rows if row.seq_id in self._guided] if self._guided else []
        pairs = zip(guided, self._guesses.offers(guided), strict=True) if guided else ()
        offered = {
            row.seq_id: replace(offer.draft, by=self._guesses.name)
            for row, offer in pairs
            if offer.draft.tokens
        }
        return offered_first(rows, offered, proposed)

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
