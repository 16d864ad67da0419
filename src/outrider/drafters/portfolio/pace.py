"""What the portfolio's model costs, in passes of the target: measured between its own calls.

From one answer to the next question the target verifies, so the time between them is that of a
pass, and now and then of a rest besides. A draft is compared with the very pass that verified it:
machines are slow at one time and fast at another, and a model that was not asked for long was
measured at another time than the passes of late. The median leaves rests out, and rounds that
something slowed down.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median_low

from outrider.core.clock import HOST_CLOCK, Clock
from outrider.estimate.cost import ASSUMED_DRAFT

# A row beside the first one, as a share of a pass.
ROW_COST = 0.04
_WINDOW = 31
# Before so many measurements, what is assumed of any drafter stands.
_SETTLED = 5


@dataclass(slots=True)
class Pace:
    """`_drafting` is what a token of the draft took that is being verified, 0 if the model did not
    draft or had to catch up; `_slowed` is how much longer its rows make the pass."""

    clock: Clock = HOST_CLOCK
    _shares: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    _ended: float = 0.0
    _drafting: float = 0.0
    _slowed: float = 1.0
    _share: float = ASSUMED_DRAFT

    def asked(self) -> None:
        """A round begins."""
        if not self._drafting:
            return
        passing = (self.clock() - self._ended) / self._slowed
        if passing > 0:
            self._shares.append(self._drafting / passing)
            if len(self._shares) >= _SETTLED:
                self._share = median_low(self._shares)
        self._drafting = 0.0

    def drafted(self, seconds: float, num_passes: int) -> None:
        """The model drafted in `seconds`, with so many passes of its own."""
        self._drafting = seconds / num_passes

    def answered(self, num_rows: int) -> None:
        """Drafts of `num_rows` tokens in all were handed over."""
        self._ended, self._slowed = self.clock(), 1 + ROW_COST * num_rows

    @property
    def share(self) -> float:
        """The time of one of the model's passes as a share of the target's."""
        return self._share
