"""Speculative speculation: while one lane verifies, another drafts for the likely verdicts.

The verdict that comes is looked up among those foreseen (drafters/ahead/); a hit has its next draft
ready. New drafts go first on the decode lane: the target waits for them, while what is done ahead
has the time of a verification.
"""

from __future__ import annotations

from outrider.sched.jobs import Job, Pool
from outrider.sched.works import DECODE, PREFILL, VERIFY, LaneSizes, beside, job_of


class DraftAheadLanes:
    lanes = (DECODE, VERIFY, PREFILL)

    def __init__(self, sizes: LaneSizes) -> None:
        self._sizes = sizes

    def next_job(self, lane: str, pool: Pool, num_live: int) -> Job | None:
        del num_live
        if lane != DECODE:
            return beside(lane, pool, self._sizes)
        return job_of(pool.draft[: self._sizes.decode] or pool.ahead)
