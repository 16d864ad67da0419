"""Seconds and memory that an answer may take, loading and compiling included.

What would not end in time, or would not fit, is not begun: its seconds and bytes are reckoned
before. Memory is the weights of every model once, and a fixed amount for the rest of the process.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

from outrider.api.memory import ProcessGauge
from outrider.core.clock import Clock
from outrider.core.errors import CapacityError
from outrider.core.fields import size

# Besides weights: the program, memory of texts, buffers of all engines.
BESIDE_WEIGHTS = 1_000_000_000
# What is kept to reckon the answer, to print it and to end: so many seconds or this share of them,
# and more where the program took long to start, for then it takes long to end; never more than the
# last share.
_ENDING, _ENDING_SHARE = 2.0, 0.1
_ENDING_OF_START, _MOST_ENDING_SHARE = 0.5, 0.3
# Bytes of weights that are read and packed in a second at the least, and seconds of any loading.
LOAD_RATE, LOAD_SECONDS = 120e6, 0.4
# Seconds after which partial answers are given, and between them.
FIRST_ANSWER, NEXT_ANSWER = 10.0, 10.0


@dataclass(slots=True)
class Bounds:
    """`seconds` from `began` on; `most_bytes` of resident memory, None for no limit. `held` tells
    what the process holds, now and at most so far."""

    seconds: float = math.inf
    most_bytes: int | None = None
    clock: Clock = perf_counter
    began: float = math.nan
    held: Callable[[], tuple[int, int]] = field(default_factory=lambda: held_bytes)
    _ending: float = 0.0
    _load_rate: float = LOAD_RATE
    _load_seconds: float = LOAD_SECONDS
    _next_answer: float = FIRST_ANSWER

    def __post_init__(self) -> None:
        if math.isnan(self.began):
            self.began = self.clock()
        if math.isfinite(self.seconds):
            usual = min(_ENDING, _ENDING_SHARE * self.seconds)
            slow = min(_ENDING_OF_START * self.spent, _MOST_ENDING_SHARE * self.seconds)
            self._ending = max(usual, slow)

    @property
    def spent(self) -> float:
        return self.clock() - self.began

    @property
    def left(self) -> float:
        """Seconds for measuring; below 0 once the answer is due."""
        return self.seconds - self._ending - self.spent

    def part(self, share: float) -> float:
        """The moment at which this share of what is left will have gone."""
        return self.clock() + max(share * self.left, 0.0)

    def answer_is_due(self) -> bool:
        """Whether a partial answer should be given now; then the next one is due later. None is
        where the whole answer is next."""
        if self.spent < self._next_answer or self.left <= 0:
            return False
        self._next_answer = self.spent + NEXT_ANSWER
        return True

    def must_fit(self, what: str, *, num_bytes: int) -> None:
        """Raises CapacityError for what would take more memory than is left."""
        most, (now, _) = self.most_bytes, self.held()
        if most is not None and now + num_bytes > most:
            raise CapacityError(
                f"{what} would take {size(num_bytes)} more, and {size(max(most - now, 0))} of "
                f"{size(most)} are left.",
                hint="name fewer drafters with --drafters",
            )

    def loading_seconds(self, num_bytes: int) -> float:
        """Of weights of so many bytes, by the rate at which others were loaded."""
        return self._load_seconds + num_bytes / self._load_rate

    def note_loading(self, num_bytes: int, seconds: float) -> None:
        """A model of so many bytes was loaded in so long, or an engine without one was made."""
        if not num_bytes:
            self._load_seconds = max(seconds, LOAD_SECONDS)
        elif num_bytes > LOAD_RATE / 10 and seconds > 0:
            self._load_rate = num_bytes / seconds

    def add_time(self, seconds: float) -> None:
        """For what had to be done first and does not count."""
        self.began += seconds

    @property
    def peak_bytes(self) -> int:
        """The most memory that the process held so far."""
        return self.held()[1]


def held_bytes() -> tuple[int, int]:
    """Resident memory of this process, now and at most so far."""
    gauge = ProcessGauge()
    return gauge.now(), gauge.peak()
