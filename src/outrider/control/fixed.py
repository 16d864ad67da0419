"""The same budget every round."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.budget import Budget, RoundTrace


class FixedController:
    """Ignores what it observes."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def budgets(self, seq_ids: Sequence[int]) -> list[Budget]:
        return [self._budget] * len(seq_ids)

    def observe(self, trace: RoundTrace) -> None:
        del trace
