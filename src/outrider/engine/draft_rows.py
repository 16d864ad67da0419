"""Rows that request drafts, trimming of drafts, and drafts without a pass.

Drafts without a pass go before those of a drafter: tokens that a grammar leaves no choice of, and
other chains that were chosen, not drawn. So every exact rule keeps the output's distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import cast

from outrider.core.draft import Draft, Trim
from outrider.core.errors import OutriderError, foreign
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


Ask = Callable[[Sequence[DraftRow]], tuple[dict[int, Draft], dict[int, str]]]


def with_forced(rows: Sequence[DraftRow], ask: Ask) -> tuple[dict[int, Draft], dict[int, str]]:
    """Return the drafts of `ask` for `rows`, after the tokens that masks force."""
    forced = {row.seq_id: draft for row in rows if (draft := _forced(row)) is not None}
    return offered_first(rows, forced, ask)


def offered_first(
    rows: Sequence[DraftRow], offered: Mapping[int, Draft], ask: Ask
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
