"""A clock that a test sets."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.errors import ContractError


@dataclass(slots=True)
class FakeClock:
    """Stands still until it is told to go on."""

    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        if not seconds >= 0:
            raise ContractError("a clock never goes back")
        self.seconds += seconds
