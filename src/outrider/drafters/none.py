"""The drafter of empty drafts: plain decoding is the round with one. It has no state."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.draft import Draft
from outrider.core.protocols import DraftNeeds, DraftRow


class Stateless:
    """A base of drafters without state of a sequence."""

    def open(self, seq_id: int, prompt: Sequence[int]) -> None: ...

    def close(self, seq_id: int) -> None: ...


class NoDrafter(Stateless):
    """The drafter for speculation that is off."""

    name = "none"
    needs = DraftNeeds()

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return [Draft.empty()] * len(rows)
