"""Where every sequence stands: the one state machine, driven by engine and simulator alike.

A sequence waits for one stage or runs in one job. While more of its prompt is unread than a round
may carry it waits for PREFILL; then it alternates between DRAFT and VERIFY, and its first VERIFY
also feeds the rest of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable

from outrider.sched.jobs import Job, Pool, Stage, Work


class Ledger:
    """`chunk` is the most prompt tokens that one target pass feeds for a sequence."""

    def __init__(self, chunk: int) -> None:
        self._chunk = chunk
        self._unread: dict[int, int] = {}
        self._waiting: dict[Stage, list[int]] = {stage: [] for stage in Stage}

    @property
    def num_live(self) -> int:
        return len(self._unread)

    def add(self, seq_id: int, num_unread: int) -> None:
        """Take in a sequence with `num_unread` tokens (at least one) to feed."""
        assert num_unread >= 1
        assert seq_id not in self._unread
        self._unread[seq_id] = num_unread
        self._await_next(seq_id)

    def drop(self, seq_id: int) -> None:
        """Forget a waiting sequence: finished early, cancelled or failed."""
        del self._unread[seq_id]
        for waiting in self._waiting.values():
            if seq_id in waiting:
                waiting.remove(seq_id)

    def pool(self, num_free_tokens: int) -> Pool:
        prefill, draft, verify = (
            tuple([Work(seq_id, stage, self._unread[seq_id]) for seq_id in self._waiting[stage]])
            for stage in Stage
        )
        return Pool(prefill, draft, verify, num_free_tokens)

    def start(self, job: Job) -> None:
        for seq_id in {work.seq_id for work in job.works}:
            self._waiting[self._first_stage(job, seq_id)].remove(seq_id)

    def undo(self, job: Job) -> None:
        """`job` failed: its sequences wait again for what they waited for before, in front."""
        for work in reversed(job.works):
            waiting = self._waiting[work.stage]
            if self._first_stage(job, work.seq_id) is work.stage:
                waiting.insert(0, work.seq_id)

    def finish(self, job: Job, finished: Callable[[int], bool]) -> None:
        """Move each sequence of `job` on; `finished` is asked after its VERIFY only."""
        last = {work.seq_id: work for work in job.works}
        for seq_id, work in last.items():
            match work.stage:
                case Stage.PREFILL:
                    self._unread[seq_id] -= work.num_tokens
                    self._await_next(seq_id)
                case Stage.DRAFT:
                    self._waiting[Stage.VERIFY].append(seq_id)
                case Stage.VERIFY:
                    self._unread[seq_id] = 1
                    if finished(seq_id):
                        del self._unread[seq_id]
                    else:
                        self._await_next(seq_id)

    @staticmethod
    def _first_stage(job: Job, seq_id: int) -> Stage:
        return next(work.stage for work in job.works if work.seq_id == seq_id)

    def _await_next(self, seq_id: int) -> None:
        stage = Stage.PREFILL if self._unread[seq_id] > self._chunk else Stage.DRAFT
        self._waiting[stage].append(seq_id)
