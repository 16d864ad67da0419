"""One engine of the simulator: schedules, ledger, lane orders and admission of `sched/`, simulated
seconds and verdicts.

A round drafts at most K tokens and one less than may still be written, emits the accepted ones and
one more, and its sequence ends at its last token. There are no stop tokens, no text and no limit on
memory: a common beginning of prompts is read once.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Generic, TypeVar

from outrider.core.config import EngineConfig
from outrider.core.draft import JobTrace, RoundTrace
from outrider.core.errors import ContractError
from outrider.plugins.lanes.lane_order import order_named
from outrider.plugins.lanes.schedules import schedule_for
from outrider.sched.admission import KnownBlocks
from outrider.sched.jobs import (
    Job,
    JobKind,
    Ledger,
    Limits,
    ReadyQueues,
    Stage,
    StageItem,
    job_observers,
    num_admissible,
)
from outrider_lab.simulator.events import (
    Chance,
    Drafted,
    Fed,
    JobCosts,
    Running,
    SimulatedJob,
    round_trace,
)

T = TypeVar("T")
# The separator between the label of an engine and the name of its lane in records.
LABEL_END = ": "
# Ends that differ by rounding alone count as one moment.
_SAME = 1e-12


@dataclass(slots=True)
class _Running(Generic[T]):
    """A running job. `ends` is valid as long as the job goes on with the same `slowdown`."""

    task: T
    seconds: float
    ends: float
    slowdown: float = 1.0


@dataclass(slots=True)
class SharedLanes(Generic[T]):
    """Lanes with their running jobs and the times of their ends. Given moments never go back.

    A job that runs alone takes its own seconds. With m jobs at once each goes on at the speed

        1 / (1 + c (m - 1))

    with the contention c: 0 if every lane has a device of its own, 1 if all lanes read one memory
    and each gets an equal share of its bandwidth. With c = 1 no arrangement of the same jobs is
    faster than one after another: T_round >= sum of bytes / BW. Jobs without time slow down none.
    """

    contention: float
    _running: dict[str, _Running[T]] = field(default_factory=dict[str, _Running[T]])

    def __post_init__(self) -> None:
        if not 0 <= self.contention <= 1:
            raise ContractError("contention lies between 0 and 1")

    @property
    def busy(self) -> Mapping[str, object]:
        """The running jobs by lane."""
        return self._running

    @property
    def next_end(self) -> float:
        """The moment at which the first of the jobs that now run ends, if nothing else starts."""
        return min((one.ends for one in self._running.values()), default=math.inf)

    def start(self, lane: str, task: T, seconds: float, *, now: float) -> None:
        """Start a job that takes `seconds` when it runs alone."""
        if lane in self._running:
            raise ContractError("the lane runs a job")
        self._running[lane] = _Running(task, seconds, now + seconds)
        self._share(now)

    def ended(self, now: float) -> list[T]:
        """Return the tasks that have ended by `now`, in the order in which they started."""
        until = now + _SAME * abs(now)
        lanes = [lane for lane, one in self._running.items() if one.ends <= until]
        done = [self._running.pop(lane).task for lane in lanes]
        if done:
            self._share(now)
        return done

    def stopped(self) -> list[T]:
        """Stop everything; return the tasks that still ran, in the order in which they started."""
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


@dataclass(slots=True)
class Records:
    """Records of all engines, in the order in which jobs and rounds ended."""

    jobs: list[JobTrace] = field(default_factory=list[JobTrace])
    rounds: list[RoundTrace] = field(default_factory=list[RoundTrace])
    passes: Iterator[int] = field(default_factory=count)


class SimulatedEngine:
    """A simulated engine; `label` precedes its lanes' names in records. Moments never go back."""

    def __init__(
        self,
        config: EngineConfig,
        costs: JobCosts,
        chance: Chance,
        *,
        contention: float,
        records: Records,
        label: str,
    ) -> None:
        self._config, self._costs, self._chance = config, costs, chance
        self._contention, self._records, self._label = contention, records, label
        self.known = KnownBlocks()
        self._begin()

    def _begin(self) -> None:
        """Reset the engine: it has nothing to do, and has read nothing."""
        config = self._config
        self._lanes = SharedLanes[SimulatedJob](self._contention)
        self._schedule = schedule_for(config)
        self._order = order_named(
            config.lane_order, margin=config.verify_margin, target_ms=config.target_ms
        )
        self._observers = job_observers(self._order, self._schedule)
        self._ahead = config.schedule == "ssd"
        self._ledger = Ledger(drafts_ahead=self._ahead)
        self._limits = Limits(config.most_batch, sys.maxsize)
        self._waiting: deque[Running] = deque()
        self._live: dict[int, Running] = {}
        # Tokens that were read of the common beginning of a family of prompts.
        self._shared: dict[int, int] = {}
        self.known.forget()

    # Requests

    @property
    def num_in_flight(self) -> int:
        return len(self._live) + len(self._waiting)

    @property
    def next_end(self) -> float:
        return self._lanes.next_end

    def add(self, seq: Running) -> None:
        self._waiting.append(seq)

    def lose(self, now: float) -> list[Running]:
        """Return all requests that it had, and forget everything."""
        self.stop(now)
        had = [*self._live.values(), *self._waiting]
        for seq in had:
            seq.num_moves += 1
            seq.is_ready = False
        self._begin()
        return had

    def stop(self, now: float) -> None:
        """Stop the running jobs, whose results are not needed any more."""
        self._records.jobs += [task.trace(now) for task in self._lanes.stopped()]

    def _admit(self) -> None:
        if not self._waiting:
            return
        waiting, running = (
            [self._limits.expected(seq.length, seq.num_left) for seq in group]
            for group in (self._waiting, self._live.values())
        )
        for _ in range(num_admissible(waiting, running, self._limits)):
            seq = self._waiting.popleft()
            request = seq.request
            known = min(self._shared.get(request.family, 0), request.num_shared, seq.length - 1)
            seq.num_cached += known
            self._live[seq.seq_id] = seq
            self._ledger.add(seq.seq_id, seq.length - known)

    # Jobs

    def work(self, now: float) -> None:
        """Admit requests and start jobs."""
        self._admit()
        self._start_jobs(now)

    def finish(self, now: float) -> list[Running]:
        """End the jobs that are done by `now`; return the requests whose last token has come."""
        return [seq for task in self._lanes.ended(now) for seq in self._finish(task, now)]

    def _start_jobs(self, now: float) -> None:
        """Poll idle lanes until none starts: a verification that starts may make work ahead of it.
        Lanes may wait for each other only while something runs."""
        lanes, busy = self._schedule.lanes, self._lanes.busy
        started = patient = True
        while (started or (patient and not busy)) and len(busy) < len(lanes):
            patient = patient and (started or bool(busy))
            started = False
            pool = self._ledger.pool(sys.maxsize, patient=patient)
            for lane in self._order.arrange(lanes, pool):
                if lane not in busy and self._start(lane, pool, now):
                    started = True
                    pool = self._ledger.pool(sys.maxsize, patient=patient)

    def _start(self, lane: str, pool: ReadyQueues, now: float) -> bool:
        job = self._schedule.next_job(lane, pool, self._ledger.num_live)
        if not job:
            return False
        drafting = self._draft(job) + self._ahead_seconds(job.of(Stage.AHEAD))
        reading = self._costs.pass_seconds(list(self._fed(job)))
        if job.kind is JobKind.DRAFT:
            drafting += self._costs.sync
        task = SimulatedJob(
            self._label + lane,
            job,
            now,
            drafting,
            reading,
            queues=(len(pool.prefill), len(pool.draft), len(pool.verify)),
            num_waiting=len(self._waiting),
            num_live=len(self._live),
        )
        self._ledger.start(job)
        self._lanes.start(lane, task, task.seconds, now=now)
        return True

    def _draft(self, job: Job) -> float:
        """Set the draft of each sequence; return the seconds that making the drafts takes."""
        batch = [self._live[work.seq_id] for work in job.of(Stage.DRAFT)]
        missed: list[Drafted] = []
        for seq in batch:
            seq.depth = min(self._config.most_k, seq.num_left - 1)
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

    def _finish(self, task: SimulatedJob, now: float) -> Iterator[Running]:
        trace = task.trace(now)
        self._records.jobs.append(trace)
        for observer in self._observers:
            observer.observe(replace(trace, lane=trace.lane.removeprefix(self._label)))
        self._note_passes(task, now)
        for work in task.job.of(Stage.AHEAD):
            if work.seq_id in self._live:
                self._live[work.seq_id].is_ready = True
        self._ledger.finish(task.job, lambda seq_id: self._live[seq_id].num_left == 0)
        for work in task.job.of(Stage.PREFILL):
            seq = self._live[work.seq_id]
            self._note_read(seq, self._num_committed(seq))
        for work in task.job.of(Stage.VERIFY):
            seq = self._live[work.seq_id]
            self._note_read(seq, seq.length - 1)
            if seq.num_left == 0:
                yield self._live.pop(seq.seq_id)

    def _note_read(self, seq: Running, num_read: int) -> None:
        known = min(num_read, seq.request.num_shared)
        if known > self._shared.get(seq.request.family, 0):
            self._shared[seq.request.family] = known

    def _note_passes(self, task: SimulatedJob, now: float) -> None:
        """Record what the pass of a job did for each of its sequences, if it had one."""
        reads, judged = task.job.of(Stage.PREFILL), task.job.of(Stage.VERIFY)
        if not reads and not judged:
            return
        slowdown = (now - task.began) / task.seconds if task.seconds > 0 else 1.0
        index = next(self._records.passes)
        trace = partial(round_trace, task, index=index, slowdown=slowdown)
        self._records.rounds += [trace(work, None, kept=0) for work in reads]
        for work in judged:
            seq = self._live[work.seq_id]
            kept = self._chance.num_kept(seq.seq_id, seq.length, seq.depth)
            self._records.rounds.append(trace(work, seq, kept=kept))
            seq.moments += [now - seq.arrived] * (kept + 1)
