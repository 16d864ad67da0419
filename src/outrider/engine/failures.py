"""Failed jobs: which requests end, and which are tried again.

A failure ends as few requests as possible. A job that fails without naming a sequence is tried
again for each of its sequences alone; a sequence that fails alone is given up, and the others are
not affected. A sequence that fails alone for lack of memory waits until others give theirs back.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from dataclasses import dataclass, field

from outrider.core.draft import Draft, Outcome
from outrider.core.errors import CapacityError, DrafterError, SequenceError, ordinary, out_of_memory
from outrider.core.interrupts import is_interrupt
from outrider.core.sequence import LiveSequence
from outrider.engine.lanes import LaneResult, LaneTask
from outrider.engine.requests import RequestTable
from outrider.sched.jobs import Job, JobKind

# How often a sequence may fail for lack of memory while no other gets a token.
MOST_TRIES = 8

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Failures:
    """Handler of failed jobs. `saved` are outcomes whose text was kept although their job failed
    afterwards, `given_up` the failed requests until they are collected. `num_emitted` counts tokens
    of all requests, which shows whether the engine makes progress."""

    residents: RequestTable
    saved: list[Outcome] = field(default_factory=list[Outcome])
    given_up: list[LiveSequence] = field(default_factory=list[LiveSequence])
    num_emitted: int = 0
    _alone: dict[str, deque[Job]] = field(default_factory=dict[str, deque[Job]])
    _torn: set[int] = field(default_factory=set[int])
    _starved: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])

    def next_alone(self, lane: str) -> Job | None:
        """Return a failed job's sequence to be tried alone; the ledger has started it."""
        again = self._alone.get(lane)
        return again.popleft() if again else None

    def end(self, done: LaneResult, error: BaseException) -> int:
        """Handle the end of a job by `error`; return how many requests it ended."""
        task, job = done.task, done.task.job
        error = out_of_memory(error, "generating") or error
        if isinstance(error, SequenceError):
            self.undo(task)
            cause = error.__cause__
            return self._blame(error.seq_id, out_of_memory(cause, "generating") or cause)
        if is_interrupt(error) or job.kind is JobKind.AHEAD:
            self.undo(task)
            return 0
        error = ordinary(error)
        if len(job.seq_ids) == 1:
            self.undo(task)
            return self._end_alone(job.seq_ids[0], error)
        _log.warning("A job failed; its sequences are tried one by one.", exc_info=error)
        return self._divide(done, error)

    def undo(self, task: LaneTask) -> None:
        """Restore every sequence to its state before the failed round, so that others can go on
        after an error. Finished outcomes are saved."""
        self._save(task)
        self._undo(task.job)

    def _save(self, task: LaneTask) -> None:
        self.saved += task.outcomes
        known = Counter(outcome.seq_id for outcome in task.outcomes)
        for seq, num_rounds in zip(task.batch, task.rounds, strict=True):
            if seq.num_rounds > num_rounds + known[seq.seq_id] and seq.last is not None:
                self.saved.append(seq.last)

    def recall(self, seq_id: int) -> bool:
        """Undo the waiting single retry of a sequence; return whether there was one."""
        for again in self._alone.values():
            for job in again:
                if seq_id in job.seq_ids:
                    again.remove(job)
                    self._undo(job)
                    return True
        return False

    def _divide(self, done: LaneResult, error: Exception) -> int:
        job, num_failed = done.task.job, 0
        self._save(done.task)
        self._empty(job)
        again = self._alone.setdefault(done.lane, deque())
        for seq_id in job.seq_ids:
            if self._is_torn(seq_id):
                num_failed += self._reread(job.alone(seq_id), error)
            else:
                again.append(job.alone(seq_id))
        return num_failed

    def _blame(self, seq_id: int, cause: BaseException | None) -> int:
        """End a sequence that failed; for a draft that cannot be judged it loses its drafter."""
        if not isinstance(cause, DrafterError):
            return self._give_up(seq_id, ordinary(cause or SequenceError(seq_id)))
        seq = self.residents.live[seq_id]
        seq.no_drafts, seq.draft = str(cause), Draft.empty()
        return 0

    def _end_alone(self, seq_id: int, error: Exception) -> int:
        """End a sequence that failed alone, or let it wait for memory while others go on."""
        residents = self.residents
        seq = residents.live.get(seq_id)
        then, num_tries = self._starved.get(seq_id, (-1, 0))
        num_tries = num_tries + 1 if then == self.num_emitted else 1
        in_vain = num_tries > MOST_TRIES or len(residents.live) == 1
        if isinstance(error, CapacityError) and seq and not in_vain:
            self._starved[seq_id] = self.num_emitted, num_tries
            if not residents.ledger.is_running(seq_id):
                residents.preempt(seq)
            return 0
        return self._give_up(seq_id, error)

    def _give_up(self, seq_id: int, error: Exception) -> int:
        """Give up a request that has not ended; its batch goes on with the next job."""
        seq = self.residents.live.get(seq_id)
        if seq is None:
            return 0
        seq.error = error
        self.given_up.append(seq)
        self.residents.counts.failed += 1
        self.residents.drop(seq_id)
        return 1

    def _is_torn(self, seq_id: int) -> bool:
        """Return whether a job failed in the midst of its end: memory and ledger disagree, or the
        text has ended and its outcome was not delivered."""
        residents = self.residents
        seq = residents.live[seq_id]
        known = len(seq.tokens) - residents.ledger.num_unread(seq_id)
        return seq.finish is not None or residents.target.state.length(seq_id) != known

    def _reread(self, job: Job, error: Exception) -> int:
        """Have a torn sequence read its text again, but only once."""
        self._undo(job)
        (seq_id,) = job.seq_ids
        if seq_id in self._torn:
            return self._give_up(seq_id, error)
        self._torn.add(seq_id)
        return 0

    def _empty(self, job: Job) -> None:
        """Unstage the rows of a failed pass."""
        if job.kind is not JobKind.AHEAD:
            self.residents.target.state.commit(dict.fromkeys(job.seq_ids, ()))

    def _undo(self, job: Job) -> None:
        self._empty(job)
        self.residents.ledger.undo(job)
        for seq_id in job.seq_ids if job.kind is not JobKind.AHEAD else ():
            self._mend(self.residents.live[seq_id])

    def _mend(self, seq: LiveSequence) -> None:
        """Repair a sequence after an interrupt between memory, text and the job's end."""
        if not self._is_torn(seq.seq_id):
            return
        self.residents.drop(seq.seq_id)
        if seq.finish is not None:
            self.residents.counts.completed += 1
        else:
            # Memory holds more than was delivered: read the text again.
            self.residents.open(seq)
