"""One lane: every job is a whole round of all that decode, with prompt chunks beside it.

Sequences that already decode always take part, so a long prompt cannot hold them up for more than
one chunk; first rounds and prompt chunks share the chunk, oldest first (ids grow with age).
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
        decoding = [work for work in pool.draft if work.num_tokens == 1]
        first_rounds = [work for work in pool.draft if work.num_tokens > 1]
        for work in decoding:
            yield from _round(work)
        room = self._chunk
        # By age: the oldest always gets something, so nothing starves.
        for work in sorted((*first_rounds, *pool.prefill), key=lambda work: work.seq_id):
            if work.stage is Stage.DRAFT and work.num_tokens <= room:
                room -= work.num_tokens
                yield from _round(work)
            elif work.stage is Stage.PREFILL and room:
                # Leave at least one token for the first round, which needs its logits.
                num_tokens = min(room, work.num_tokens - 1)
                room -= num_tokens
                yield Work(work.seq_id, Stage.PREFILL, num_tokens)


def _round(work: Work) -> tuple[Work, Work]:
    return (
        Work(work.seq_id, Stage.DRAFT, work.num_tokens),
        Work(work.seq_id, Stage.VERIFY, work.num_tokens),
    )
