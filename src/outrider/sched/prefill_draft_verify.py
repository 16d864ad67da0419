"""Three lanes: prompts are read, drafts made and drafts verified side by side, each of others.

With few requests there is nothing to do side by side, and a second job a round only costs: then the
decode lane drafts and verifies in one job, as with two lanes. The number of live requests decides,
with some hysteresis, at every job, so it may change in the middle of a request.
"""

from __future__ import annotations

from outrider.sched.jobs import Job, Pool
from outrider.sched.works import DECODE, PREFILL, VERIFY, LaneSizes, beside, job_of, rounds

# Requests fewer than the threshold at which the lanes are joined again.
HYSTERESIS = 1


class PrefillDraftVerify:
    """Up to `threshold` live requests draft and verify in one job; one more separates the lanes,
    which stay so until there are fewer than `threshold`. 0 keeps them separate."""

    lanes = (DECODE, VERIFY, PREFILL)

    def __init__(self, sizes: LaneSizes, *, threshold: int = 3) -> None:
        self._sizes, self._threshold = sizes, threshold
        self._separate = threshold == 0

    def next_job(self, lane: str, pool: Pool, num_live: int) -> Job | None:
        self._separate = self._is_separate(num_live)
        if lane != DECODE:
            return beside(lane, pool, self._sizes)
        waiting = pool.draft[: self._sizes.decode]
        return job_of(waiting if self._separate else rounds(waiting))

    def _is_separate(self, num_live: int) -> bool:
        if num_live > self._threshold:
            return True
        return self._separate and num_live > self._threshold - HYSTERESIS
