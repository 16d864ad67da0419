"""Drafts nothing: plain decoding is the round with an empty draft. No sequence is remembered."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.draft import Draft
from outrider.core.protocols import DraftNeeds, DraftRow


class Stateless:
    """A part of drafters that keep nothing of a sequence."""

    def open(self, seq_id: int, prompt: Sequence[int]) -> None: ...

    def close(self, seq_id: int) -> None: ...


class NoDrafter(Stateless):
    """The one way to say that speculation is off."""

    name = "none"
    needs = DraftNeeds()

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return [Draft.empty()] * len(rows)
