"""Speculative speculation: while one lane verifies, another drafts for the likely verdicts.

The verdict that comes is looked up among those foreseen (drafters/ahead/); a hit has its next draft
ready. New drafts go first on the decode lane: the target waits for them, while what is done ahead
has the time of a verification.
"""

from __future__ import annotations

from outrider.sched.jobs import Job, Pool, Stage, Work
from outrider.sched.prefill_draft_verify import DECODE, PREFILL, VERIFY, LaneSizes
from outrider.sched.works import chunks, job_of


class DraftAheadLanes:
    lanes = (DECODE, VERIFY, PREFILL)

    def __init__(self, sizes: LaneSizes) -> None:
        self._sizes = sizes

    def next_job(self, lane: str, pool: Pool, num_live: int) -> Job | None:
        del num_live
        sizes = self._sizes
        match lane:
            case "prefill":
                return job_of(chunks(pool, sizes.chunk, sizes.prefill))
            case "verify":
                return job_of(pool.verify[: sizes.verify])
            case _:
                waiting = pool.draft[: sizes.decode]
                if waiting:
                    return job_of([Work(w.seq_id, Stage.DRAFT, w.num_tokens) for w in waiting])
                return job_of(pool.ahead)
