"""Lanes: the tasks of jobs, what a lane does with a task, and the inline executor (the reference).

`InlineLanes` runs each task when it is started, on the caller's thread; plugins/lanes/threads.py
has a thread a lane. `LaneRunner` does the same work on either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, cast

from outrider.core.clock import HOST_CLOCK, Clock
from outrider.core.draft import JobTrace, Outcome
from outrider.core.errors import ordinary, require_spare
from outrider.core.process import breakable, is_interrupt
from outrider.core.protocols import AheadRow, DraftAhead
from outrider.engine.drafting import Proposals, guarded_ahead
from outrider.engine.round import Batch, Chunks, Round
from outrider.engine.stages import Stages
from outrider.sched.jobs import Job, JobKind, LaneOrder, Schedule, Stage

_NOTHING = Proposals({}, {})
_KINDS = {stage: stage.name.lower() for stage in Stage}


@dataclass(frozen=True, slots=True)
class LaneTask:
    """A job and its sequences: `batch` is drafted for, verified or both, `chunks` are read, and
    `ahead` are rounds to draft ahead of. At its beginning, `rounds` is how many rounds each of
    `batch` had run, `queues` how many sequences waited for (prefill, draft, verify), and `num_free`
    the arena's free tokens. Drafts of other jobs took `draft_seconds`. Rounds follow the first for
    `more_seconds`, until a text ends; `outcomes` are those of finished rounds, `ends` the times at
    which all but the last ended, in seconds of the host's clock."""

    job: Job
    batch: Batch
    rounds: Sequence[int]
    chunks: Chunks
    ahead: Sequence[AheadRow]
    num_waiting: int
    num_live: int
    queues: tuple[int, int, int]
    num_free: int
    draft_seconds: float = 0.0
    more_seconds: float = 0.0
    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    ends: list[float] = field(default_factory=list[float])

    @property
    def num_new_to_drafter(self) -> int:
        """Tokens of texts that are new to the drafter, which reads them first."""
        return sum(len(seq.tokens) for seq in self.batch if seq.last is None)

    @property
    def only_drafts(self) -> bool:
        """True if the job uses the drafter alone."""
        return self.job.kind in (JobKind.DRAFT, JobKind.AHEAD)


@dataclass(frozen=True, slots=True)
class LaneWork:
    """Results of a task besides its outcomes, which are already in the text of their sequences:
    `proposals` and `faults` (why sequences get no more drafts) still have to be applied."""

    proposals: Proposals = _NOTHING
    faults: Mapping[int, str] = field(default_factory=dict[int, str])


@dataclass(frozen=True, slots=True)
class LaneResult:
    """The end of a task, with success or with an error. Times are seconds of the host's clock."""

    lane: str
    task: LaneTask
    work: LaneWork
    error: BaseException | None
    began: float
    ended: float

    def traces(self, num_failed: int) -> list[JobTrace]:
        """Return a record of each round of the task, or of the job if it had none. Failures belong
        to the last one; queues and free tokens are those at the job's beginning."""
        task, job = self.task, self.task.job
        whole = JobTrace(
            lane=self.lane,
            kinds=tuple([_KINDS[stage] for stage in job.stages]),
            seq_ids=job.seq_ids,
            num_tokens=sum([w.num_tokens for w in job.works if w.stage is not Stage.DRAFT]),
            began=self.began,
            ended=self.ended,
            queues=task.queues,
            num_waiting=task.num_waiting,
            num_live=task.num_live,
            num_free_tokens=task.num_free,
            num_failed=num_failed,
        )
        if not task.ends:
            return [whole]
        begins, ends = (self.began, *task.ends), (*task.ends, self.ended)
        last = len(task.ends)
        return [
            replace(whole, began=began, ended=ended, num_failed=num_failed if at == last else 0)
            for at, (began, ended) in enumerate(zip(begins, ends, strict=True))
        ]


Call = Callable[[LaneTask], LaneWork]


class Executor(Protocol):
    """An executor of tasks on lanes, one at a time on each."""

    @property
    def busy(self) -> Mapping[str, float]:
        """Lanes with a task whose result `wait` has not returned yet, and when they got it."""
        ...

    def is_here(self) -> bool:
        """Return whether the calling thread only runs lanes."""
        ...

    def start(self, lane: str, task: LaneTask) -> None: ...
    def wait(self, seconds: float | None = None) -> list[LaneResult]:
        """Return the results of tasks that ended, at least one; none only after `seconds`."""
        ...

    def abandon(self, lane: str) -> None:
        """Give up the task of a lane that hangs. Its result is dropped."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LaneRunner:
    """The work of a lane. `round` and `stages` use the lane's own buffers of the target."""

    round: Round
    stages: Stages

    def __call__(self, task: LaneTask) -> LaneWork:
        require_spare()
        kind = task.job.kind
        if kind is JobKind.AHEAD:
            drafter = cast("DraftAhead", self.stages.drafter)
            return LaneWork(faults=guarded_ahead(drafter, task.ahead))
        if kind is JobKind.DRAFT:
            self.stages.assign_budgets(task.batch)
            return LaneWork(proposals=self.stages.propose(task.batch))
        if kind is JobKind.ROUND:
            self._rounds(task)
        else:
            done = self.round.verify(
                task.batch,
                task.chunks,
                num_waiting=task.num_waiting,
                draft_seconds=task.draft_seconds,
            )
            task.outcomes.extend(done)
        return LaneWork()

    def _rounds(self, task: LaneTask) -> None:
        last = HOST_CLOCK() + task.more_seconds
        while True:
            done = self.round.run(task.batch, task.chunks, num_waiting=task.num_waiting)
            task.outcomes.extend(done)
            now = HOST_CLOCK()
            if now >= last or any(seq.finish is not None for seq in task.batch):
                return
            task.ends.append(now)


@dataclass(slots=True)
class InlineLanes:
    """A deterministic executor: lanes run one after another, in the order of their start."""

    runners: Mapping[str, LaneRunner]
    clock: Clock = HOST_CLOCK
    _done: list[LaneResult] = field(default_factory=list[LaneResult])

    @property
    def busy(self) -> Mapping[str, float]:
        return {done.lane: done.began for done in self._done}

    def is_here(self) -> bool:
        return False

    def start(self, lane: str, task: LaneTask) -> None:
        began = self.clock()
        work, error = LaneWork(), None
        try:
            with breakable():
                work = self.runners[lane](task)
        except BaseException as caught:  # noqa: BLE001
            # An interrupt too: the engine first undoes the job.
            error = caught if is_interrupt(caught) else ordinary(caught)
        self._done.append(LaneResult(lane, task, work, error, began, self.clock()))

    @property
    def round(self) -> Round:
        """The round of the first lane."""
        return next(iter(self.runners.values())).round

    def exchange(self, other: Round) -> None:
        """Have every lane run `other` from now on."""
        self.runners = {lane: replace(runner, round=other) for lane, runner in self.runners.items()}

    def wait(self, seconds: float | None = None) -> list[LaneResult]:
        del seconds
        done, self._done = self._done, []
        return done

    def abandon(self, lane: str) -> None:
        raise AssertionError(f"lane {lane} runs on the caller's thread and cannot be left")

    def close(self) -> None:
        pass


@dataclass(slots=True)
class Lanes:
    """A schedule and the executor of its lanes. Several lanes have an `order`, and threads leave
    traces that `deliver` passes on."""

    schedule: Schedule
    executor: Executor
    order: LaneOrder | None = None
    deliver: Callable[[], None] | None = None
