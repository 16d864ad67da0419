"""What a simulation leaves behind, and what is under way in it.

Jobs and rounds have the records of a real run, so whatever reads those reads these.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.core.budget import JobTrace, RoundTrace
from outrider.sched.jobs import Job, Stage, Work

DRAFTER = "simulated"


@dataclass(frozen=True, slots=True)
class Served:
    """What became of a request. `arrivals` has a moment for each token, in seconds since the
    request came, at `arrived`."""

    seq_id: int
    arrived: float
    arrivals: tuple[float, ...]

    @property
    def ended(self) -> float:
        return self.arrived + self.arrivals[-1]


@dataclass(frozen=True, slots=True)
class Simulated:
    """`seconds` is from the beginning, at 0, to the last token."""

    seconds: float
    jobs: tuple[JobTrace, ...]
    rounds: tuple[RoundTrace, ...]
    served: tuple[Served, ...]


@dataclass(slots=True)
class Running:
    """A request that came. `depth`, `draft_seconds` and `hit` are of the draft in hand; `is_ready`
    says that drafts for its next verdict were made ahead. `moments` has one for each token."""

    seq_id: int
    arrived: float
    num_prompt: int
    num_output: int
    moments: list[float] = field(default_factory=list[float])
    depth: int = 0
    draft_seconds: float = 0.0
    hit: bool | None = None
    is_ready: bool = False

    @property
    def length(self) -> int:
        """Tokens that it has, its pending one included."""
        return self.num_prompt + len(self.moments)

    @property
    def room(self) -> int:
        """Tokens that it may still write."""
        return self.num_output - len(self.moments)

    def served(self) -> Served:
        return Served(self.seq_id, self.arrived, tuple(self.moments))


@dataclass(frozen=True, slots=True)
class Task:
    """A job under way: what its parts take alone, and what was around when it began."""

    lane: str
    job: Job
    began: float
    draft_seconds: float
    pass_seconds: float
    queues: tuple[int, int, int]
    num_waiting: int
    num_live: int

    @property
    def seconds(self) -> float:
        return self.draft_seconds + self.pass_seconds

    def trace(self, ended: float) -> JobTrace:
        works = self.job.works
        return JobTrace(
            lane=self.lane,
            kinds=tuple(stage.name.lower() for stage in self.job.stages),
            seq_ids=self.job.seq_ids,
            num_tokens=sum(w.num_tokens for w in works if w.stage is not Stage.DRAFT),
            began=self.began,
            ended=ended,
            queues=self.queues,
            num_waiting=self.num_waiting,
            num_live=self.num_live,
            num_free_tokens=0,
        )


@dataclass(frozen=True, slots=True)
class Pass:
    """A target pass that has ended, for the records of its sequences. It took `slowdown` times what
    `task` takes alone."""

    task: Task
    index: int
    slowdown: float

    def read(self, work: Work) -> RoundTrace:
        """A prompt chunk, which emits nothing."""
        return self._trace(work.seq_id, num_prompt_tokens=work.num_tokens)

    def judged(self, work: Work, seq: Running, num_kept: int) -> RoundTrace:
        """A round. The pending token is no prompt token."""
        return self._trace(
            work.seq_id,
            num_prompt_tokens=work.num_tokens - 1,
            num_accepted=num_kept,
            num_emitted=num_kept + 1,
            seq=seq,
        )

    def _trace(
        self,
        seq_id: int,
        *,
        num_prompt_tokens: int,
        num_accepted: int = 0,
        num_emitted: int = 0,
        seq: Running | None = None,
    ) -> RoundTrace:
        task, stages = self.task, (Stage.PREFILL, Stage.VERIFY)
        fused = self.slowdown * task.draft_seconds
        apart = seq.draft_seconds if seq else 0.0
        depth = seq.depth if seq else 0
        return RoundTrace(
            seq_id=seq_id,
            pass_index=self.index,
            drafter=DRAFTER,
            batch_size=sum(len(task.job.of(stage)) for stage in stages),
            num_target_passes=1,
            num_prompt_tokens=num_prompt_tokens,
            num_drafted=depth,
            num_accepted=num_accepted,
            num_emitted=num_emitted,
            num_rows_copied=0,
            draft_seconds=fused if Stage.DRAFT in task.job.stages else apart,
            verify_seconds=self.slowdown * task.pass_seconds,
            accept_seconds=0.0,
            num_waiting=task.num_waiting,
            hit=seq.hit if seq else None,
            draft_depth=depth,
        )
