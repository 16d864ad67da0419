"""Takes requests in and runs the schedule's jobs on lanes until all have ended.

All that is decided is decided in the caller's thread, between jobs: who starts, who waits, who is
given up. Lanes only run models. So one executor may run lanes inline, one after another, and
another on threads, and both give the same text.

What fails ends as few requests as it can. A job that fails for a reason that names no sequence is
tried again for each of its sequences alone, and who fails alone is given up; the others never
notice.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.core.budget import JobTrace
from outrider.core.draft import Draft, Outcome
from outrider.core.errors import CapacityError, DrafterError, SequenceError
from outrider.core.protocols import Drafter
from outrider.core.sequence import LiveSequence
from outrider.engine.lanes.task import Done, Executor, Task, Work
from outrider.engine.residents import Residents
from outrider.engine.round import Chunk
from outrider.sched.jobs import Job, LaneOrder, Schedule, Stage

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Engine:
    """`order` arranges idle lanes, None keeps the schedule's own. When a job ends, `deliver` passes
    on the traces of its rounds, which a lane may not do, and `jobs` receives the job's own."""

    residents: Residents
    executor: Executor
    schedule: Schedule
    order: LaneOrder | None = None
    deliver: Callable[[], None] | None = None
    jobs: Callable[[JobTrace], None] | None = None
    _undelivered: list[Outcome] = field(default_factory=list[Outcome])
    _running: dict[str, Task] = field(default_factory=dict[str, Task])
    _alone: dict[str, deque[Job]] = field(default_factory=dict[str, deque[Job]])
    _torn: set[int] = field(default_factory=set[int])

    @property
    def drafter(self) -> Drafter:
        return self.residents.drafting.drafter

    @property
    def has_work(self) -> bool:
        return bool(self.residents.waiting or self.residents.live or self._undelivered)

    def submit(self, seq: LiveSequence) -> None:
        """Queue a request. Raises CapacityError if the whole arena could not hold it, and
        QueueFullError if too many wait."""
        self.residents.submit(seq)

    def step(self) -> list[Outcome]:
        """Start what can start, and wait until some job ends; the outcomes of its sequences."""
        self.residents.admit()
        self._start_jobs()
        outcomes, self._undelivered = self._undelivered, []
        return outcomes or self._wait()

    def cancel(self, seq_id: int) -> None:
        """Stop a request, waiting or live, and free its memory; unknown ids are ignored. Waits for
        the job that it is in, if it is in one."""
        residents = self.residents
        if residents.withdraw(seq_id):
            residents.counts.cancelled += 1
        while residents.ledger.is_running(seq_id):
            if not self._recall(seq_id):
                self._undelivered += self._wait()
        if seq_id in residents.live:
            residents.counts.cancelled += 1
            residents.drop(seq_id)

    def close(self) -> None:
        """End the lanes' threads, and the drafter's process if it has one."""
        self.executor.close()
        self.residents.drafting.shut_down()

    # Jobs

    def _start_jobs(self) -> None:
        """Poll idle lanes until none starts: a verify that starts may make work ahead of it."""
        started = True
        while started:
            started = False
            for lane in self._lanes():
                if lane not in self.executor.busy and self._start(lane):
                    started = True

    def _lanes(self) -> Sequence[str]:
        lanes, residents = self.schedule.lanes, self.residents
        if self.order is None:
            return lanes
        pool = residents.ledger.pool(residents.target.state.num_free_tokens)
        return self.order.arrange(lanes, pool)

    def _start(self, lane: str) -> bool:
        residents = self.residents
        pool = residents.ledger.pool(residents.target.state.num_free_tokens)
        again = self._alone.get(lane)
        if again:
            job: Job | None = again.popleft()
        else:
            job = self.schedule.next_job(lane, pool, residents.ledger.num_live)
            job = residents.with_room(job) if job else None
            if job:
                residents.ledger.start(job)
        if not job:
            return False
        queues = len(pool.prefill), len(pool.draft), len(pool.verify)
        self._running[lane] = self._task(job, queues, pool.num_free_tokens)
        self.executor.start(lane, self._running[lane])
        return True

    def _task(self, job: Job, queues: tuple[int, int, int], num_free: int) -> Task:
        live, drafting = self.residents.live, self.residents.drafting
        batch = [live[work.seq_id] for work in job.of(Stage.VERIFY) or job.of(Stage.DRAFT)]
        stages = job.stages
        if stages == (Stage.VERIFY,):
            drafting.begin(batch)
        return Task(
            job=job,
            stages=stages,
            batch=batch,
            chunks=[Chunk(live[w.seq_id], w.num_tokens) for w in job.of(Stage.PREFILL)],
            ahead=drafting.rounds([work.seq_id for work in job.of(Stage.AHEAD)]),
            num_waiting=len(self.residents.waiting),
            num_live=len(live),
            queues=queues,
            num_free=num_free,
        )

    def _wait(self) -> list[Outcome]:
        busy, drafting = self.executor.busy, self.residents.drafting
        if not busy:
            return []
        drafts = {lane: busy[lane] for lane in busy if self._running[lane].only_drafts}
        ended = self.executor.wait(drafting.patience(drafts))
        for lane in drafting.overdue(drafts) if not ended else ():
            ended.append(self._abandon(lane))
        return [outcome for done in ended for outcome in self._finish(done)]

    def _abandon(self, lane: str) -> Done:
        """The end of the drafting that `lane` hangs in: no drafts, for anybody any more."""
        drafting, began = self.residents.drafting, self.executor.busy[lane]
        self.executor.abandon(lane)
        drafting.give_up()
        for seq in self.residents.live.values():
            seq.no_drafts = drafting.hung
        return Done(lane, self._running[lane], Work(), None, began, drafting.clock())

    def _finish(self, done: Done) -> list[Outcome]:
        job, num_failed = done.task.job, 0
        if self.deliver is not None:
            self.deliver()
        if done.error is None:
            if done.task.stages == (Stage.VERIFY,):
                self.residents.drafting.verified(done.ended - done.began)
            self._settle(done)
        else:
            num_failed = self._fail(done, done.error)
        if self.jobs is not None or self.order is not None:
            self._report(done.trace(num_failed))
        if done.task.stages == (Stage.AHEAD,):
            self.residents.drafting.released(job.seq_ids)
        return list(done.work.outcomes)

    def _report(self, trace: JobTrace) -> None:
        if self.jobs is not None:
            self.jobs(trace)
        if self.order is not None:
            self.order.observe(trace)

    def _settle(self, done: Done) -> None:
        residents, job, batch = self.residents, done.task.job, done.task.batch
        if done.task.stages == (Stage.DRAFT,):
            done.work.proposals.give(batch)
        for seq_id, reason in done.work.faults.items():
            if seq_id in residents.live:
                residents.live[seq_id].no_drafts = reason
        residents.ledger.finish(job, lambda seq_id: residents.live[seq_id].finish is not None)
        for seq in batch:
            if seq.finish is not None:
                residents.counts.completed += 1
                residents.close(seq.seq_id)

    # Failures

    def _fail(self, done: Done, error: BaseException) -> int:
        """How many requests `error` ended."""
        job = done.task.job
        if isinstance(error, SequenceError):
            self._undo(job)
            return self._blame(error.seq_id, error.__cause__)
        if not isinstance(error, Exception):
            self._undo(job)
            raise error
        if job.stages == (Stage.AHEAD,):
            self._undo(job)
            return 0
        if len(job.seq_ids) == 1:
            self._undo(job)
            return self._end_alone(job.seq_ids[0], error)
        _log.warning("A job failed; its sequences are tried one by one.", exc_info=error)
        self._empty(job)
        again = self._alone.setdefault(done.lane, deque())
        num_failed = 0
        for seq_id in job.seq_ids:
            if self._is_torn(seq_id):
                num_failed += self._reread(job.alone(seq_id), error)
            else:
                again.append(job.alone(seq_id))
        return num_failed

    def _blame(self, seq_id: int, cause: BaseException | None) -> int:
        """A draft that cannot be judged costs a sequence its drafter, anything else its place."""
        assert isinstance(cause, Exception)
        if not isinstance(cause, DrafterError):
            return self._give_up(seq_id, cause)
        seq = self.residents.live[seq_id]
        seq.no_drafts, seq.draft = str(cause), Draft.empty()
        return 0

    def _end_alone(self, seq_id: int, error: Exception) -> int:
        """It failed by itself. For want of memory it waits until others give theirs back."""
        residents = self.residents
        if isinstance(error, CapacityError) and len(residents.live) > 1:
            residents.preempt(residents.live[seq_id])
            return 0
        return self._give_up(seq_id, error)

    def _give_up(self, seq_id: int, error: Exception) -> int:
        """The others of its batch go on with the next job. One that had ended is not given up."""
        seq = self.residents.live.get(seq_id)
        if seq is None:
            return 0
        seq.error = error
        self.residents.counts.failed += 1
        self.residents.drop(seq_id)
        return 1

    def _is_torn(self, seq_id: int) -> bool:
        """Whether a job failed in the midst of its end: memory holds other than the ledger knows,
        or the text has ended and nobody was told."""
        residents = self.residents
        seq = residents.live[seq_id]
        known = len(seq.tokens) - residents.ledger.num_unread(seq_id)
        return seq.finish is not None or residents.target.state.length(seq_id) != known

    def _reread(self, job: Job, error: Exception) -> int:
        """Have a torn sequence read its text again, but not for ever."""
        self._undo(job)
        (seq_id,) = job.seq_ids
        if seq_id in self._torn:
            return self._give_up(seq_id, error)
        self._torn.add(seq_id)
        return 0

    def _recall(self, seq_id: int) -> bool:
        """Undo what was to be tried again of a sequence alone; whether there was anything."""
        for again in self._alone.values():
            for job in again:
                if seq_id in job.seq_ids:
                    again.remove(job)
                    self._undo(job)
                    return True
        return False

    def _empty(self, job: Job) -> None:
        """Nothing of a pass that failed stays staged."""
        if job.stages != (Stage.AHEAD,):
            self.residents.target.state.commit(dict.fromkeys(job.seq_ids, ()))

    def _undo(self, job: Job) -> None:
        """Leave every sequence as it was before `job`, so that others can go on after an error."""
        self._empty(job)
        self.residents.ledger.undo(job)
        for seq_id in job.seq_ids if job.stages != (Stage.AHEAD,) else ():
            self._mend(self.residents.live[seq_id])

    def _mend(self, seq: LiveSequence) -> None:
        """An interrupt may fall between memory and text, or between text and the end of the job."""
        if not self._is_torn(seq.seq_id):
            return
        self.residents.drop(seq.seq_id)
        if seq.finish is not None:
            self.residents.counts.completed += 1
        else:
            # Memory holds more than was said: read the text again.
            self.residents.open(seq)
