"""Three lanes: prompts are read, drafts made and drafts verified side by side, each of others.

With few requests there is nothing to do side by side, and a second job a round only costs: then the
decode lane drafts and verifies in one job, as with two lanes. The number of live requests decides,
with some hysteresis, at every job, so it may change in the middle of a request.

With more of them it depends on the machine. Two groups side by side read the weights twice, and may
share one memory. So lanes that were separated are joined where that makes rounds shorter
(contest.py), and groups go on together where that saves more than it hides (gather.py).
"""

from __future__ import annotations

from outrider.core.budget import JobTrace
from outrider.sched.contest import Contest
from outrider.sched.gather import Gathering
from outrider.sched.jobs import Job, Pool
from outrider.sched.works import DECODE, PREFILL, VERIFY, LaneSizes, beside, job_of, rounds

# Requests fewer than the threshold at which the lanes are joined again.
HYSTERESIS = 1
# Groups are of unequal sizes, and a round in one job always takes the same.
TRIAL_TURNS = (2, 1)
# After a trial groups have to find themselves again, so there must be some hope.
DOUBTFUL = 1.05


class PrefillDraftVerify:
    """Up to `threshold` live requests draft and verify in one job; one more separates the lanes,
    unless that does not pay, until there are fewer than `threshold`. 0 keeps them separate."""

    lanes = (DECODE, VERIFY, PREFILL)

    def __init__(self, sizes: LaneSizes, *, threshold: int = 3) -> None:
        self._sizes, self._threshold = sizes, threshold
        self._separate = threshold == 0
        self._groups = Gathering(sizes)
        self._contest = Contest(TRIAL_TURNS, doubtful=DOUBTFUL)

    def next_job(self, lane: str, pool: Pool, num_live: int) -> Job | None:
        self._separate = self._is_separate(num_live)
        separate = self._separate and (not self._threshold or self._contest.way(num_live) == 0)
        if separate and lane != PREFILL and self._groups.holds(lane, pool):
            return None
        if lane != DECODE:
            return beside(lane, pool, self._sizes)
        waiting = pool.draft[: self._sizes.decode]
        if not separate:
            return job_of(rounds(waiting))
        half = -(-len(pool.draft) // 2)
        return job_of(waiting[:half] if self._groups.parts(pool) else waiting)

    def observe(self, trace: JobTrace) -> None:
        self._groups.observe(trace)
        if self._separate:
            self._contest.observe(trace, self._groups.in_turns(trace.num_live))

    def _is_separate(self, num_live: int) -> bool:
        if num_live > self._threshold:
            return True
        return self._separate and num_live > self._threshold - HYSTERESIS
