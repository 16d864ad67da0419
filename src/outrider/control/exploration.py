"""Exploration of draft lengths: `DepthSweep` at first, `Probes` later, for a bounded share of time;
`BatchRests` stops drafts that gain a batch next to nothing.

`DepthSweep` measures a few depths when nothing is known yet. `Probes` looks again later: at plain
decoding and at longer drafts while drafts pay, at short drafts while they do not. Each look that
changes nothing doubles the wait for the next. The cost of looks, against the time without them, is
booked, and no look begins while this cost is above `SHARE` of all time. Both classes count observed
rounds, so decisions follow from traces alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.estimate.online import FadingRate

# Largest share of the time of all rounds since the sweep.
SHARE = 0.01
# Long enough to measure also a drafter that must catch up first.
PROBE_ROUNDS = 4
FIRST_GAP = 32
LONGEST_GAP = 256
# Informative rounds of one depth in the sweep; a depth also ends after `MOST_SWEEP_ROUNDS` of any
# kind.
SWEEP_ROUNDS = 3
MOST_SWEEP_ROUNDS = 12


def sweep_depths(k: int) -> tuple[int, ...]:
    """0, powers of two and `k`."""
    powers = (1 << power for power in range(k.bit_length()))
    return tuple(sorted({0, k, *powers}))


@dataclass(slots=True)
class DepthSweep:
    """The first rounds: a few at each depth of `depths`."""

    depths: tuple[int, ...]
    _stage: int = 0
    _num_telling: int = 0
    _num_rounds: int = 0

    @property
    def depth(self) -> int | None:
        """The depth to draft now; None once the sweep is over."""
        return self.depths[self._stage] if self._stage < len(self.depths) else None

    def advance(self, *, telling: bool) -> bool:
        """Count a round. True if its depth is done."""
        self._num_telling += telling
        self._num_rounds += 1
        if self._num_telling < SWEEP_ROUNDS and self._num_rounds < MOST_SWEEP_ROUNDS:
            return False
        self.skip()
        return True

    def skip(self) -> None:
        """Go on to the next depth."""
        self._stage += 1
        self._num_telling = self._num_rounds = 0

    def end(self) -> None:
        self._stage = len(self.depths)


@dataclass(slots=True)
class Probes:
    """Later looks at other depths. Times are seconds of rounds; `num_started` counts looks."""

    num_started: int = 0
    spent: float = 0.0
    total: float = 0.0
    _left: int = 0
    _since: int = 0
    _gap: int = field(default=FIRST_GAP)
    _was_plain: bool = False

    @property
    def is_on(self) -> bool:
        return self._left > 0

    @property
    def looks_deeper(self) -> bool:
        """True for a look at longer drafts: every other one, while drafts pay."""
        return self.num_started % 2 == 0

    def book(self, seconds: float, due: float) -> None:
        """Book a round that took `seconds`; its tokens take `due` without a look."""
        self.total += seconds
        if self.is_on:
            self.spent += max(seconds - due, 0.0)

    def is_due(self, *, urgent: bool) -> bool:
        """True if a look may begin; an urgent one waits less."""
        waited = self._since >= (PROBE_ROUNDS if urgent else self._gap)
        return waited and self.spent <= SHARE * self.total

    def begin(self, *, is_plain: bool) -> None:
        """Begin a look. `is_plain` says that plain decoding seems best now."""
        self._left, self._since, self._was_plain = PROBE_ROUNDS, 0, is_plain
        self.num_started += 1

    def advance(self, *, is_plain: bool) -> None:
        """Count a round."""
        if not self.is_on:
            self._since += 1
            return
        self._left -= 1
        if not self.is_on:
            changed = is_plain != self._was_plain
            self._gap = FIRST_GAP if changed else min(2 * self._gap, LONGEST_GAP)


# Smaller batches do not rest: drafts cost little there, and their gain changes with each text.
LEAST_RESTING = 4
# The least speed-up of a batch that goes on drafting. Drafts also end some texts before others, and
# passes over the remaining texts are worth less.
LEAST_GAIN = 1.05
# Passes that are judged together, at first and after each rest; the length of a rest in passes.
FIRST_JUDGED, LATER_JUDGED = 32, 12
FIRST_REST, LONGEST_REST = 64, 512


@dataclass(slots=True)
class BatchRests:
    """Rests of drafting: passes without drafts, while drafts gain a batch less than `LEAST_GAIN`.

    Look-ups need no model, but each pass calls them and cuts their drafts, which takes about as
    much time as small gains save. A rest ends early when half of the sequences have ended.
    """

    _left: int = 0
    _size: int = 0
    _length: int = FIRST_REST
    _num_judged: int = FIRST_JUDGED
    _gain: FadingRate = field(default_factory=lambda: FadingRate(1.0))
    _num_passes: int = 0

    def is_on(self, num_sequences: int) -> bool:
        return self._left > 0 and 2 * num_sequences > self._size

    def rested(self) -> None:
        """A pass without drafts ended."""
        self._left -= 1

    def observe(self, num_sequences: int, tokens: float, num_plain: float) -> None:
        """Count a pass that could draft: `tokens` per sequence in the time of `num_plain` ones."""
        self._left = 0
        if num_sequences < LEAST_RESTING:
            return
        self._gain.add(tokens, num_plain)
        self._num_passes += 1
        if self._num_passes < self._num_judged:
            return
        if self._gain.mean < LEAST_GAIN:
            self._left, self._size = self._length, num_sequences
            self._length = min(2 * self._length, LONGEST_REST)
            self._num_judged = LATER_JUDGED
        else:
            self._length, self._num_judged = FIRST_REST, FIRST_JUDGED
        self._gain, self._num_passes = FadingRate(1.0), 0
