"""Lane orders: which idle lane gets its next job first. The prompt lane usually comes last.

The first lane has the first choice of what lanes share: memory, and the machine when lanes take
turns. Between drafting and verifying an order decides by queues (`DepthOrder`), by latencies
(`SloOrder`), by measured gain (`LearnedOrder`), or not at all (`FixedOrder`). Lanes that an order
does not know come last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import isqrt

from outrider.core.config import LANE_ORDERS
from outrider.core.draft import JobTrace
from outrider.core.errors import ConfigError, ContractError
from outrider.estimate.acceptance import BySequence, FadingMean, nearest_rank
from outrider.sched.jobs import DECODE, PREFILL, VERIFY, LaneOrder, ReadyQueues, job_observers

DRAFTS_FIRST = (DECODE, VERIFY)
VERDICTS_FIRST = (VERIFY, DECODE)


def arranged(lanes: Sequence[str], first: Sequence[str]) -> tuple[str, ...]:
    """Return `lanes` in the order of `first`, then the other lanes, then the prompt lane."""
    known = [lane for lane in first if lane in lanes and lane != PREFILL]
    others = [lane for lane in lanes if lane not in known and lane != PREFILL]
    return (*known, *others, *(lane for lane in lanes if lane == PREFILL))


class FixedOrder:
    """A lane order that is always `first`."""

    def __init__(self, first: Sequence[str] = DRAFTS_FIRST) -> None:
        self._first = tuple(first)

    def arrange(self, lanes: tuple[str, ...], pool: ReadyQueues) -> tuple[str, ...]:
        del pool
        return arranged(lanes, self._first)


class DepthOrder:
    """A lane order by queue depth: verifying comes first when the drafts that wait for it outnumber
    the sequences that wait for a draft by more than `margin`; otherwise drafting does."""

    def __init__(self, margin: int = 2) -> None:
        if not margin >= 0:
            raise ContractError("a margin is at least 0")
        self._margin = margin

    def arrange(self, lanes: tuple[str, ...], pool: ReadyQueues) -> tuple[str, ...]:
        backed_up = len(pool.verify) > len(pool.draft) + self._margin
        return arranged(lanes, VERDICTS_FIRST if backed_up else DRAFTS_FIRST)


class SloOrder:
    """A lane order by latency: the lane furthest behind its share of `target_ms` goes first.

    A sequence's latency in a lane is the time from the end of its previous job to the end of its
    job there, so it includes the wait. A round passes every lane but the prompt lane once, so each
    of them has an equal share of the target. The order compares the 95th percentile of the newest
    `RECENT` latencies, divided by the share; equal lanes stay in the given order. Prompts go first
    when they starve: one waits, and no prompt was read for `STARVING` targets.
    """

    RECENT = 64
    STARVING = 20
    PERCENT = 95

    def __init__(self, target_ms: float) -> None:
        if not target_ms > 0:
            raise ContractError("a target is above 0")
        self._target = target_ms / 1000
        self._left: BySequence[float] = BySequence()
        self._latencies: dict[str, deque[float]] = {}
        self._now = 0.0
        self._read_at: float | None = None

    def arrange(self, lanes: tuple[str, ...], pool: ReadyQueues) -> tuple[str, ...]:
        busy = [lane for lane in lanes if lane != PREFILL]
        order = arranged(lanes, sorted(busy, key=lambda lane: -self.lateness(lane, len(busy))))
        if PREFILL in lanes and pool.prefill and self._starves:
            return (PREFILL, *(lane for lane in order if lane != PREFILL))
        return order

    def observe(self, trace: JobTrace) -> None:
        self._now = max(self._now, trace.ended)
        if trace.lane == PREFILL or self._read_at is None:
            self._read_at = trace.ended
        latencies = self._latencies.setdefault(trace.lane, deque(maxlen=self.RECENT))
        for seq_id in trace.seq_ids:
            latencies.append(trace.ended - self._left.pop(seq_id, trace.began))
            self._left.note(seq_id, trace.ended)

    def lateness(self, lane: str, num_lanes: int) -> float:
        """Return the lane's p95 latency as a multiple of its share; 0 before anything ran there."""
        latencies = self._latencies.get(lane)
        if not latencies:
            return 0.0
        return nearest_rank(latencies, self.PERCENT) * num_lanes / self._target

    @property
    def _starves(self) -> bool:
        return self._read_at is not None and (
            self._now - self._read_at > self.STARVING * self._target
        )


class LearnedOrder:
    """A bandit over `orders`: use the one with the most rounds a second lately, and try the others.

    Each order is in force for `JOBS` jobs and is then scored by sequences verified a second; the
    number of tokens that a round emits does not depend on the order. Scores are means in which each
    new score counts a quarter. At the decisions whose number is a square, the order whose last
    trial is longest ago is tried, so n decisions contain sqrt(n) trials. Nothing is random.
    """

    JOBS = 32
    NEWEST = 0.25

    def __init__(self, orders: Sequence[LaneOrder]) -> None:
        if not orders:
            raise ContractError("there is no order")
        self._orders = tuple(orders)
        self._learners = job_observers(*orders)
        self._scores = [FadingMean(self.NEWEST) for _ in self._orders]
        self._tried_at = [0] * len(self._orders)
        self._current = 0
        self._num_decisions = 0
        self._jobs: list[JobTrace] = []

    @property
    def current(self) -> int:
        """The index of the order in force."""
        return self._current

    def arrange(self, lanes: tuple[str, ...], pool: ReadyQueues) -> tuple[str, ...]:
        return self._orders[self._current].arrange(lanes, pool)

    def observe(self, trace: JobTrace) -> None:
        for order in self._learners:
            order.observe(trace)
        self._jobs.append(trace)
        if len(self._jobs) == self.JOBS:
            self._score()
            self._jobs.clear()
            self._decide()

    def _score(self) -> None:
        seconds = max(job.ended for job in self._jobs) - min(job.began for job in self._jobs)
        num_rounds = sum(len(job.seq_ids) for job in self._jobs if "verify" in job.kinds)
        if seconds <= 0:
            return
        self._scores[self._current].add(num_rounds / seconds)

    def _decide(self) -> None:
        self._num_decisions += 1
        self._tried_at[self._current] = self._num_decisions
        untried = [index for index, score in enumerate(self._scores) if score.value is None]
        if untried:
            self._current = min(untried, key=lambda index: self._tried_at[index])
        elif isqrt(self._num_decisions) ** 2 == self._num_decisions:
            self._current = min(range(len(self._orders)), key=lambda index: self._tried_at[index])
        else:
            self._current = max(
                range(len(self._orders)), key=lambda index: self._scores[index].value or 0
            )


def order_named(name: str, *, margin: int = 2, target_ms: float = 50.0) -> LaneOrder:
    """Return the lane order of a setting's value. Raises ConfigError for an unknown name."""
    match name:
        case "depth":
            return DepthOrder(margin)
        case "fixed":
            return FixedOrder()
        case "slo":
            return SloOrder(target_ms)
        case "learned":
            return LearnedOrder(
                (DepthOrder(margin), FixedOrder(DRAFTS_FIRST), FixedOrder(VERDICTS_FIRST))
            )
        case _:
            raise ConfigError(
                f"there is no lane order {name!r}.", hint=f"choose from {', '.join(LANE_ORDERS)}"
            )
