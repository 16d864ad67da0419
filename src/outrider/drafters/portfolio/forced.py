"""Tokens that a request's mask leaves no choice of: after them the text can only go on so.

A grammar often allows a single token for a while, as within a keyword or before a quotation mark.
Those tokens are drafts that are always kept. Each costs one call of the mask.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.draft import Draft
from outrider.core.logits import Shaper
from outrider.core.protocols import DraftNeeds, DraftRow
from outrider.drafters.offers import NO_OFFER, Offer


class ForcedDrafter:
    """Chains up to where the mask leaves a choice; nothing for requests without a mask."""

    name = "forced"
    needs = DraftNeeds()

    def open(self, seq_id: int, prompt: Sequence[int]) -> None: ...

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return [offer.draft for offer in self.offers(rows)]

    def offers(self, rows: Sequence[DraftRow]) -> list[Offer]:
        return [NO_OFFER if row.shaper is None else _offer(row, row.shaper) for row in rows]

    def close(self, seq_id: int) -> None: ...


def _offer(row: DraftRow, shaper: Shaper) -> Offer:
    if shaper.allowed is None:
        return NO_OFFER
    text = list(row.tokens[shaper.prompt_length :])
    start = len(text)
    while len(text) - start < row.budget.depth:
        token = _only(shaper, text)
        if token is None:
            break
        text.append(token)
    forced = text[start:]
    return Offer(Draft.chain(forced), (1.0,) * len(forced)) if forced else NO_OFFER


def _only(shaper: Shaper, text: Sequence[int]) -> int | None:
    """The one token that may follow `text`, if there is one alone."""
    mask_V = shaper.mask(text)
    if mask_V is None or int(mask_V.sum()) != 1:
        return None
    return int(mask_V.nonzero()[0, 0])
