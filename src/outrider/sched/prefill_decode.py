"""Two lanes: one reads prompts, the other drafts and verifies in one job.

A long prompt holds nobody up, and the two share the machine instead of a pass.
"""

from __future__ import annotations

from outrider.sched.jobs import Job, Pool
from outrider.sched.works import DECODE, PREFILL, chunks, job_of, rounds


class PrefillDecode:
    """`chunk` prompt tokens at most, of `prefill_batch` prompts, in one pass of the prefill lane;
    rounds of `batch` sequences on the other."""

    lanes = (DECODE, PREFILL)

    def __init__(self, chunk: int, *, batch: int = 1024, prefill_batch: int = 1024) -> None:
        self._chunk, self._batch, self._prefill_batch = chunk, batch, prefill_batch

    def next_job(self, lane: str, pool: Pool, num_live: int) -> Job | None:
        del num_live
        if lane == PREFILL:
            return job_of(chunks(pool, self._chunk, self._prefill_batch))
        return job_of(rounds(pool.draft[: self._batch]))
