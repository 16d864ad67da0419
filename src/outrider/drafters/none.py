"""Proposes nothing: plain decoding is the round with an empty draft."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.draft import Draft
from outrider.core.protocols import DraftNeeds, DraftRow


class NoDrafter:
    """The one way to say that speculation is off."""

    name = "none"
    needs = DraftNeeds()

    def open(self, seq_id: int, prompt: Sequence[int]) -> None: ...

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return [Draft.empty()] * len(rows)

    def close(self, seq_id: int) -> None: ...
