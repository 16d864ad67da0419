"""Scores a drafter that has none by what it would have drafted.

A lookup costs nothing, so it is asked every round. The text that follows says how much of its
answer was right, whoever was asked to propose: so its acceptance is known for each request without
drafting by it. The tokens of a round are judged as far as the round went, and what the text had
not reached is no refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.core.draft import Draft
from outrider.core.protocols import Drafter, DraftNeeds, DraftRow
from outrider.drafters.offers import LEAST_KEPT, NO_OFFER, Offer
from outrider.estimate.acceptance import Acceptance
from outrider.estimate.theory import prefix_products

# Places that are told apart; those behind them are kept as the last one is.
_NUM_PLACES = 8


@dataclass(slots=True)
class Shadowed:
    """An `Offerer` from `drafter`, whose drafts are chains and chosen deterministically. It is
    asked only for rows that it `serves`; None is all of them."""

    drafter: Drafter
    serves: Callable[[DraftRow], bool] | None = None
    _acceptance: Acceptance = field(default_factory=lambda: Acceptance(_NUM_PLACES))
    _answers: dict[int, tuple[int, tuple[int, ...]]] = field(
        default_factory=dict[int, tuple[int, tuple[int, ...]]]
    )

    @property
    def name(self) -> str:
        return self.drafter.name

    @property
    def needs(self) -> DraftNeeds:
        return self.drafter.needs

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        self.drafter.open(seq_id, prompt)

    def offers(self, rows: Sequence[DraftRow]) -> list[Offer]:
        served = rows if self.serves is None else [row for row in rows if self.serves(row)]
        if not served:
            return [NO_OFFER] * len(rows)
        for row in served:
            self._judge(row)
        drafts = self.drafter.propose(served)
        pairs = zip(served, drafts, strict=True)
        offers = {row.seq_id: self._offer(row, draft) for row, draft in pairs}
        return [offers.get(row.seq_id, NO_OFFER) for row in rows]

    def close(self, seq_id: int) -> None:
        self._answers.pop(seq_id, None)
        self.drafter.close(seq_id)

    def _judge(self, row: DraftRow) -> None:
        start, drafted = self._answers.pop(row.seq_id, (0, ()))
        if not drafted:
            return
        written = tuple(row.tokens[start : start + len(drafted)])
        kept = 0
        for token, wanted in zip(drafted, written, strict=False):
            if token != wanted:
                break
            kept += 1
        self._acceptance.observe(row.seq_id, len(written), kept)

    def _offer(self, row: DraftRow, draft: Draft) -> Offer:
        if not draft.tokens:
            return NO_OFFER
        self._answers[row.seq_id] = len(row.tokens), draft.tokens
        rates = self._acceptance.rates(row.seq_id)
        rates += rates[-1:] * (len(draft) - len(rates))
        kept = prefix_products(rates[: len(draft)])
        kept = [probability for probability in kept if probability >= LEAST_KEPT]
        return Offer(Draft.chain(draft.tokens[: len(kept)]), tuple(kept)) if kept else NO_OFFER
