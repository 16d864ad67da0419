"""Which of two ways of working takes less time a turn, found out while running.

A sequence's turn is from one verdict to its next; sequences in flight over the turn are verdicts a
second, and what a verdict brings does not depend on the way. So the way with the shorter turns is
kept. The other one is tried

    when     `FIRST` turns have passed, and four times as many after every trial that failed
    if       it is not known to take more than `HOPELESS` turns of the one that is kept, by its last
             trial, or before the first more than `doubtful` of them, by what its parts take
    kept if  its turns are shorter by more than noise (`MARGIN`)

A trial that ends because the load changed has failed. A turn that began in the other way counts for
neither, and one that is much longer than others does not count, for then its sequence waited for
something else, or nobody asked for more. Each power of two of live requests has a contest of its
own, since what pays depends on them.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from outrider.core.budget import JobTrace
from outrider.core.errors import ContractError

FIRST = 16
MARGIN = 0.97
HOPELESS = 1.15
# Turns of a trial without which nothing is hopeless.
LEAST_HOPELESS = 2
# How much longer a turn is that does not count, unless more jobs in a row than this tell of such.
PAUSE, MOST_PAUSES = 4.0, 2
# Turns over which that of the way that is kept is a mean, and after which a trial is forgotten.
HORIZON, LONG_AGO = 16, 1024
_MOST_SEQUENCES = 1024


@dataclass(slots=True)
class _Mean:
    """Of turns in seconds; `turns` is how many rounds of everybody it counts."""

    seconds: float = 0.0
    turns: float = 0.0

    def add(self, seconds: float, share: float) -> None:
        """The mean turn of a `share` of those that are live."""
        self.turns += share
        self.seconds += (seconds - self.seconds) * share / min(self.turns, HORIZON)


@dataclass(slots=True)
class _Standing:
    """`way` is kept, `mean` is of its turns; `tried` of the other's while it is tried. `known` is
    the other's turn as far as that was found out. `due` turns are left until a trial. `pauses` are
    jobs in a row whose turns were all too long to count."""

    way: int = 0
    mean: _Mean | None = None
    tried: _Mean | None = None
    known: float | None = None
    due: float = FIRST
    gap: int = FIRST
    since: float = 0.0
    pauses: int = 0

    def back_off(self) -> None:
        """A trial has failed."""
        self.gap *= 4
        self.due, self.since, self.tried = self.gap, 0.0, None

    def counted(self, turns: list[float]) -> list[float]:
        """Those that are not too long."""
        most = None if self.mean is None else PAUSE * self.mean.seconds
        usual = [one for one in turns if most is None or one <= most]
        self.pauses = 0 if usual else self.pauses + 1
        return turns if self.pauses > MOST_PAUSES else usual


class Contest:
    """Of the ways 0, at first kept, and 1. `turns` is how many a trial of each lasts."""

    def __init__(self, turns: tuple[int, int], *, doubtful: float) -> None:
        self._turns, self._doubtful = turns, doubtful
        self._standings: dict[int, _Standing] = {}
        self._ended: OrderedDict[int, float] = OrderedDict()
        self._own: _Standing | None = None

    def way(self, num_live: int) -> int:
        """What is done with so many live requests: that which is kept, or that which is tried."""
        own = self._standing(num_live)
        return own.way if own.tried is None else 1 - own.way

    def observe(self, trace: JobTrace, guess: float | None) -> None:
        """A job ended. `guess` is what a turn of way 1 would take, if that is known."""
        if "verify" not in trace.kinds or trace.num_failed:
            return
        if self._standing(trace.num_live) is not self._own:
            self._enter(trace.num_live)
        turns = [
            trace.ended - self._ended.pop(seq_id)
            for seq_id in trace.seq_ids
            if seq_id in self._ended
        ]
        self._ended |= dict.fromkeys(trace.seq_ids, trace.ended)
        while len(self._ended) > _MOST_SEQUENCES:
            self._ended.popitem(last=False)
        if turns and self._own is not None:
            turns = self._own.counted(turns)
        if turns and self._own is not None:
            share = len(turns) / max(trace.num_live, 1)
            self._count(self._own, sum(turns) / len(turns), share, guess)

    def _enter(self, num_live: int) -> None:
        """Other sequences: a trial that goes on is none of theirs."""
        if self._own is not None and self._own.tried is not None:
            self._own.back_off()
        self._own = self._standing(num_live)
        self._ended.clear()

    def _count(self, own: _Standing, seconds: float, share: float, guess: float | None) -> None:
        if own.tried is None:
            own.mean = own.mean or _Mean()
            own.mean.add(seconds, share)
            own.due -= share
            own.since += share
            if own.due <= 0:
                self._begin(own, own.mean.seconds, guess)
            return
        own.tried.add(seconds, share)
        if own.mean is None:
            raise ContractError("there is no mean")
        hopeless = own.tried.seconds > HOPELESS * own.mean.seconds
        least = self._turns[1 - own.way]
        if own.tried.turns >= (max(least, LEAST_HOPELESS) if hopeless else least):
            self._end(own, own.mean, own.tried)

    def _begin(self, own: _Standing, mean: float, guess: float | None) -> None:
        own.due = own.gap
        if own.since > LONG_AGO:
            own.known = None
        hope, most = own.known, HOPELESS
        if hope is None and own.way == 0:
            hope, most = guess, self._doubtful
        if hope is None or hope <= most * mean:
            own.tried, own.pauses = _Mean(), 0
            self._ended.clear()

    def _end(self, own: _Standing, mean: _Mean, tried: _Mean) -> None:
        if tried.seconds < MARGIN * mean.seconds:
            own.way, own.mean, own.known = 1 - own.way, tried, mean.seconds
            own.due, own.gap, own.since, own.tried = FIRST, FIRST, 0.0, None
        else:
            own.known = tried.seconds
            own.back_off()
        self._ended.clear()

    def _standing(self, num_live: int) -> _Standing:
        return self._standings.setdefault(num_live.bit_length(), _Standing())
