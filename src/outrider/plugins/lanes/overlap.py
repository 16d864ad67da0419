"""Two measured choices of a schedule: the faster of two ways of working, and whether to wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.budget import JobTrace
from outrider.core.errors import given
from outrider.estimate.online import BySequence, fit_line
from outrider.sched.jobs import DECODE, LaneSizes, ReadyQueues, StageItem

FIRST = 16
MARGIN = 0.97
HOPELESS = 1.15
# Turns of a trial without which nothing is hopeless.
LEAST_HOPELESS = 2
# How much longer a turn is that does not count, unless more jobs in a row than this tell of such.
PAUSE, MOST_PAUSES = 4.0, 2
# Turns over which that of the way that is kept is a mean, and after which a trial is forgotten.
HORIZON, LONG_AGO = 16, 1024


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


class ModeTrial:
    """Of the ways 0, at first kept, and 1. `turns` is how many a trial of each lasts.

    A sequence's turn is from one verdict to its next; sequences in flight over the turn are
    verdicts a second, so the way with the shorter turns is kept. The other way is tried

        when     `FIRST` turns have passed, and four times as many after every trial that failed
        if       it is not known to take more than `HOPELESS` turns of the one that is kept, by its
                 last trial, or before the first more than `doubtful` of them, by what its parts
                 take
        kept if  its turns are shorter by more than noise (`MARGIN`)

    A trial that ends because the load changed has failed. A turn that began in the other way counts
    for neither, and a turn much longer than others does not count: its sequence waited for
    something else. Each power of two of live requests has a contest of its own, since what pays
    depends on them.
    """

    def __init__(self, turns: tuple[int, int], *, doubtful: float) -> None:
        self._turns, self._doubtful = turns, doubtful
        self._standings: dict[int, _Standing] = {}
        self._ended: BySequence[float] = BySequence()
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
        for seq_id in trace.seq_ids:
            self._ended.note(seq_id, trace.ended)
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
        mean = given(own.mean, "mean")
        hopeless = own.tried.seconds > HOPELESS * mean.seconds
        least = self._turns[1 - own.way]
        if own.tried.turns >= (max(least, LEAST_HOPELESS) if hopeless else least):
            self._end(own, mean, own.tried)

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


NEWEST = 8
# Jobs of a stage after which a size is forgotten: contexts have grown, and it would take longer.
FORGOTTEN_AFTER = 256
# By how much one time must be shorter than another, since both are guesses.
CLEARLY = 0.85
_DRAFT, _VERIFY, _AHEAD = "draft", "verify", "ahead"


class StageSeconds:
    """Seconds of jobs of one stage by how many sequences they were for: the newest of each."""

    def __init__(self) -> None:
        self._taken: dict[int, deque[float]] = {}
        self._last: dict[int, int] = {}
        self._num_jobs = 0

    def add(self, size: int, seconds: float) -> None:
        self._num_jobs += 1
        self._last[size] = self._num_jobs
        self._taken.setdefault(size, deque(maxlen=NEWEST)).append(seconds)
        for old in [
            one for one, last in self._last.items() if self._num_jobs - last >= FORGOTTEN_AFTER
        ]:
            del self._taken[old], self._last[old]

    def mean(self, size: int) -> float | None:
        """None before anything was seen."""
        if not self._taken:
            return None
        fixed, each = self._line()
        return fixed + each * size

    def longest(self, size: int) -> float | None:
        """The longest of the newest of so many; if none was seen, of any, or as the line says."""
        if size in self._taken:
            return max(self._taken[size])
        seen = [one for own in self._taken.values() for one in own]
        return max(*seen, self.mean(size) or 0.0) if seen else None

    def fixed(self) -> float | None:
        """What a job takes whoever it is for; None before jobs of two sizes tell it."""
        return None if len(self._taken) < 2 else self._line()[0]

    def _line(self) -> tuple[float, float]:
        """Seconds of a job and of each sequence in it."""
        return fit_line([(n, seconds, 1) for n, own in self._taken.items() for seconds in own])


class BatchMerger:
    """Of a lane that drafts and one that verifies, and what their jobs take.

    A pass reads its weights once, whoever it is for. Two groups that go through a lane one after
    the other pay twice what does not grow with them:

        saved = T(a) + T(b) - T(a + b)

    A lane that could take a group of a now, while b more are under way in the other lane, waits for
    them if a round in turns is then shorter: if the other lane takes less than the saving for all
    of them. Otherwise the groups stay apart, each in one lane, and a whole group may be parted. T
    is a straight line through what jobs took lately; until jobs of two sizes were seen nobody
    waits. Only sequences that were under way when the wait began are waited for, so newcomers
    cannot prolong it.
    """

    def __init__(self, sizes: LaneSizes) -> None:
        self._sizes = sizes
        self._seconds = {kind: StageSeconds() for kind in (_DRAFT, _VERIFY, _AHEAD)}
        self._awaited: dict[str, frozenset[int]] = {}

    def observe(self, trace: JobTrace) -> None:
        """A job ended. One of several stages does not tell what each of them takes."""
        if len(trace.kinds) == 1 and trace.kinds[0] in self._seconds and not trace.num_failed:
            self._seconds[trace.kinds[0]].add(len(trace.seq_ids), trace.ended - trace.began)

    def in_turns(self, size: int) -> float | None:
        """Seconds of a round whose drafts are all made, and then all verified."""
        draft = self._seconds[_DRAFT].longest(size)
        verify = self._seconds[_VERIFY].mean(size)
        return None if draft is None or verify is None else draft + verify

    def forget_waits(self) -> None:
        """The lanes are joined: whoever waited no longer does."""
        self._awaited.clear()

    def holds(self, lane: str, pool: ReadyQueues) -> bool:
        """Whether the lane, which drafts or verifies, waits rather than take what waits for it.
        Never both of them."""
        if lane == DECODE:
            here, room = pool.draft, self._sizes.decode
            coming = pool.verifying or _ids(pool.verify)
        else:
            here, room = pool.verify, self._sizes.verify
            coming = pool.drafting or _ids(pool.draft)
        num_joining = min(len(coming), room - len(here))
        awaited = self._awaited.get(lane)
        if not pool.patient or not here or num_joining <= 0 or self._awaited.keys() - {lane}:
            pays = False
        elif awaited is not None:
            pays = not awaited.isdisjoint(coming)
        else:
            pays = self._saves(lane, len(here) + len(coming), began=bool(pool.drafting))
        if pays:
            self._awaited.setdefault(lane, frozenset(coming))
        else:
            self._awaited.pop(lane, None)
        return pays

    def _saves(self, lane: str, size: int, *, began: bool) -> bool:
        """Whether a pass for all, of `size`, saves more than the wait for it."""
        if lane == DECODE:
            wait, saved = self._seconds[_VERIFY].mean(size), self._seconds[_DRAFT].fixed()
        else:
            wait, saved = self._until_drafted(size, began=began), self._seconds[_VERIFY].fixed()
        return wait is not None and saved is not None and wait < CLEARLY * saved

    def parts(self, pool: ReadyQueues) -> bool:
        """Whether those that wait for drafts, who are all that decode, should go on as two groups:
        then each lane hides the other's shorter jobs, and pays its own twice."""
        if len(pool.draft) < 2 or pool.verify or pool.drafting or pool.verifying:
            return False
        draft, verify = self._seconds[_DRAFT], self._seconds[_VERIFY]
        return all(
            fixed is not None and hidden is not None and fixed < CLEARLY * hidden
            for fixed, hidden in (
                (verify.fixed(), draft.mean(len(pool.draft))),
                (draft.fixed(), verify.mean(len(pool.draft))),
            )
        )

    def _until_drafted(self, size: int, *, began: bool) -> float | None:
        """Seconds. Who has no draft under way may have to wait for the end of one ahead."""
        draft = self._seconds[_DRAFT].mean(size)
        ahead, verify = self._seconds[_AHEAD].mean(size), self._seconds[_VERIFY].mean(size)
        if began or draft is None or ahead is None or verify is None:
            return draft
        return draft + max(ahead - verify, 0.0)


def _ids(works: Sequence[StageItem]) -> tuple[int, ...]:
    return tuple(work.seq_id for work in works)
