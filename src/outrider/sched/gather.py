"""Whether an idle lane should wait, so that two groups of sequences go on as one.

A pass reads its weights once, whoever it is for. Two groups that go through a lane one after the
other pay twice what does not grow with them:

    saved = T(a) + T(b) - T(a + b)

A lane that could take a group of a now, while b more are under way in the other lane, waits for
them if a round in turns then is shorter: if what the other lane takes for all of them is less than
that. Otherwise the groups stay apart, each in one lane while the other group is in the other; and
one that is whole may be parted. T is a straight line through what jobs took lately, so what a group
saves is its height at no sequences, and until jobs of two sizes were seen nobody waits.

Only those that were under way when the wait began are waited for, so newcomers cannot prolong it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from outrider.core.budget import JobTrace
from outrider.sched.jobs import Pool, Work
from outrider.sched.works import DECODE, LaneSizes

NEWEST = 8
# Jobs of a stage after which a size is forgotten: contexts have grown, and it would take longer.
LONG_AGO = 256
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
        for old in [one for one, last in self._last.items() if self._num_jobs - last >= LONG_AGO]:
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
        """Seconds of a job and of each sequence in it, neither negative, by least squares."""
        points = [(n, seconds) for n, own in self._taken.items() for seconds in own]
        mean_n = sum(n for n, _ in points) / len(points)
        mean = sum(seconds for _, seconds in points) / len(points)
        spread = sum((n - mean_n) ** 2 for n, _ in points)
        joint = sum((n - mean_n) * (seconds - mean) for n, seconds in points)
        each = min(max(joint / spread, 0.0), mean / mean_n) if spread else 0.0
        return mean - each * mean_n, each


class Gathering:
    """Of a lane that drafts and one that verifies, and what their jobs take."""

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

    def holds(self, lane: str, pool: Pool, *, in_turns: bool = False) -> bool:
        """Whether the lane, which drafts or verifies, waits rather than take what waits for it:
        always, if all are to go `in_turns`. Never both of them."""
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
        elif in_turns:
            pays = True
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

    def parts(self, pool: Pool) -> bool:
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


def _ids(works: Sequence[Work]) -> tuple[int, ...]:
    return tuple(work.seq_id for work in works)
