"""Lanes on a virtual clock: any schedule over the shipped ledger, with invented costs.

Time is a heap of ends. Jobs may fail, requests come and are dropped at given times, and each start
is checked: a sequence is in one job at a time (drafting ahead of its verdict excepted), is fed what
it waits for, and no lane stays idle beside work that it could do, unless it waits for another.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from outrider.core.draft import JobTrace
from outrider.plugins.lanes.schedules import DraftAheadLanes, PrefillDecode, PrefillDraftVerify
from outrider.sched.jobs import (
    Job,
    JobObserver,
    LaneSizes,
    Ledger,
    ReadyQueues,
    Schedule,
    SingleLane,
    Stage,
)

MANY = 20_000


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of `num_unread` tokens that ends with its `num_rounds`th round."""

    num_unread: int
    num_rounds: int
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Ran:
    """A job of the past, and the pool it was chosen from."""

    lane: str
    job: Job
    began: float
    ended: float
    pool: ReadyQueues
    failed: bool


def all_well(job: Job) -> Sequence[int] | None:
    del job
    return None


@dataclass(slots=True)
class Lanes:
    """`cost` is a job's time. `fault` says which of a job's sequences are given up if it fails, and
    None if it does not. `drops` are the times at which requests are cancelled.

    Afterwards `read` has the tokens fed of each sequence, `ended` when it finished, and `dropped`
    those that did not.
    """

    schedule: Schedule
    arrivals: Sequence[Arrival]
    cost: Callable[[str, Job], float]
    drafts_ahead: bool = False
    fault: Callable[[Job], Sequence[int] | None] = all_well
    drops: Mapping[int, float] = field(default_factory=dict[int, float])
    ran: list[Ran] = field(default_factory=list[Ran])
    read: dict[int, int] = field(default_factory=dict[int, int])
    ended: dict[int, float] = field(default_factory=dict[int, float])
    dropped: set[int] = field(default_factory=set[int])
    _ledger: Ledger = field(default_factory=Ledger)
    _now: float = 0.0
    _order: count[int] = field(default_factory=count)
    _heap: list[tuple[float, int, Callable[[], None]]] = field(
        default_factory=list[tuple[float, int, Callable[[], None]]]
    )
    _busy: dict[str, Job] = field(default_factory=dict[str, Job])
    _rounds_left: dict[int, int] = field(default_factory=dict[int, int])
    _unwanted: set[int] = field(default_factory=set[int])

    def run(self) -> list[Ran]:
        """Run until nothing is left to do; all jobs in the order of their ends."""
        self._ledger = Ledger(drafts_ahead=self.drafts_ahead)
        for seq_id, arrival in enumerate(self.arrivals):
            self._at(arrival.at, lambda i=seq_id, a=arrival: self._arrive(i, a))
        for seq_id, when in self.drops.items():
            self._at(when, lambda i=seq_id: self._drop(i))
        while self._heap:
            self._now = self._heap[0][0]
            while self._heap and self._heap[0][0] == self._now:
                heapq.heappop(self._heap)[2]()
            self._dispatch()
            assert len(self.ran) < MANY, "the lanes do not come to an end"
        assert self._ledger.num_live == 0, "sequences wait, and no lane does anything"
        return self.ran

    def _at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (when, next(self._order), what))

    def _arrive(self, seq_id: int, arrival: Arrival) -> None:
        self.read[seq_id] = 0
        self._rounds_left[seq_id] = arrival.num_rounds
        self._ledger.add(seq_id, arrival.num_unread)

    def _drop(self, seq_id: int) -> None:
        """Cancel a request now, or when the jobs that it is in have ended."""
        if self._rounds_left.get(seq_id, 0) == 0:
            return
        if self._ledger.is_running(seq_id):
            self._unwanted.add(seq_id)
            return
        self._unwanted.discard(seq_id)
        self._rounds_left[seq_id] = 0
        self.dropped.add(seq_id)
        self._ledger.drop(seq_id)

    def _dispatch(self) -> None:
        """Ask idle lanes until none wants anything: a job may make work for a lane asked before."""
        started = patient = True
        while started or (patient and not self._busy):
            patient = patient and (started or bool(self._busy))
            started = False
            for lane in self.schedule.lanes:
                if lane not in self._busy:
                    started = self._ask(lane, patient=patient) or started
        self._check_idle()

    def _ask(self, lane: str, *, patient: bool) -> bool:
        pool = self._ledger.pool(num_free_tokens=99, patient=patient)
        job = self.schedule.next_job(lane, pool, self._ledger.num_live)
        if job is None:
            return False
        self._check(job, pool)
        self._ledger.start(job)
        self._busy[lane] = job
        began = self._now
        self._at(self._now + self.cost(lane, job), lambda: self._end(lane, job, began, pool))
        return True

    def _end(self, lane: str, job: Job, began: float, pool: ReadyQueues) -> None:
        del self._busy[lane]
        given_up = self.fault(job)
        self.ran.append(Ran(lane, job, began, self._now, pool, given_up is not None))
        if isinstance(self.schedule, JobObserver):
            self.schedule.observe(self._trace(lane, job, began, len(given_up or ())))
        if given_up is None:
            self._advance(job)
        else:
            self._ledger.undo(job)
        for seq_id in {*(given_up or ()), *(self._unwanted & set(job.seq_ids))}:
            self._drop(seq_id)

    def _trace(self, lane: str, job: Job, began: float, num_failed: int) -> JobTrace:
        return JobTrace(
            lane=lane,
            kinds=tuple(stage.name.lower() for stage in job.stages),
            seq_ids=job.seq_ids,
            num_tokens=0,
            began=began,
            ended=self._now,
            queues=(0, 0, 0),
            num_waiting=0,
            num_live=self._ledger.num_live,
            num_free_tokens=99,
            num_failed=num_failed,
        )

    def _advance(self, job: Job) -> None:
        for work in (*job.of(Stage.PREFILL), *job.of(Stage.VERIFY)):
            self.read[work.seq_id] += work.num_tokens
        for work in job.of(Stage.VERIFY):
            self._rounds_left[work.seq_id] -= 1
            if self._rounds_left[work.seq_id] == 0:
                self.ended[work.seq_id] = self._now
        self._ledger.finish(job, lambda seq_id: self._rounds_left[seq_id] == 0)

    def _check(self, job: Job, pool: ReadyQueues) -> None:
        """The job may start: its works wait for it, whole, and nobody else works on them."""
        assert job.works
        pairs = [(work.seq_id, work.stage) for work in job.works]
        assert len(set(pairs)) == len(pairs)
        with_drafter = {Stage.DRAFT, Stage.AHEAD}
        if with_drafter & {*job.stages}:
            assert not any(with_drafter & {*other.stages} for other in self._busy.values())
        for other in self._busy.values():
            for seq_id in set(job.seq_ids) & set(other.seq_ids):
                assert {*job.alone(seq_id).stages, *other.alone(seq_id).stages} == {
                    Stage.AHEAD,
                    Stage.VERIFY,
                }
        unread = {w.seq_id: w.num_tokens for w in (*pool.prefill, *pool.draft, *pool.verify)}
        for work in job.works:
            if work.stage is Stage.PREFILL:
                assert 1 <= work.num_tokens < unread[work.seq_id]
            elif work.stage is Stage.AHEAD:
                assert work in pool.ahead
            else:
                assert work.num_tokens == unread[work.seq_id]

    def _check_idle(self) -> None:
        """What waits, waits for a lane that is busy, its own or the other of a round."""
        pool = self._ledger.pool(num_free_tokens=99)
        lanes = self.schedule.lanes
        for waiting, lane in (
            (pool.prefill, "prefill"),
            (pool.draft or pool.ahead, "decode"),
            (pool.verify, "verify"),
        ):
            own = {lane if lane in lanes else lanes[0]}
            if lane != "prefill":
                own |= {"decode", "verify"}
            assert not waiting or own & self._busy.keys()


SCHEDULES: dict[str, Callable[[LaneSizes], Schedule]] = {
    "single": lambda s: SingleLane(s.chunk, batch=s.decode, prefill_batch=s.prefill),
    "pd": lambda s: PrefillDecode(s.chunk, batch=s.decode, prefill_batch=s.prefill),
    "pdv": PrefillDraftVerify,
    "pdv, always separate": lambda s: PrefillDraftVerify(s, threshold=0),
    "ssd": DraftAheadLanes,
}
