"""Requests for drafts, that are due or ahead of a verdict, and the cut of drafts to what pays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import cast

from outrider.core.draft import Draft, Trim
from outrider.core.protocols import (
    AheadRow,
    CacheStore,
    DraftNeeds,
    DraftRow,
    HiddenStates,
    HiddenStore,
)
from outrider.core.sequence import LiveSequence


def draft_row(seq: LiveSequence, depth: int, *, state: CacheStore, needs: DraftNeeds) -> DraftRow:
    """For a draft `depth` deep. `state` is the target's memory, of whose hidden states the drafter
    reads what it `needs`."""
    budget = seq.budget
    hidden = None
    # `isinstance` would ask for every member of the protocol, in every round.
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
    """What a drafter needs to draft what follows the draft of `seq`, in `window` seconds if that is
    known."""
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
    batch: Sequence[LiveSequence],
    drafts: Mapping[int, Draft],
    trim: Trim | None,
    most: int | None,
) -> Mapping[int, Draft]:
    """The `drafts` of `batch` by sequence, cut to what pays by `trim`, and to `most` tokens in all,
    where these are given. The choice of each budget is known only now."""
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
    # A length that depends on nothing drawn: each gets its share.
    share = max(most // len(drafts), 1)
    return {seq_id: draft.first(share) for seq_id, draft in islice(drafts.items(), most)}
