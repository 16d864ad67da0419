"""One lane: every job is a whole round of all that decode, with prompt chunks beside it.

Sequences that already decode come first, so a long prompt cannot hold them up for more than one
chunk; then first rounds and prompt chunks share what is left of the chunk.
"""

from __future__ import annotations

from collections.abc import Iterator

from outrider.sched.jobs import Job, Pool, Stage, Work


class SingleLane:
    """Draft and verify fused; `chunk` prompt tokens at most in one target pass."""

    lanes = ("main",)

    def __init__(self, chunk: int) -> None:
        self._chunk = chunk

    def next_job(self, lane: str, pool: Pool, num_live: int) -> Job | None:
        del lane, num_live
        works = tuple(self._works(pool))
        return Job(works) if works else None

    def _works(self, pool: Pool) -> Iterator[Work]:
        room = self._chunk
        for work in sorted(pool.draft, key=lambda work: work.num_tokens > 1):
            if work.num_tokens > 1:
                if work.num_tokens > room:
                    continue
                room -= work.num_tokens
            yield Work(work.seq_id, Stage.DRAFT, work.num_tokens)
            yield Work(work.seq_id, Stage.VERIFY, work.num_tokens)
        for work in pool.prefill:
            # Leave at least one token for the first round, which needs its logits.
            num_tokens = min(room, work.num_tokens - 1)
            if num_tokens > 0:
                room -= num_tokens
                yield Work(work.seq_id, Stage.PREFILL, num_tokens)
