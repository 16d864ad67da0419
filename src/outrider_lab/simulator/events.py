"""Chance, costs and records of a simulation: verdicts, seconds, results.

A verification accepts n tokens by one uniform number u: the number of positions j with u < a_1 a_2
... a_j, where a_j is the probability that the j-th token is accepted given that all before it were.
So a longer draft keeps what a shorter one would. Numbers are keyed by (seed, sequence, its tokens,
what is decided), so all engines of a comparison get the same verdicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from outrider.core.draft import JobTrace, RoundTrace
from outrider.core.errors import ConfigError
from outrider.estimate.acceptance import prefix_products
from outrider.sched.jobs import Job, JobKind, Stage, StageItem
from outrider_lab.planner.calibration import Calibration, DrafterCosts
from outrider_lab.planner.rounds import expected_by_place
from outrider_lab.simulator.load import Decides, SimulatedRequest, uniform


@dataclass(frozen=True, slots=True)
class Chance:
    """The verdicts of a simulation. `rates` is a_1, a_2, ...; positions beyond the last have the
    rate of the last. `p_hit` is how often a verdict is among those that were drafted for. Raises
    ConfigError for a value that is no probability."""

    rates: tuple[float, ...]
    p_hit: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for value in (*self.rates, self.p_hit):
            if not 0 <= value <= 1:
                raise ConfigError(
                    f"{value:g} is no probability.", hint="name numbers from 0 to 1, as in .8"
                )
        if not self.rates:
            raise ConfigError(
                "no acceptance rate of drafts is given.", hint="--alpha .8, or --places .8,.7"
            )

    def rates_of(self, depth: int) -> tuple[float, ...]:
        """Return a_1 to a_depth."""
        return (*self.rates, *[self.rates[-1]] * depth)[:depth]

    def tokens_per_round(self, depth: int) -> float:
        """Return E of a draft of `depth` tokens, the target's own included."""
        return expected_by_place(self.rates_of(depth))

    def num_kept(self, seq_id: int, start: int, depth: int) -> int:
        """Return the accepted tokens of a draft of `depth` for a sequence of `start` tokens."""
        if depth == 0:
            return 0
        drawn = uniform(self.seed, Decides.VERDICT, seq_id, start)
        return sum(drawn < chance for chance in prefix_products(self.rates_of(depth)))

    def is_hit(self, seq_id: int, start: int) -> bool:
        """Return whether the verdict that left a sequence with `start` tokens was drafted for."""
        return uniform(self.seed, Decides.HIT, seq_id, start) < self.p_hit


DRAFTER = "simulated"


@dataclass(frozen=True, slots=True)
class SimulatedResult:
    """The result of a request. `arrivals` has a moment for each token, in seconds since the request
    came, at `arrived`. `replica` wrote its last token; `num_moves` is how often it moved to another
    replica, `num_cached` how many of its tokens had been read before."""

    seq_id: int
    arrived: float
    arrivals: tuple[float, ...]
    replica: int = 0
    num_moves: int = 0
    num_cached: int = 0

    @property
    def ended(self) -> float:
        return self.arrived + self.arrivals[-1]


@dataclass(frozen=True, slots=True)
class Simulated:
    """A simulated run. `seconds` is from the beginning, at 0, to the last token."""

    seconds: float
    jobs: tuple[JobTrace, ...]
    rounds: tuple[RoundTrace, ...]
    served: tuple[SimulatedResult, ...]


@dataclass(slots=True)
class Running:
    """A request that came. `depth`, `draft_seconds` and `hit` belong to the current draft;
    `is_ready` says that drafts were made ahead. `moments` has one for each token."""

    seq_id: int
    arrived: float
    request: SimulatedRequest
    moments: list[float] = field(default_factory=list[float])
    num_moves: int = 0
    num_cached: int = 0
    depth: int = 0
    draft_seconds: float = 0.0
    hit: bool | None = None
    is_ready: bool = False

    @property
    def length(self) -> int:
        """The tokens that it has, its pending one included."""
        return self.request.num_prompt + len(self.moments)

    @property
    def num_left(self) -> int:
        """Tokens that it may still write."""
        return self.request.num_output - len(self.moments)

    def served(self, replica: int) -> SimulatedResult:
        return SimulatedResult(
            self.seq_id, self.arrived, tuple(self.moments), replica, self.num_moves, self.num_cached
        )


@dataclass(frozen=True, slots=True)
class SimulatedJob:
    """A running job: the seconds that its parts take alone, and the engine's state at its start."""

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


def round_trace(
    task: SimulatedJob,
    work: StageItem,
    seq: Running | None,
    *,
    index: int,
    slowdown: float,
    kept: int,
) -> RoundTrace:
    """Return what the target pass of a job did for one sequence: a round that accepted so many
    tokens, or, without `seq`, a prompt chunk, which emits nothing. The pass took `slowdown` times
    the seconds that `task` takes alone."""
    stages = (Stage.PREFILL, Stage.VERIFY)
    fused = slowdown * task.draft_seconds
    apart = seq.draft_seconds if seq else 0.0
    depth = seq.depth if seq else 0
    return RoundTrace(
        seq_id=work.seq_id,
        pass_index=index,
        drafter=DRAFTER,
        batch_size=sum(len(task.job.of(stage)) for stage in stages),
        num_target_passes=1,
        # The pending token is no prompt token.
        num_prompt_tokens=work.num_tokens - (seq is not None),
        num_drafted=depth,
        num_accepted=kept,
        num_emitted=kept + 1 if seq else 0,
        num_rows_copied=0,
        draft_seconds=fused if task.job.kind is JobKind.ROUND else apart,
        verify_seconds=slowdown * task.pass_seconds,
        accept_seconds=0.0,
        num_waiting=task.num_waiting,
        hit=seq.hit if seq else None,
        draft_depth=depth,
    )


@dataclass(frozen=True, slots=True)
class Drafted:
    """A sequence for which `depth` tokens are drafted, and its number of committed tokens."""

    depth: int
    context: int


@dataclass(frozen=True, slots=True)
class Fed:
    """A sequence's part of a target pass: `rows` new tokens above `context` committed ones, of
    which `judged` are judged and `emitted` are emitted; 0 for a prompt chunk."""

    rows: int
    context: int
    judged: int = 0
    emitted: int = 0


@dataclass(frozen=True, slots=True)
class JobCosts:
    """Seconds of jobs. `fan_out` verdicts are drafted for ahead; `sync` is seconds.

    A job drafts, then runs one target pass over verified drafts and prompt chunks:

        drafting   a draft of the deepest of those that were not ready, for as many sequences
        ahead      K + 1 steps for F times as many sequences: one over the draft that is being
                   verified, then K of all branches at once (F verdicts a sequence)
        the pass   overhead + host b + rule R + target(rows, sum of S_i, sum of R_i S_i)
        hand-over  `sync`, if a job only drafts: the two lanes have to synchronise

    The target's part is that of `planner/calibration.py`. The draft model's prefill is left out.
    """

    calibration: Calibration
    drafter: DrafterCosts | None
    fan_out: int = 1
    sync: float = 0.0

    def draft_seconds(self, drafted: Sequence[Drafted]) -> float:
        """Return the seconds of drafting: one step per depth for all; 0 without drafts."""
        return self._draft(drafted, steps=0, branches=1)

    def ahead_seconds(self, drafted: Sequence[Drafted]) -> float:
        return self._draft(drafted, steps=1, branches=self.fan_out)

    def pass_seconds(self, fed: Sequence[Fed]) -> float:
        if not fed:
            return 0.0
        known = self.calibration
        shared = known.overhead + known.host * len(fed)
        shared += known.rule * sum(one.judged for one in fed)
        shared += known.token * sum(one.emitted for one in fed)
        return shared + known.target.seconds(
            sum(one.rows for one in fed),
            sum(one.context for one in fed),
            sum(one.rows * one.context for one in fed),
        )

    def _draft(self, drafted: Sequence[Drafted], *, steps: int, branches: int) -> float:
        deep = [one for one in drafted if one.depth]
        if not deep or self.drafter is None:
            return 0.0
        depth = max(one.depth for one in deep) + steps
        context = sum(one.context for one in deep)
        return self.drafter.seconds(depth, len(deep) * branches, context)


@dataclass(frozen=True, slots=True)
class SimulatedTimes:
    """Seconds of the parts of a round of `batch` sequences with the same context. `ahead` is T_p,
    the drafting during a verification; `step` a draft step of one branch a sequence."""

    plain: float
    draft: float
    verify: float
    ahead: float
    step: float

    @property
    def draft_share(self) -> float:
        """T_SD over a plain pass."""
        return self.draft / self.plain if self.plain > 0 else 0.0

    @property
    def window_steps(self) -> float | None:
        """Draft steps in the time of a verification; None if they take no time."""
        return self.verify / self.step if self.step > 0 else None


def round_times(costs: JobCosts, *, batch: int, context: int, k: int) -> SimulatedTimes:
    """Return the times of full drafts of `k` tokens for all sequences, each lane alone."""
    deep = [Drafted(k, context)] * batch
    return SimulatedTimes(
        plain=costs.pass_seconds([Fed(1, context, 1)] * batch),
        draft=costs.draft_seconds(deep),
        verify=costs.pass_seconds([Fed(k + 1, context, k + 1)] * batch),
        ahead=costs.ahead_seconds(deep),
        step=costs.draft_seconds([Drafted(1, context)] * batch),
    )


def widest_fan_out(costs: JobCosts, *, batch: int, context: int, k: int, most: int) -> int:
    """Return the most verdicts a sequence, up to `most`, that can be drafted for within a
    verification, 0 if none. Costs never fall as branches grow, up to measurement noise."""
    window = round_times(costs, batch=batch, context=context, k=k).verify
    deep = [Drafted(k, context)] * batch
    fits = [
        fan_out
        for fan_out in range(1, most + 1)
        if replace(costs, fan_out=fan_out).ahead_seconds(deep) <= window
    ]
    return max(fits, default=0)
