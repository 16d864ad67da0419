"""State machine of sequences (waiting for a stage, or running in a job), for engine and simulator.

A sequence waits for PREFILL while it has unread tokens besides the pending one; then it alternates
between DRAFT and VERIFY. One job may do both, and a job with the VERIFY of a sequence that waits
for PREFILL reads all of the rest. PREFILL is served in the order of arrival, however many chunks
were read; the other stages are served first come, first served. While a VERIFY of a sequence runs,
an AHEAD of it may run on another lane; it does not change the sequence's state.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

from outrider.core.errors import ContractError
from outrider.sched.jobs import Job, ReadyQueues, Stage, StageItem

_STAGES = (Stage.PREFILL, Stage.DRAFT, Stage.VERIFY)


class Ledger:
    """The states of an engine's sequences. With `drafts_ahead` those in VERIFY may have AHEAD."""

    def __init__(self, *, drafts_ahead: bool = False) -> None:
        self._drafts_ahead = drafts_ahead
        self._num_added = 0
        self._arrival: dict[int, int] = {}
        self._unread: dict[int, int] = {}
        self._waiting: dict[Stage, list[int]] = {stage: [] for stage in _STAGES}
        self._running: dict[int, Stage] = {}
        self._ahead: list[int] = []
        self._drafted_ahead: set[int] = set()

    @property
    def num_live(self) -> int:
        return len(self._unread)

    def num_unread(self, seq_id: int) -> int:
        """Return a sequence's tokens that are not in memory, the pending one included."""
        return self._unread[seq_id]

    def add(self, seq_id: int, num_unread: int) -> None:
        """Add a sequence with `num_unread` tokens (at least one) to feed."""
        if num_unread < 1:
            raise ContractError("its pending token is unread at least")
        if seq_id in self._unread:
            raise ContractError("the sequence is there already")
        self._unread[seq_id] = num_unread
        self._arrival[seq_id] = self._num_added
        self._num_added += 1
        self._await_next(seq_id)

    def drop(self, seq_id: int) -> None:
        """Forget a sequence: finished early, cancelled, failed or pre-empted."""
        self._unread.pop(seq_id, None)
        self._arrival.pop(seq_id, None)
        self._running.pop(seq_id, None)
        for waiting in (*self._waiting.values(), self._ahead):
            if seq_id in waiting:
                waiting.remove(seq_id)

    def is_running(self, seq_id: int) -> bool:
        """Return whether a job of the sequence has started and not ended, AHEAD included."""
        return seq_id in self._running or seq_id in self._drafted_ahead

    def pool(self, num_free_tokens: int, *, patient: bool = True) -> ReadyQueues:
        return ReadyQueues(
            self._works(Stage.PREFILL),
            self._works(Stage.DRAFT),
            self._works(Stage.VERIFY),
            num_free_tokens,
            tuple([StageItem(seq_id, Stage.AHEAD, 0) for seq_id in self._ahead]),
            self._seq_ids_in(Stage.DRAFT),
            self._seq_ids_in(Stage.VERIFY),
            patient,
            num_ahead=len(self._drafted_ahead),
        )

    def _works(self, stage: Stage) -> tuple[StageItem, ...]:
        unread = self._unread
        return tuple([StageItem(seq_id, stage, unread[seq_id]) for seq_id in self._waiting[stage]])

    def _seq_ids_in(self, stage: Stage) -> tuple[int, ...]:
        """Return the sequences that are in a job of `stage` now."""
        return tuple([seq_id for seq_id, own in self._running.items() if own is stage])

    def start(self, job: Job) -> None:
        for seq_id, stages in _stages_of(job).items():
            if stages == [Stage.AHEAD]:
                self._ahead.remove(seq_id)
                self._drafted_ahead.add(seq_id)
                continue
            stage = self._stage_awaited(seq_id)
            # Recorded first: `undo` then finds it, wherever an interrupt comes.
            self._running[seq_id] = stage
            self._waiting[stage].remove(seq_id)
            if self._drafts_ahead and stages == [Stage.VERIFY]:
                self._ahead.append(seq_id)

    def undo(self, job: Job) -> None:
        """Put the sequences of a failed job back to the front of their queues."""
        for seq_id, stages in reversed(_stages_of(job).items()):
            if stages == [Stage.AHEAD]:
                self._drafted_ahead.discard(seq_id)
                continue
            self._withdraw(seq_id)
            stage = self._running.pop(seq_id, None)
            # An interrupt may have come before the job was started, or while it was being started.
            if stage is not None and seq_id not in self._waiting[stage]:
                self._await(seq_id, stage, index=0)

    def finish(self, job: Job, finished: Callable[[int], bool]) -> None:
        """Move each sequence of `job` to its next stage; `finished` is for those verified."""
        last = {work.seq_id: work for work in job.works}
        for seq_id, work in last.items():
            if work.stage is Stage.AHEAD:
                self._drafted_ahead.discard(seq_id)
                continue
            del self._running[seq_id]
            match work.stage:
                case Stage.PREFILL:
                    self._unread[seq_id] -= work.num_tokens
                    self._await_next(seq_id)
                case Stage.DRAFT:
                    self._await(seq_id, Stage.VERIFY)
                case Stage.VERIFY:
                    self._withdraw(seq_id)
                    self._unread[seq_id] = 1
                    if finished(seq_id):
                        del self._unread[seq_id], self._arrival[seq_id]
                    else:
                        self._await_next(seq_id)

    def _stage_awaited(self, seq_id: int) -> Stage:
        return next(stage for stage in _STAGES if seq_id in self._waiting[stage])

    def _withdraw(self, seq_id: int) -> None:
        """Withdraw the offer for AHEAD: the sequence's verdict is no longer open."""
        if seq_id in self._ahead:
            self._ahead.remove(seq_id)

    def _await_next(self, seq_id: int) -> None:
        self._await(seq_id, Stage.PREFILL if self._unread[seq_id] > 1 else Stage.DRAFT)

    def _await(self, seq_id: int, stage: Stage, index: int | None = None) -> None:
        waiting = self._waiting[stage]
        if stage is Stage.PREFILL:
            insort(waiting, seq_id, key=self._arrival.__getitem__)
        else:
            waiting.insert(len(waiting) if index is None else index, seq_id)


def _stages_of(job: Job) -> dict[int, list[Stage]]:
    stages: dict[int, list[Stage]] = {}
    for work in job.works:
        stages.setdefault(work.seq_id, []).append(work.stage)
    return stages
