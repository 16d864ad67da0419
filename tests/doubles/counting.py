"""Wrappers that record what passes through a seam, and a drafter whose rows carry a guess each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from outrider.core.draft import Budget, Draft, RoundTrace
from outrider.core.protocols import CacheStore, CausalLM, DraftNeeds, DraftRow, StepOutput, StepRow
from outrider.core.spec import ModelSpec
from outrider.drafters.prediction import PredictionDrafter


@dataclass(slots=True)
class CountingLM:
    """Every step's rows, in `steps`."""

    model: CausalLM
    steps: list[tuple[StepRow, ...]] = field(default_factory=list[tuple[StepRow, ...]])

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def state(self) -> CacheStore:
        return self.model.state

    def step(self, rows: Sequence[StepRow], needs: DraftNeeds) -> StepOutput:
        self.steps.append(tuple(rows))
        return self.model.step(rows, needs)


@dataclass(slots=True)
class CyclingController:
    """Gives each sequence the next of `depths` at every question."""

    depths: tuple[int, ...]
    observed: list[RoundTrace] = field(default_factory=list[RoundTrace])
    asked: dict[int, int] = field(default_factory=dict[int, int])

    def budgets(self, seq_ids: Sequence[int]) -> list[Budget]:
        return [self._next(seq_id) for seq_id in seq_ids]

    def _next(self, seq_id: int) -> Budget:
        turn = self.asked.get(seq_id, 0)
        self.asked[seq_id] = turn + 1
        return Budget(self.depths[turn % len(self.depths)])

    def observe(self, trace: RoundTrace) -> None:
        self.observed.append(trace)


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
