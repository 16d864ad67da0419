"""A handler of signals for tests of interrupts."""

from __future__ import annotations

from dataclasses import dataclass
from types import FrameType


@dataclass(eq=False)
class Bell:
    """Raises `error` while it is armed: elsewhere an alarm would end what runs the tests."""

    error: type[BaseException]
    armed: bool = False
    once: bool = False

    def ring(self, _number: int, _frame: FrameType | None) -> None:
        if self.armed:
            self.armed = not self.once
            raise self.error
