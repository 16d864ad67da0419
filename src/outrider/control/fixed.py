"""The same budget every round."""

from __future__ import annotations

from outrider.core.budget import Budget, RoundTrace


class FixedController:
    """Ignores what it observes."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def budget(self, seq_id: int) -> Budget:
        del seq_id
        return self._budget

    def observe(self, trace: RoundTrace) -> None:
        del trace
