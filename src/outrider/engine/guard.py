"""Drafters are not trusted: whatever one does, requests go on, and the target sees no bad draft.

A drafter that raises for a batch is asked again for each row alone, so that one request's fault is
not the others'. A row that fails alone, or whose draft breaks the contract, gets an empty draft and
a sentence that says why nothing will be drafted for it any more. Memory that is full just now is no
fault: that round goes without a draft.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.core.draft import Draft
from outrider.core.errors import CapacityError, DrafterError, SequenceError
from outrider.core.protocols import AheadRow, DraftAhead, Drafter, DraftRow
from outrider.core.sequence import LiveSequence

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Proposals:
    """Drafts by sequence, why there will be none any more, and what it all took."""

    drafts: Mapping[int, Draft]
    faults: Mapping[int, str]
    seconds: float = 0.0

    def give(self, batch: Sequence[LiveSequence]) -> None:
        for seq in batch:
            seq.draft = self.drafts.get(seq.seq_id, Draft.empty())
            seq.draft_seconds = self.seconds
            seq.no_drafts = self.faults.get(seq.seq_id, seq.no_drafts)


def guarded_drafts(
    drafter: Drafter, rows: Sequence[DraftRow], vocab_size: int
) -> tuple[dict[int, Draft], dict[int, str]]:
    """What `drafter` proposes for `rows`, and the faults of those that it failed for."""
    if not rows:
        return {}, {}
    try:
        proposed = _asked(drafter, rows)
    except Exception as error:  # noqa: BLE001 - a drafter may be anybody's code
        if len(rows) == 1 and isinstance(error, CapacityError):
            _log.info("A round of request %d goes without a draft: %s", rows[0].seq_id, error)
            return {}, {}
        if len(rows) == 1:
            return {}, {rows[0].seq_id: _told(drafter, error)}
        return _one_by_one(drafter, rows, vocab_size)
    drafts: dict[int, Draft] = {}
    faults: dict[int, str] = {}
    for row, draft in zip(rows, proposed, strict=True):
        if draft is Draft.empty():
            continue
        try:
            check_draft(drafter.name, row, draft, vocab_size)
        except DrafterError as error:
            faults[row.seq_id] = _told(drafter, error)
        else:
            drafts[row.seq_id] = draft
    return drafts, faults


def guarded_ahead(drafter: DraftAhead, rows: Sequence[AheadRow]) -> dict[int, str]:
    """Have `drafter` prepare for `rows`; the faults of those that it failed for."""
    if not rows:
        return {}
    try:
        drafter.propose_after(rows)
    except CapacityError:
        return {}
    except Exception as error:  # noqa: BLE001 - a drafter may be anybody's code
        if len(rows) == 1:
            return {rows[0].seq_id: _told(drafter, error)}
        faults: dict[int, str] = {}
        for row in rows:
            faults |= guarded_ahead(drafter, [row])
        return faults
    return {}


def check_draft(name: str, row: DraftRow, draft: Draft, vocab_size: int) -> None:
    """Raises DrafterError for a draft that is too long or too large, a foreign id or laws that are
    none."""
    if draft.tokens and not 0 <= min(draft.tokens) <= max(draft.tokens) < vocab_size:
        raise DrafterError(f"drafter {name!r} proposed an id that does not exist.")
    laws_NV = draft.probs_NV
    if laws_NV is not None and laws_NV.shape[1:] != (vocab_size,):
        raise DrafterError(
            f"drafter {name!r} reported laws that are not over the target's {vocab_size} tokens."
        )
    if draft.max_depth > row.budget.depth:
        raise DrafterError(
            f"drafter {name!r} proposed {draft.max_depth} tokens in a row "
            f"where {row.budget.depth} were asked for."
        )
    if len(draft) > row.budget.size:
        raise DrafterError(
            f"drafter {name!r} proposed a tree of {len(draft)} tokens "
            f"where {row.budget.size} were asked for."
        )


def check_numbers(name: str, draft: Draft) -> None:
    """Raises DrafterError if the laws that a draft was drawn from are not numbers."""
    if draft.probs_NV is not None and not bool(draft.probs_NV.isfinite().all()):
        raise DrafterError(f"drafter {name!r} reported laws that are not numbers (NaN).")


def _asked(drafter: Drafter, rows: Sequence[DraftRow]) -> Sequence[Draft]:
    drafts = drafter.propose(rows)
    if len(drafts) != len(rows):
        raise DrafterError(
            f"drafter {drafter.name!r} returned {len(drafts)} drafts for {len(rows)} rows."
        )
    return drafts


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


def _told(drafter: Drafter, error: Exception) -> str:
    cause = error.__cause__ if isinstance(error, SequenceError) and error.__cause__ else error
    reason = f"drafter {drafter.name!r} failed: {cause or type(cause).__name__}"
    _log.warning("Speculation is off for a request: %s", reason)
    return reason
