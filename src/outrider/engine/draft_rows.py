"""What a drafter is told of a sequence: for a draft that is due, and for one ahead of a verdict."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import cast

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
