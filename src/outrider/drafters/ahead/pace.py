"""Keeps drafting ahead within the verification that it runs beside.

The next round waits for whatever is still drafted ahead when the verdict is there. So fewer
verdicts are foreseen while it takes longer than verifications do, and more again while there is
time left. Where even one verdict takes too long, drafting in turns is faster: waiting then costs
more than the hits save, and nothing is drafted ahead for a while, unless it is to go on always.
"""

from __future__ import annotations

from dataclasses import dataclass

# By how much one look may change how many verdicts are foreseen.
SLOWER, FASTER = 0.5, 1.25
# Rounds without drafting ahead, at first and at most.
FIRST_REST, LONGEST_REST = 8, 256


@dataclass(slots=True)
class Pace:
    """For at most `most` foreseen verdicts a sequence, and with `always` for one at least. A pure
    function of what it observes."""

    most: int
    always: bool = False
    _share: float = 1.0
    _resting: int = 0
    _next_rest: int = FIRST_REST

    @property
    def fan_out(self) -> int:
        """Verdicts to foresee for a sequence in the round that begins; 0 while it rests."""
        return 0 if self._resting else max(round(self._share * self.most), 1)

    def rest(self) -> None:
        """A round went by without drafting ahead."""
        self._resting = max(self._resting - 1, 0)

    def observe(self, seconds: float, window: float, saved: float) -> None:
        """Drafting ahead took `seconds` beside a verification that takes `window` (0: unknown). It
        saves `saved` a round, on average, by not drafting in turns."""
        if window <= 0 or seconds <= 0:
            return
        at_least = self.fan_out == 1
        change = min(max(window / seconds, SLOWER), FASTER)
        self._share = min(max(self._share * change, 1 / self.most), 1.0)
        if at_least and seconds - window > saved and not self.always:
            self._resting, self._next_rest = self._next_rest, min(2 * self._next_rest, LONGEST_REST)
        elif seconds <= window:
            self._next_rest = FIRST_REST
