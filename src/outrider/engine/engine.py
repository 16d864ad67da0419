"""The engine loop: admits requests, runs the schedule's jobs on lanes, and delivers outcomes.

All decisions (who starts, who waits, who is given up) are made in the caller's thread, between
jobs; lanes only run models. So lanes may run inline or on threads, with the same text.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from outrider.core.draft import JobTrace, Outcome
from outrider.core.errors import foreign
from outrider.core.process import breakable, is_interrupt
from outrider.core.protocols import Drafter
from outrider.engine.lanes import Executor, LaneResult, LaneTask, LaneWork
from outrider.engine.requests import SLOW_MASK, RequestTable
from outrider.engine.round import Chunk, LiveSequence
from outrider.sched.admission import PromptPace
from outrider.sched.jobs import (
    Job,
    JobKind,
    JobObserver,
    LaneOrder,
    ReadyQueues,
    Schedule,
    Stage,
    job_observers,
)

_log = logging.getLogger(__name__)

# Jobs whose drafts were made in other jobs.
_VERIFYING = (JobKind.VERIFY, JobKind.PREFILL)


@dataclass(slots=True)
class Engine:
    """The engine loop. `order` arranges idle lanes; None keeps the schedule's own order. When a job
    ends, `deliver` passes on the traces of its rounds, which a lane may not do, and `jobs` gets its
    own trace. `pace` bounds the prompt tokens of a job; None leaves that to the schedule."""

    residents: RequestTable
    executor: Executor
    schedule: Schedule
    order: LaneOrder | None = None
    deliver: Callable[[], None] | None = None
    jobs: Callable[[JobTrace], None] | None = None
    pace: PromptPace | None = None
    # Found when the first job ends: what learns from jobs.
    _observers: Sequence[JobObserver] | None = field(default=None, init=False)
    _undelivered: list[Outcome] = field(default_factory=list[Outcome])
    _ended: deque[LaneResult] = field(default_factory=deque[LaneResult])
    _running: dict[str, LaneTask] = field(default_factory=dict[str, LaneTask])
    _more_seconds: float = 0.0

    @property
    def drafter(self) -> Drafter:
        return self.residents.drafting.drafter

    @property
    def has_work(self) -> bool:
        return bool(self.residents.waiting or self.residents.live or self._undelivered)

    @property
    def has_queue_slot(self) -> bool:
        """True if one more request may wait."""
        return len(self.residents.waiting) < self.residents.limits.max_waiting

    @property
    def has_free_slot(self) -> bool:
        """True if one more request would start at once, given memory. One request may also wait if
        the limit on the batch is learned, since it grows only while some wait."""
        residents = self.residents
        num_free = max(residents.num_free, int(residents.batch_limit is not None))
        return len(residents.waiting) < min(num_free, residents.limits.max_waiting)

    def give_way(self, seq_id: int) -> bool:
        """Pre-empt a running request for the one that came last, which then starts first. Return
        whether it could be pre-empted: a job may contain it."""
        residents = self.residents
        if seq_id not in residents.live or residents.ledger.is_running(seq_id):
            return False
        residents.preempt(residents.live[seq_id])
        residents.waiting.rotate(1)
        return True

    def submit(self, seq: LiveSequence) -> None:
        """Queue a request. Raises CapacityError if the whole arena could not hold it, and
        QueueFullError if too many wait."""
        self.residents.submit(seq)

    def step(self, seconds: float = 0.0) -> list[Outcome]:
        """Start what can start, wait until a job ends, and return the outcomes of its sequences.
        Outcomes that were held back come first: nothing of their sequences runs meanwhile. A job
        that consists of rounds may run several, until `seconds` are over."""
        if not self._undelivered:
            self._more_seconds = seconds
            self._undo_lost()
            if self.residents.timed:
                self._end_overdue()
            self.residents.admit()
            self._start_jobs()
            self._wait()
        return self.delivered()

    def delivered(self) -> list[Outcome]:
        """Return the outcomes that were decided and not yet returned."""
        outcomes, self._undelivered = self._undelivered, []
        return outcomes

    def given_up(self) -> list[LiveSequence]:
        """Return the requests that ended without an outcome since the last call: they failed, and
        `error` of each says why, or they reached their time limit."""
        failures = self.residents.failures
        failed, failures.given_up = failures.given_up, []
        return failed

    def holds(self, seq_id: int) -> bool:
        """Return whether tokens of a request may still be undelivered after its text has ended:
        lanes end texts before their outcomes are delivered."""
        delivered = all(outcome.seq_id != seq_id for outcome in self._undelivered)
        return seq_id in self.residents.live or not delivered

    def cancel(self, seq_id: int) -> None:
        """Stop a request, waiting or running, and free its memory; unknown ids are ignored. Waits
        for the job that contains the request, if there is one."""
        if self._take_out(seq_id):
            self.residents.counts.cancelled += 1

    def _end_overdue(self) -> None:
        for seq in self.residents.overdue():
            if self._take_out(seq.seq_id):
                seq.finish = "timeout"
                self.residents.counts.completed += 1
                self.residents.failures.given_up.append(seq)

    def _take_out(self, seq_id: int) -> bool:
        """Remove a request; return whether it was present and did not end while awaited."""
        residents = self.residents
        # The job comes first: one that fails for lack of memory leaves its sequences waiting.
        while residents.ledger.is_running(seq_id):
            if not self.residents.failures.recall(seq_id):
                self._undo_lost()
                self._wait()
        if seq_id in residents.live:
            residents.drop(seq_id)
            return True
        return residents.withdraw(seq_id)

    def close(self) -> None:
        """End the lanes' threads, and the drafter's process if it has one."""
        self.executor.close()
        self.residents.drafting.shut_down()

    # Jobs

    def _start_jobs(self) -> None:
        """Poll idle lanes until none starts: a verification that starts may make work ahead of it.
        Lanes may wait for each other only while something runs."""
        started = patient = True
        while started or (patient and not self.executor.busy):
            patient = patient and (started or bool(self.executor.busy))
            started = False
            for lane in self._lanes():
                if lane not in self.executor.busy and self._start(lane, patient=patient):
                    started = True

    def _lanes(self) -> Sequence[str]:
        lanes, residents = self.schedule.lanes, self.residents
        if self.order is None:
            return lanes
        pool = residents.ledger.pool(residents.target.state.num_free_tokens)
        return self.order.arrange(lanes, pool)

    def _start(self, lane: str, *, patient: bool) -> bool:
        residents = self.residents
        pool = residents.pool(patient=patient, busy=bool(self._running))
        if pool.prefill and self.pace is not None:
            pool = replace(pool, most_prompt_tokens=self._most_prompt_tokens(self.pace, pool))
        job = again = self.residents.failures.next_alone(lane)
        if again is None:
            job = self.schedule.next_job(lane, pool, residents.ledger.num_live)
            job = residents.with_pages(job) if job else None
        if not job:
            return False
        queues = len(pool.prefill), len(pool.draft), len(pool.verify)
        task = self._running[lane] = self._task(job, queues, pool.num_free_tokens)
        if again is None:
            residents.ledger.start(job)
        self.executor.start(lane, task)
        return True

    def _most_prompt_tokens(self, pace: PromptPace, pool: ReadyQueues) -> int | None:
        """Return the limit on prompt tokens; with a lane for prompts, no round waits for them."""
        live = self.residents.live
        is_watched = any(live[work.seq_id].is_watched for work in pool.draft)
        return (pace.limit_with_rounds if is_watched and self._has_one_lane else pace.limit)(pool)

    @property
    def _has_one_lane(self) -> bool:
        return len(self.schedule.lanes) == 1

    def _undo_lost(self) -> None:
        """Undo jobs that an interrupt stopped between the ledger and the executor."""
        if not self._running:
            return
        known = {*self.executor.busy, *(done.lane for done in self._ended)}
        for lane in [lane for lane in self._running if lane not in known]:
            self.residents.failures.undo(self._running.pop(lane))

    def _task(self, job: Job, queues: tuple[int, int, int], num_free: int) -> LaneTask:
        live, drafting = self.residents.live, self.residents.drafting
        batch = [live[work.seq_id] for work in job.of(Stage.VERIFY) or job.of(Stage.DRAFT)]
        if job.kind is JobKind.VERIFY:
            drafting.begin(batch)
        return LaneTask(
            job=job,
            batch=batch,
            rounds=tuple([seq.num_rounds for seq in batch]),
            chunks=[Chunk(live[w.seq_id], w.num_tokens) for w in job.of(Stage.PREFILL)],
            ahead=drafting.rounds([work.seq_id for work in job.of(Stage.AHEAD)]),
            num_waiting=len(self.residents.waiting),
            num_live=len(live),
            queues=queues,
            num_free=num_free,
            draft_seconds=drafting.take_seconds(batch) if job.kind in _VERIFYING else 0.0,
            more_seconds=self._more_seconds if self._may_have_more_rounds(job) else 0.0,
        )

    def _may_have_more_rounds(self, job: Job) -> bool:
        """Return whether nothing waits for the end of the job's first round: no prompt, no other
        lane, no pages of the arena."""
        return (
            self._has_one_lane
            and not self.residents.may_run_out
            and job.kind is JobKind.ROUND
            and all(work.stage is not Stage.PREFILL and work.num_tokens <= 1 for work in job.works)
        )

    def _wait(self) -> None:
        """Wait until some job has ended, if any runs."""
        busy, drafting = self.executor.busy, self.residents.drafting
        if busy and not self._ended:
            drafts = {
                lane: began + drafting.allowance(self._running[lane].num_new_to_drafter)
                for lane, began in busy.items()
                if self._running[lane].only_drafts
            }
            self._ended += self.executor.wait(drafting.patience(drafts))
            for lane in drafting.overdue(drafts) if not self._ended else ():
                self._ended.append(self._abandon(lane))
        while self._ended:
            self._finish(self._ended.popleft())

    def _abandon(self, lane: str) -> LaneResult:
        """Abandon the drafting that `lane` hangs in; no request gets drafts any more."""
        drafting, began = self.residents.drafting, self.executor.busy[lane]
        self.executor.abandon(lane)
        drafting.give_up()
        for seq in self.residents.live.values():
            seq.no_drafts = drafting.hung
        return LaneResult(lane, self._running[lane], LaneWork(), None, began, drafting.clock())

    def _finish(self, done: LaneResult) -> None:
        num_failed, failures = 0, self.residents.failures
        self._running.pop(done.lane, None)
        if done.error is None:
            if done.task.job.kind is JobKind.VERIFY:
                self.residents.drafting.verified(done.ended - done.began)
            self._settle(done)
            self._undelivered += done.task.outcomes
        else:
            num_failed = failures.end(done, done.error)
            self._undelivered += failures.saved
            failures.saved.clear()
        failures.num_emitted += sum([len(o.tokens) for o in done.task.outcomes])
        if done.task.job.kind is JobKind.AHEAD:
            self.residents.drafting.released(done.task.job.seq_ids)
        # A failure of a receiver of records must not cost any request a token.
        if self.deliver is not None:
            self.deliver()
        self._report(done, num_failed)
        if done.error is not None and is_interrupt(done.error):
            raise done.error

    def _report(self, done: LaneResult, num_failed: int) -> None:
        if self.pace is not None:
            self.pace.observe(done.task.job, (done.ended - done.began) / (len(done.task.ends) + 1))
        if self._observers is None:
            self._observers = job_observers(self.order, self.schedule)
        if self.jobs is None and not self._observers:
            return
        traces = done.traces(num_failed)
        if self.jobs is not None:
            try:
                with foreign(), breakable():
                    for trace in traces:
                        self.jobs(trace)
            except Exception:  # noqa: BLE001 - an observer may be any code
                self.jobs = None
                _log.warning("An observer of jobs failed and gets no more of them.", exc_info=True)
        for observer in self._observers:
            for trace in traces:
                observer.observe(trace)

    def _settle(self, done: LaneResult) -> None:
        residents, job, batch = self.residents, done.task.job, done.task.batch
        if job.kind is JobKind.DRAFT:
            residents.drafting.drafted(batch, done.work.proposals)
        for seq_id, reason in done.work.faults.items():
            if seq_id in residents.live:
                residents.live[seq_id].no_drafts = reason
        residents.ledger.finish(job, lambda seq_id: residents.live[seq_id].finish is not None)
        for seq in batch:
            if seq.mask_seconds > SLOW_MASK:
                residents.rest(seq)
            if seq.finish is not None:
                residents.counts.completed += 1
                residents.close(seq.seq_id)
