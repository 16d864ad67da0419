"""Schedule of one lane, which drafts and verifies in turns: a pure function of the ledger."""

from __future__ import annotations

from outrider.core.config import EngineConfig
from outrider.sched.jobs import Job, ReadyQueues, Stage, StageItem, job_of, rounds, shares


class SingleLane:
    """A schedule of one lane, in which a job drafts and verifies (single). A target pass reads at
    most `chunk` tokens of `prefill_batch` prompts, with rounds of `batch` sequences.

    Sequences that already decode always take part, so a long prompt cannot delay them for more than
    one chunk. First rounds and prompt chunks share the chunk: a prompt whose rest fits is read in
    the pass of its first round.
    """

    lanes = ("main",)

    def __init__(self, chunk: int, *, batch: int = 1024, prefill_batch: int = 1024) -> None:
        self._chunk, self._batch, self._prefill_batch = chunk, batch, prefill_batch

    def next_job(self, lane: str, pool: ReadyQueues, num_live: int) -> Job | None:
        del lane, num_live
        waiting = {work.seq_id: work.num_tokens for work in pool.prefill}
        decoding = list(pool.draft[: self._batch])
        reads: list[StageItem] = []
        for work in shares(pool, self._chunk, self._prefill_batch):
            is_rest = work.num_tokens == waiting[work.seq_id]
            if is_rest and len(decoding) < self._batch:
                decoding.append(work)
            else:  # without a round, the pending token is not read
                reads.append(StageItem(work.seq_id, Stage.PREFILL, work.num_tokens - is_rest))
        return job_of([*rounds(decoding), *reads])


def single_lane(config: EngineConfig) -> SingleLane:
    """Return the schedule with the sizes of a resolved configuration."""
    batch = config.most_batch
    return SingleLane(
        config.prefill_chunk,
        batch=config.decode_batch or batch,
        prefill_batch=config.prefill_batch or batch,
    )
