"""Two measured choices of a schedule: the faster of two modes, and whether a lane should wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.draft import JobTrace
from outrider.core.errors import given
from outrider.estimate.acceptance import BySequence, fit_line
from outrider.sched.jobs import DECODE, LaneSizes, ReadyQueues, StageItem

FIRST = 16
MARGIN = 0.97
HOPELESS = 1.15
# The fewest turns of a trial after which it may be called hopeless.
LEAST_HOPELESS = 2
# A turn that is longer by this factor does not count, unless more jobs in a row than this consist
# of such turns.
PAUSE, MOST_PAUSES = 4.0, 2
# Turns over which the mean of the current mode is taken, and after which a trial is forgotten.
HORIZON, LONG_AGO = 16, 1024


@dataclass(slots=True)
class _Mean:
    """A mean over turns, in seconds; `turns` counts rounds of all running sequences."""

    seconds: float = 0.0
    turns: float = 0.0

    def add(self, seconds: float, share: float) -> None:
        """Add the mean turn of a `share` of the running sequences."""
        self.turns += share
        self.seconds += (seconds - self.seconds) * share / min(self.turns, HORIZON)


@dataclass(slots=True)
class _TrialState:
    """A trial's state: the current `mode` and its `mean` turn; while the other mode is tried,
    `tried` is that mode's. `known` is the other's last measured turn. `due` turns are left until
    the next trial. `pauses` counts jobs in a row whose turns were all too long to count."""

    mode: int = 0
    mean: _Mean | None = None
    tried: _Mean | None = None
    known: float | None = None
    due: float = FIRST
    gap: int = FIRST
    since: float = 0.0
    pauses: int = 0

    def back_off(self) -> None:
        """End a trial that failed, and put off the next one."""
        self.gap *= 4
        self.due, self.since, self.tried = self.gap, 0.0, None

    def counted(self, turns: list[float]) -> list[float]:
        """Return the turns that are not too long to count."""
        most = None if self.mean is None else PAUSE * self.mean.seconds
        usual = [one for one in turns if most is None or one <= most]
        self.pauses = 0 if usual else self.pauses + 1
        return turns if self.pauses > MOST_PAUSES else usual


class ModeTrial:
    """A trial of modes 0, at first current, and 1. `turns` gives the length of a trial of each.

    A sequence's turn is the time from one verdict to its next. Sequences in flight divided by the
    turn are verdicts a second, so the mode with the shorter turns is used. The other mode is

        tried when   `FIRST` turns have passed, and four times as many after every failed trial
        tried if     it is not known to take more than `HOPELESS` turns of the current mode, by its
                     last trial; before the first trial, if the sum of its parts is not more than
                     `doubtful` turns of the current mode
        adopted if   its turns are shorter by more than noise (`MARGIN`)

    A trial that ends because the load changed has failed. A turn that began in the other mode
    counts for neither, and a turn much longer than the others does not count: its sequence waited
    for something else. Each power of two of running requests has a trial of its own, since the
    better mode depends on their number.
    """

    def __init__(self, turns: tuple[int, int], *, doubtful: float) -> None:
        self._turns, self._doubtful = turns, doubtful
        self._states: dict[int, _TrialState] = {}
        self._ended: BySequence[float] = BySequence()
        self._own: _TrialState | None = None

    def mode(self, num_live: int) -> int:
        """Return the mode for so many running requests: the current one, or the one under trial."""
        own = self._state(num_live)
        return own.mode if own.tried is None else 1 - own.mode

    def observe(self, trace: JobTrace, guess: float | None) -> None:
        """Learn from a job that ended. `guess` is mode 1's expected turn in seconds, if known."""
        if "verify" not in trace.kinds or trace.num_failed:
            return
        if self._state(trace.num_live) is not self._own:
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
        """Switch to another number of requests, which fails a trial that is under way."""
        if self._own is not None and self._own.tried is not None:
            self._own.back_off()
        self._own = self._state(num_live)
        self._ended.clear()

    def _count(self, own: _TrialState, seconds: float, share: float, guess: float | None) -> None:
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
        least = self._turns[1 - own.mode]
        if own.tried.turns >= (max(least, LEAST_HOPELESS) if hopeless else least):
            self._end(own, mean, own.tried)

    def _begin(self, own: _TrialState, mean: float, guess: float | None) -> None:
        own.due = own.gap
        if own.since > LONG_AGO:
            own.known = None
        hope, most = own.known, HOPELESS
        if hope is None and own.mode == 0:
            hope, most = guess, self._doubtful
        if hope is None or hope <= most * mean:
            own.tried, own.pauses = _Mean(), 0
            self._ended.clear()

    def _end(self, own: _TrialState, mean: _Mean, tried: _Mean) -> None:
        if tried.seconds < MARGIN * mean.seconds:
            own.mode, own.mean, own.known = 1 - own.mode, tried, mean.seconds
            own.due, own.gap, own.since, own.tried = FIRST, FIRST, 0.0, None
        else:
            own.known = tried.seconds
            own.back_off()
        self._ended.clear()

    def _state(self, num_live: int) -> _TrialState:
        return self._states.setdefault(num_live.bit_length(), _TrialState())


NEWEST = 8
# Jobs of a stage after which the times of a size are forgotten: contexts have grown meanwhile, and
# the same size would take longer now.
FORGOTTEN_AFTER = 256
# The factor by which one time must be shorter than another, since both are estimates.
CLEARLY = 0.85
_DRAFT, _VERIFY, _AHEAD = "draft", "verify", "ahead"


class StageSeconds:
    """Seconds of the newest jobs of one stage, by the number of sequences in the job."""

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
        """Return the expected seconds of a job of `size` sequences; None before the first job."""
        if not self._taken:
            return None
        fixed, each = self._line()
        return fixed + each * size

    def longest(self, size: int) -> float | None:
        """Return the longest of this size's newest times, else of any size's and the line's."""
        if size in self._taken:
            return max(self._taken[size])
        seen = [one for own in self._taken.values() for one in own]
        return max(*seen, self.mean(size) or 0.0) if seen else None

    def fixed(self) -> float | None:
        """Return a job's seconds that do not depend on its size; None before two sizes."""
        return None if len(self._taken) < 2 else self._line()[0]

    def _line(self) -> tuple[float, float]:
        """Return the seconds of a job, and of each sequence in it."""
        return fit_line([(n, seconds, 1) for n, own in self._taken.items() for seconds in own])


class BatchMerger:
    """A choice between one batch and two groups, for a lane that drafts and one that verifies.

    A pass reads its weights once, however many sequences it contains. Two groups that go through a
    lane one after the other pay the fixed part of a pass twice:

        saved = T(a) + T(b) - T(a + b)

    A lane that could take a group of a now, while b more are under way in the other lane, waits for
    them if a round in turns is then shorter, that is, if the other lane takes less time for all of
    them than the merged pass saves. Otherwise the groups stay apart, each in one lane, and a whole
    group may be split. T is a straight line through the times of recent jobs; until jobs of two
    sizes were seen, no lane waits. A lane waits only for the sequences that were under way when the
    wait began, so newcomers cannot prolong it.
    """

    def __init__(self, sizes: LaneSizes) -> None:
        self._sizes = sizes
        self._seconds = {kind: StageSeconds() for kind in (_DRAFT, _VERIFY, _AHEAD)}
        self._awaited: dict[str, frozenset[int]] = {}

    def observe(self, trace: JobTrace) -> None:
        """Learn from a job that ended. A job of several stages does not show the time of each."""
        if len(trace.kinds) == 1 and trace.kinds[0] in self._seconds and not trace.num_failed:
            self._seconds[trace.kinds[0]].add(len(trace.seq_ids), trace.ended - trace.began)

    def in_turns(self, size: int) -> float | None:
        """Return the seconds of a round that makes all drafts and then verifies them."""
        draft = self._seconds[_DRAFT].longest(size)
        verify = self._seconds[_VERIFY].mean(size)
        return None if draft is None or verify is None else draft + verify

    def forget_waits(self) -> None:
        """End all waits, since the lanes are joined."""
        self._awaited.clear()

    def holds(self, lane: str, pool: ReadyQueues) -> bool:
        """Return whether the lane, which drafts or verifies, waits instead of taking its waiting
        sequences. The two lanes never wait at once."""
        if lane == DECODE:
            here, most = pool.draft, self._sizes.decode
            coming = pool.verifying or _ids(pool.verify)
        else:
            here, most = pool.verify, self._sizes.verify
            coming = pool.drafting or _ids(pool.draft)
        num_joining = min(len(coming), most - len(here))
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
        """Return whether one pass of all `size` sequences saves more than the wait for it costs."""
        if lane == DECODE:
            wait, saved = self._seconds[_VERIFY].mean(size), self._seconds[_DRAFT].fixed()
        else:
            wait, saved = self._until_drafted(size, began=began), self._seconds[_VERIFY].fixed()
        return wait is not None and saved is not None and wait < CLEARLY * saved

    def parts(self, pool: ReadyQueues) -> bool:
        """Return whether the sequences that wait for drafts, which are all that decode, should
        split: each lane then hides the other's shorter jobs, and pays its own fixed part twice."""
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
        """Return the seconds for a draft; one that has not begun may wait for one ahead."""
        draft = self._seconds[_DRAFT].mean(size)
        ahead, verify = self._seconds[_AHEAD].mean(size), self._seconds[_VERIFY].mean(size)
        if began or draft is None or ahead is None or verify is None:
            return draft
        return draft + max(ahead - verify, 0.0)


def _ids(works: Sequence[StageItem]) -> tuple[int, ...]:
    return tuple(work.seq_id for work in works)
