"""Speculative speculation: while one lane verifies, another drafts for the likely verdicts.

The verdict that comes is looked up among those foreseen (drafters/ahead/); a hit has its next draft
ready. New drafts go first on the decode lane: the target waits for them, while what is done ahead
has the time of a verification.

Where drafting ahead takes longer than that, or slows the target down, a round in turns may be over
sooner; then nothing is drafted ahead (contest.py). Groups that were parted meet again (gather.py).
"""

from __future__ import annotations

from outrider.core.budget import JobTrace
from outrider.sched.contest import Contest
from outrider.sched.gather import Gathering
from outrider.sched.jobs import Job, Pool, Work
from outrider.sched.works import DECODE, PREFILL, VERIFY, LaneSizes, beside, job_of

# Hits and misses take turns, and a draft that nobody foresaw always takes the same.
TRIAL_TURNS = (8, 1)
# What is guessed from slows itself down: drafting ahead and verifying may share a memory.
DOUBTFUL = 1.3


class DraftAheadLanes:
    """`always` drafts ahead, however long that takes."""

    lanes = (DECODE, VERIFY, PREFILL)

    def __init__(self, sizes: LaneSizes, *, always: bool = False) -> None:
        self._sizes, self._always = sizes, always
        self._groups = Gathering(sizes)
        self._contest = Contest(TRIAL_TURNS, doubtful=DOUBTFUL)

    def next_job(self, lane: str, pool: Pool, num_live: int) -> Job | None:
        in_turns = not self._is_ahead(num_live)
        if lane != PREFILL and self._groups.holds(lane, pool, in_turns=in_turns):
            return job_of(self._ahead(pool, num_live)) if lane == DECODE else None
        if lane != DECODE:
            return beside(lane, pool, self._sizes)
        return job_of(pool.draft[: self._sizes.decode] or self._ahead(pool, num_live))

    def observe(self, trace: JobTrace) -> None:
        self._groups.observe(trace)
        self._contest.observe(trace, self._groups.in_turns(trace.num_live))

    def _ahead(self, pool: Pool, num_live: int) -> tuple[Work, ...]:
        return pool.ahead if self._is_ahead(num_live) else ()

    def _is_ahead(self, num_live: int) -> bool:
        return self._always or self._contest.way(num_live) == 0
