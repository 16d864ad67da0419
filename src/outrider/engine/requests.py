"""Requests in flight, and failed jobs: which requests end, and which are tried again.

A failure ends as few requests as possible. A job that fails without naming a sequence is tried
again for each of its sequences alone; a sequence that fails alone is given up, and the others are
not affected. A sequence that fails alone for lack of memory waits until others give theirs back.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING

from outrider.core.clock import HOST_CLOCK, Clock
from outrider.core.draft import Draft, Outcome, RoundTrace
from outrider.core.errors import (
    CapacityError,
    DrafterError,
    QueueFullError,
    SequenceError,
    ordinary,
    out_of_memory,
)
from outrider.core.process import is_interrupt
from outrider.core.protocols import CausalLM
from outrider.engine.drafting import DrafterHandle
from outrider.engine.lanes import LaneResult, LaneTask
from outrider.engine.round import LiveSequence
from outrider.sched.admission import KNEE_START, Knee, Limit
from outrider.sched.jobs import Job, JobKind, Ledger, Limits, ReadyQueues, num_admissible

if TYPE_CHECKING:
    from outrider.plugins.compaction import Compaction

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Counts:
    """Counts of requests since the engine was built. Of the submitted requests some wait, some run,
    and the rest completed, failed or were cancelled."""

    submitted: int = 0
    rejected: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    preempted: int = 0
    live: int = 0


@dataclass(slots=True)
class KneeOnceNeeded:
    """A limit that makes its `Knee` when a pass has several requests, or some wait."""

    highest: int
    _knee: Knee | None = None

    @property
    def limit(self) -> int:
        return min(KNEE_START, self.highest) if self._knee is None else self._knee.limit

    def observe(self, trace: RoundTrace) -> None:
        if self._knee is None:
            if trace.batch_size == 1 and not trace.num_waiting:
                return
            self._knee = Knee(highest=self.highest)
        self._knee.observe(trace)


# Seconds of a round's mask; a faster one is no burden on others.
SLOW_MASK = 0.02


@dataclass(slots=True)
class RequestTable:
    """The table of requests; it opens and closes sequences in all memories at once. `limits` bound
    the requests in flight, `batch_limit` the running ones. `timed` have a time limit."""

    target: CausalLM
    drafting: DrafterHandle
    ledger: Ledger
    limits: Limits
    batch_limit: Limit | None = None
    compaction: Compaction | None = None
    counts: Counts = field(default_factory=Counts)
    clock: Clock = HOST_CLOCK
    waiting: deque[LiveSequence] = field(default_factory=deque[LiveSequence])
    live: dict[int, LiveSequence] = field(default_factory=dict[int, LiveSequence])
    _resting: dict[int, float] = field(default_factory=dict[int, float])
    timed: dict[int, LiveSequence] = field(default_factory=dict[int, LiveSequence])
    _most_tokens: int = 0
    _failures: Failures | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def failures(self) -> Failures:
        """The handler of these requests' failed jobs."""
        if self._failures is None:
            self._failures = Failures(self)
        return self._failures

    def submit(self, seq: LiveSequence) -> None:
        """Queue a request. Raises CapacityError if the whole arena could not hold it, and
        QueueFullError if too many wait."""
        if len(self.waiting) >= self.limits.max_waiting:
            self.counts.rejected += 1
            raise QueueFullError(len(self.waiting), self.counts.rejected)
        need = self._most(seq)
        if need > self.limits.num_tokens:
            raise CapacityError(
                f"a prompt of {seq.prompt_length} tokens with up to {seq.limit} more needs "
                f"{need} arena tokens; the arena has {self.limits.num_tokens}.",
                hint="raise --arena-tokens or lower --max-tokens",
            )
        self.counts.submitted += 1
        if seq.params.max_time:
            seq.deadline = self.clock() + seq.params.max_time
        self.waiting.append(seq)
        self._watch(seq)

    def overdue(self) -> list[LiveSequence]:
        """Return the requests past their time limits, waiting or running."""
        now = self.clock()
        return [seq for seq in self.timed.values() if now >= seq.deadline]

    def rest(self, seq: LiveSequence) -> None:
        """Let others have as much time as the slow mask of `seq` took in the round that has ended:
        one thread runs all masks, and the share of this one is then at most half."""
        self._resting[seq.seq_id] = self.clock() + seq.mask_seconds

    def pool(self, *, patient: bool = True, busy: bool = False) -> ReadyQueues:
        """Return the waiting sequences by stage, without resting ones if others can run."""
        free = self.target.state.num_free_tokens
        whole = self.ledger.pool(free, patient=patient)
        if not self._resting:
            return whole
        now = self.clock()
        self._resting = {i: end for i, end in self._resting.items() if end > now and i in self.live}
        others = whole.without(self._resting.keys())
        return others if busy or others.has_work else whole

    @property
    def num_free(self) -> int:
        """Requests that may start now, if there is memory for them; none if it is negative."""
        most = self.limits.num_sequences
        if self.batch_limit is not None:
            most = min(most, self.batch_limit.limit)
        return most - len(self.live)

    def admit(self) -> None:
        """Start the waiting requests that may start."""
        num_free = self.num_free
        limits = replace(self.limits, num_sequences=num_free + len(self.live))
        if not self.waiting or num_free <= 0:
            return
        waiting = [self._expected(seq) for seq in islice(self.waiting, num_free)]
        running = [self._expected(seq) for seq in self.live.values()]
        for _ in range(num_admissible(waiting, running, limits)):
            self.open(self.waiting[0])
            self.waiting.popleft()

    def open(self, seq: LiveSequence) -> None:
        known = seq.tokens[:-1] if self.compaction is None else self.compaction.shared(seq)
        shared = () if seq.is_unscored else known
        reused = self.target.state.open(seq.seq_id, shared, seq.params.cache_salt)
        if not seq.num_preempted:
            seq.num_cached = reused
        try:
            self.drafting.open(seq)
        except BaseException:  # an interrupt
            self.target.state.close(seq.seq_id)
            raise
        self.live[seq.seq_id] = seq
        self.counts.live = len(self.live)
        self._most_tokens += self._most(seq)
        self._watch(seq)
        self.ledger.add(seq.seq_id, len(seq.tokens) - reused)

    def withdraw(self, seq_id: int) -> bool:
        """Remove a request from those that wait; return whether it was there."""
        others = deque(seq for seq in self.waiting if seq.seq_id != seq_id)
        was_waiting = len(others) < len(self.waiting)
        self.waiting = others
        if was_waiting:
            self.timed.pop(seq_id, None)
        return was_waiting

    def drop(self, seq_id: int) -> None:
        """End a running sequence that the ledger still contains."""
        self.ledger.drop(seq_id)
        self.close(seq_id)

    def close(self, seq_id: int) -> None:
        """Free the memory of a sequence that the ledger has released."""
        self._most_tokens -= self._most(self.live.pop(seq_id))
        self.counts.live = len(self.live)
        self.timed.pop(seq_id, None)
        self.target.state.close(seq_id)
        self.drafting.close(seq_id, in_use=self.ledger.is_running(seq_id))

    def with_pages(self, job: Job) -> Job | None:
        """Return `job`, or the part that gets pages after pre-empting the youngest."""
        if not self.may_run_out or job.kind is JobKind.AHEAD:
            return job
        while job.works:
            counts = {work.seq_id: self._staged(work.seq_id, work.num_tokens) for work in job.works}
            try:
                self.target.state.reserve(counts)
            except CapacityError:
                victim = self._youngest()
                if victim is None:
                    return None
                self.preempt(victim)
                job = Job(tuple(work for work in job.works if work.seq_id != victim.seq_id))
            else:
                return job
        return None

    @property
    def may_run_out(self) -> bool:
        """True if the arena may be too small for what all running sequences may still emit."""
        return self._most_tokens > self.limits.num_tokens

    def _most(self, seq: LiveSequence) -> int:
        """Return the most arena tokens that a sequence ever holds."""
        return self.limits.most(seq.prompt_length + seq.limit)

    def _staged(self, seq_id: int, num_tokens: int) -> int:
        """Return the most arena tokens that a job which reads `num_tokens` of a text takes."""
        seq = self.live[seq_id]
        end = len(seq.tokens) + seq.num_remaining + self.limits.past_end
        return min(num_tokens + self.limits.spare, end - self.target.state.length(seq_id))

    def _expected(self, seq: LiveSequence) -> int:
        # A lane may append a token between the next two lines: then the sequence counts for more
        # than it will hold.
        num_left = seq.num_remaining
        num_tokens = len(seq.tokens)
        if self.compaction is not None and seq.seq_id in self.live:
            num_tokens -= self.compaction.num_dropped(self.target, seq.seq_id)
        return self.limits.expected(num_tokens, num_left, is_open=seq.params.is_open)

    def _youngest(self) -> LiveSequence | None:
        """Return the youngest sequence that is in no job; younger sequences have larger ids."""
        idle = [seq_id for seq_id in self.live if not self.ledger.is_running(seq_id)]
        return self.live[max(idle)] if idle else None

    def preempt(self, seq: LiveSequence) -> None:
        """Pre-empt a sequence. Its emitted tokens stay; its next round is a first one."""
        self.drop(seq.seq_id)
        seq.last, seq.draft = None, Draft.empty()
        seq.num_preempted += 1
        self.counts.preempted += 1
        self.waiting.appendleft(seq)
        self._watch(seq)

    def _watch(self, seq: LiveSequence) -> None:
        if seq.deadline < math.inf:
            self.timed[seq.seq_id] = seq


# How often a sequence may fail for lack of memory while no other gets a token.
MOST_TRIES = 8


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
