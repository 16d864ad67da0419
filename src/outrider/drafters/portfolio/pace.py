"""What the portfolio's model costs, in passes of the target: measured between its own calls.

From one answer to the next question the target verifies, so the time between them is that of a
pass, and now and then of a rest besides. Medians leave rests out, and rounds that something slowed
down.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median_low

from outrider.core.clock import HOST_CLOCK, Clock
from outrider.core.cost_meter import ASSUMED_DRAFT

_WINDOW = 31
# Before so many measurements of both, what is assumed of any drafter stands.
_SETTLED = 5


def _times() -> deque[float]:
    return deque(maxlen=_WINDOW)


@dataclass(slots=True)
class Pace:
    clock: Clock = HOST_CLOCK
    _passes: deque[float] = field(default_factory=_times)
    _tokens: deque[float] = field(default_factory=_times)
    _ended: float | None = None
    _share: float | None = None

    def asked(self) -> None:
        """A round begins."""
        if self._ended is not None:
            self._passes.append(self.clock() - self._ended)
            self._share = None

    def answered(self) -> None:
        """Drafts were handed over."""
        self._ended = self.clock()

    def drafted(self, seconds: float, num_passes: int) -> None:
        """The model drafted in `seconds`, with so many passes of its own."""
        self._tokens.append(seconds / num_passes)
        self._share = None

    @property
    def share(self) -> float:
        """The time of one of the model's passes as a share of the target's."""
        if self._share is None:
            self._share = self._measured()
        return self._share

    def _measured(self) -> float:
        if min(len(self._passes), len(self._tokens)) < _SETTLED:
            return ASSUMED_DRAFT
        verifying = median_low(self._passes)
        return median_low(self._tokens) / verifying if verifying > 0 else ASSUMED_DRAFT
