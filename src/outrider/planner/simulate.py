"""Discrete-event simulator of schedules: the policy code of the engine on an invented clock.

Ledger, schedules, lane orders and admission are those of `sched/`. Invented are the seconds of jobs
and chance (simulate_events.py), and how jobs hold each other up (`SharedLanes`). A
round drafts at most K tokens and one less than may still be written, emits the accepted ones and
one more, and its sequence ends at its last token. There are no stop tokens, no text and no memory
that ends. Records are those of a real run (JobTrace, RoundTrace).
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Generic, TypeVar

from outrider.core.budget import JobTrace, RoundTrace
from outrider.core.config import EngineConfig
from outrider.core.errors import ContractError
from outrider.planner.simulate_events import (
    Chance,
    Drafted,
    Fed,
    JobCosts,
    Running,
    Simulated,
    SimulatedJob,
    SimulatedLoad,
    SimulatedResult,
    round_trace,
)
from outrider.sched.jobs import (
    Job,
    JobKind,
    Limits,
    ReadyQueues,
    Stage,
    StageItem,
    job_observers,
    num_admissible,
)
from outrider.sched.lane_order import order_named
from outrider.sched.ledger import Ledger
from outrider.sched.schedules import schedule_for

T = TypeVar("T")
# Ends that differ by rounding alone are one moment.
_SAME = 1e-12


@dataclass(slots=True)
class _Running(Generic[T]):
    """`ends` is right as long as it goes on with the same `slowdown`."""

    task: T
    seconds: float
    ends: float
    slowdown: float = 1.0


@dataclass(slots=True)
class SharedLanes(Generic[T]):
    """Who runs what, and until when. Moments that it is told never go back.

    A job that runs alone takes its own seconds. With m jobs at once each goes on at the speed

        1 / (1 + c (m - 1))

    with the contention c: 0 where every lane has a device of its own, 1 where all lanes read one
    memory and each gets an equal share of its bandwidth. With c = 1 no arrangement of the same jobs
    is faster than one after another: T_round >= sum of bytes / BW. Jobs that take no time hold
    nobody up.
    """

    contention: float
    _running: dict[str, _Running[T]] = field(default_factory=dict[str, _Running[T]])

    def __post_init__(self) -> None:
        if not 0 <= self.contention <= 1:
            raise ContractError("contention lies between 0 and 1")

    @property
    def busy(self) -> Mapping[str, object]:
        """By lane."""
        return self._running

    @property
    def next_end(self) -> float:
        """The moment at which the first of the jobs that now run ends, if nothing else starts."""
        return min((one.ends for one in self._running.values()), default=math.inf)

    def start(self, lane: str, task: T, seconds: float, *, now: float) -> None:
        """`seconds` is what the job takes alone."""
        if lane in self._running:
            raise ContractError("the lane runs a job")
        self._running[lane] = _Running(task, seconds, now + seconds)
        self._share(now)

    def ended(self, now: float) -> list[T]:
        """The tasks that have ended by `now`, in the order in which they started."""
        until = now + _SAME * abs(now)
        lanes = [lane for lane, one in self._running.items() if one.ends <= until]
        done = [self._running.pop(lane).task for lane in lanes]
        if done:
            self._share(now)
        return done

    def stopped(self) -> list[T]:
        """What still ran, in the order in which it started; nothing runs any more."""
        left = [one.task for one in self._running.values()]
        self._running.clear()
        return left

    def _share(self, now: float) -> None:
        num_working = sum(one.seconds > 0 for one in self._running.values())
        slowdown = 1 + self.contention * max(num_working - 1, 0)
        for one in self._running.values():
            if one.slowdown != slowdown:
                one.ends = now + (one.ends - now) / one.slowdown * slowdown
                one.slowdown = slowdown


def simulate(
    config: EngineConfig,
    load: SimulatedLoad,
    costs: JobCosts,
    chance: Chance,
    *,
    contention: float = 0.0,
) -> Simulated:
    """Run `load` to its end. Of `config` it reads schedule, which must be resolved, k, batch sizes,
    chunk, threshold and lane order. The same arguments give the same result."""
    return _Simulation(config, load, costs, chance, SharedLanes(contention)).run()


class _Simulation:
    def __init__(
        self,
        config: EngineConfig,
        load: SimulatedLoad,
        costs: JobCosts,
        chance: Chance,
        lanes: SharedLanes[SimulatedJob],
    ) -> None:
        self._config, self._load, self._costs, self._chance = config, load, costs, chance
        self._lanes = lanes
        self._schedule = schedule_for(config)
        self._order = order_named(
            config.lane_order, margin=config.verify_margin, target_ms=config.target_ms
        )
        self._observers = job_observers(self._order, self._schedule)
        self._ahead = config.schedule == "ssd"
        self._ledger = Ledger(drafts_ahead=self._ahead)
        self._limits = Limits(config.batch_size, sys.maxsize)
        self._now = 0.0
        self._coming = deque(enumerate(load.requests))
        self._waiting: deque[Running] = deque()
        self._live: dict[int, Running] = {}
        self._passes = count()
        self._jobs: list[JobTrace] = []
        self._rounds: list[RoundTrace] = []
        self._served: list[SimulatedResult] = []

    def run(self) -> Simulated:
        self._arrive()
        while self._coming or self._waiting or self._live:
            self._admit()
            self._start_jobs()
            self._now = min(self._lanes.next_end, self._next_arrival)
            if not self._now < math.inf:
                raise ContractError("sequences wait, and no lane does anything")
            for task in self._lanes.ended(self._now):
                self._finish(task)
            self._arrive()
        # Nobody waits for what is still drafted ahead.
        self._jobs += [task.trace(self._now) for task in self._lanes.stopped()]
        return Simulated(self._now, tuple(self._jobs), tuple(self._rounds), tuple(self._served))

    # Requests

    @property
    def _next_arrival(self) -> float:
        by_clock = self._coming and self._load.in_flight is None
        return self._coming[0][1].arrives if by_clock else math.inf

    def _arrive(self) -> None:
        """Who comes now: by the clock, or because somebody was answered."""
        users = self._load.in_flight
        while self._coming and (
            self._next_arrival <= self._now
            if users is None
            else len(self._live) + len(self._waiting) < users
        ):
            seq_id, one = self._coming.popleft()
            came = self._now if users is not None else one.arrives
            self._waiting.append(Running(seq_id, came, one.num_prompt, one.num_output))

    def _admit(self) -> None:
        if not self._waiting:
            return
        waiting, running = (
            [self._limits.expected(seq.length, seq.room) for seq in group]
            for group in (self._waiting, self._live.values())
        )
        for _ in range(num_admissible(waiting, running, self._limits)):
            seq = self._waiting.popleft()
            self._live[seq.seq_id] = seq
            self._ledger.add(seq.seq_id, seq.length)

    # Jobs

    def _start_jobs(self) -> None:
        """Poll idle lanes until none starts: a verify that starts may make work ahead of it. Lanes
        may wait for each other only while something runs."""
        lanes, busy = self._schedule.lanes, self._lanes.busy
        started = patient = True
        while (started or (patient and not busy)) and len(busy) < len(lanes):
            patient = patient and (started or bool(busy))
            started = False
            pool = self._ledger.pool(sys.maxsize, patient=patient)
            for lane in self._order.arrange(lanes, pool):
                if lane not in busy and self._start(lane, pool):
                    started = True
                    pool = self._ledger.pool(sys.maxsize, patient=patient)

    def _start(self, lane: str, pool: ReadyQueues) -> bool:
        job = self._schedule.next_job(lane, pool, self._ledger.num_live)
        if not job:
            return False
        drafting = self._draft(job) + self._ahead_seconds(job.of(Stage.AHEAD))
        reading = self._costs.pass_seconds(list(self._fed(job)))
        if job.kind is JobKind.DRAFT:
            drafting += self._costs.sync
        task = SimulatedJob(
            lane,
            job,
            self._now,
            drafting,
            reading,
            queues=(len(pool.prefill), len(pool.draft), len(pool.verify)),
            num_waiting=len(self._waiting),
            num_live=len(self._live),
        )
        self._ledger.start(job)
        self._lanes.start(lane, task, task.seconds, now=self._now)
        return True

    def _draft(self, job: Job) -> float:
        """Decide what each sequence's draft is, and the seconds that making it takes."""
        batch = [self._live[work.seq_id] for work in job.of(Stage.DRAFT)]
        missed: list[Drafted] = []
        for seq in batch:
            seq.depth = min(self._config.k, seq.room - 1)
            seq.hit = self._is_hit(seq) if self._ahead and seq.depth else None
            seq.is_ready = False
            if not seq.hit:
                missed.append(Drafted(seq.depth, seq.length - 1))
        seconds = self._costs.draft_seconds(missed)
        for seq in batch:
            seq.draft_seconds = seconds
        return seconds

    def _is_hit(self, seq: Running) -> bool:
        return seq.is_ready and self._chance.is_hit(seq.seq_id, seq.length)

    def _ahead_seconds(self, works: Sequence[StageItem]) -> float:
        batch = [self._live[work.seq_id] for work in works]
        return self._costs.ahead_seconds([Drafted(seq.depth, seq.length - 1) for seq in batch])

    def _fed(self, job: Job) -> Iterator[Fed]:
        for work in job.of(Stage.PREFILL):
            yield Fed(work.num_tokens, self._num_committed(self._live[work.seq_id]))
        for work in job.of(Stage.VERIFY):
            seq = self._live[work.seq_id]
            rows = work.num_tokens + seq.depth
            kept = self._chance.num_kept(seq.seq_id, seq.length, seq.depth)
            yield Fed(rows, self._num_committed(seq), judged=1 + seq.depth, emitted=1 + kept)

    def _num_committed(self, seq: Running) -> int:
        return seq.length - self._ledger.num_unread(seq.seq_id)

    def _finish(self, task: SimulatedJob) -> None:
        trace = task.trace(self._now)
        self._jobs.append(trace)
        for observer in self._observers:
            observer.observe(trace)
        self._note_passes(task)
        for work in task.job.of(Stage.AHEAD):
            if work.seq_id in self._live:
                self._live[work.seq_id].is_ready = True
        self._ledger.finish(task.job, lambda seq_id: self._live[seq_id].room == 0)
        for work in task.job.of(Stage.VERIFY):
            seq = self._live[work.seq_id]
            if seq.room == 0:
                del self._live[seq.seq_id]
                self._served.append(seq.served())

    def _note_passes(self, task: SimulatedJob) -> None:
        """Tell what the pass of a job did for each of its sequences, if it had one."""
        reads, judged = task.job.of(Stage.PREFILL), task.job.of(Stage.VERIFY)
        if not reads and not judged:
            return
        slowdown = (self._now - task.began) / task.seconds if task.seconds > 0 else 1.0
        trace = partial(round_trace, task, index=next(self._passes), slowdown=slowdown)
        self._rounds += [trace(work, None, kept=0) for work in reads]
        for work in judged:
            seq = self._live[work.seq_id]
            kept = self._chance.num_kept(seq.seq_id, seq.length, seq.depth)
            self._rounds.append(trace(work, seq, kept=kept))
            seq.moments += [self._now - seq.arrived] * (kept + 1)
