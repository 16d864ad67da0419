"""Drafts that cost no pass go before those of a drafter: tokens that a grammar leaves no choice of,
which are nearly always accepted, and other chains that were chosen, not drawn. So every exact rule
keeps the output's distribution."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from outrider.core.draft import Draft
from outrider.core.errors import OutriderError, foreign
from outrider.core.protocols import DraftRow

Ask = Callable[[Sequence[DraftRow]], tuple[dict[int, Draft], dict[int, str]]]


def with_forced(rows: Sequence[DraftRow], ask: Ask) -> tuple[dict[int, Draft], dict[int, str]]:
    """What `ask` says of `rows`, after the tokens that masks force."""
    forced = {row.seq_id: draft for row in rows if (draft := _forced(row)) is not None}
    return offered_first(rows, forced, ask)


def offered_first(
    rows: Sequence[DraftRow], offered: Mapping[int, Draft], ask: Ask
) -> tuple[dict[int, Draft], dict[int, str]]:
    """What `ask` says of `rows`, save those whose `offered` draft fills half of the budget, and
    those that it has no draft for.

    Which of the two it is depends on the text and on whether there is a draft, never on the tokens
    that were drawn for it: otherwise the drafts that are kept would be no fair sample of those
    that were drawn.
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
