"""A drafter whose every row carries one guess of the output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from outrider.core.draft import Draft
from outrider.core.protocols import DraftNeeds, DraftRow
from outrider.drafters.prediction import PredictionDrafter


@dataclass(frozen=True, slots=True)
class Guessing:
    """The shipped drafter, given `guess` for whatever sequence."""

    guess: tuple[int, ...]
    drafter: PredictionDrafter = field(default_factory=PredictionDrafter)
    name: str = "prediction"
    needs: DraftNeeds = PredictionDrafter.needs

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        self.drafter.open(seq_id, prompt)

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return self.drafter.propose([replace(row, prediction=self.guess) for row in rows])

    def close(self, seq_id: int) -> None:
        self.drafter.close(seq_id)
