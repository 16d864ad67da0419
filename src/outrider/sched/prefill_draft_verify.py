"""Three lanes: prompts are read, drafts made and drafts verified side by side, each of others.

With few requests there is nothing to do side by side, and a second job a round only costs: then the
decode lane drafts and verifies in one job, as with two lanes. The number of live requests decides,
with some hysteresis, at every job, so it may change in the middle of a request.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.sched.jobs import Job, Pool, Stage, Work
from outrider.sched.works import chunks, job_of, rounds

PREFILL, DECODE, VERIFY = "prefill", "decode", "verify"
# Requests fewer than the threshold at which the lanes are joined again.
HYSTERESIS = 1


@dataclass(frozen=True, slots=True)
class LaneSizes:
    """Most prompt tokens in a pass, and most sequences in a job of each lane."""

    chunk: int
    prefill: int = 1024
    decode: int = 1024
    verify: int = 1024


class PrefillDraftVerify:
    """Up to `threshold` live requests draft and verify in one job; one more separates the lanes,
    which stay so until there are fewer than `threshold`. 0 keeps them separate."""

    lanes = (DECODE, VERIFY, PREFILL)

    def __init__(self, sizes: LaneSizes, *, threshold: int = 3) -> None:
        self._sizes, self._threshold = sizes, threshold
        self._separate = threshold == 0

    def next_job(self, lane: str, pool: Pool, num_live: int) -> Job | None:
        self._separate = self._is_separate(num_live)
        sizes = self._sizes
        match lane:
            case "prefill":
                return job_of(chunks(pool, sizes.chunk, sizes.prefill))
            case "verify":
                return job_of(pool.verify[: sizes.verify])
            case _:
                waiting = pool.draft[: sizes.decode]
                if not self._separate:
                    return job_of(rounds(waiting))
                return job_of([Work(w.seq_id, Stage.DRAFT, w.num_tokens) for w in waiting])

    def _is_separate(self, num_live: int) -> bool:
        if num_live > self._threshold:
            return True
        return self._separate and num_live > self._threshold - HYSTERESIS
