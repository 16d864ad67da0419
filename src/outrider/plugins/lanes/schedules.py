"""Schedules of several lanes: pd, pdv and ssd, as pure functions of the ledger."""

from __future__ import annotations

from outrider.core.budget import JobTrace
from outrider.core.config import EngineConfig
from outrider.plugins.lanes.overlap import BatchMerger, ModeTrial
from outrider.sched.jobs import (
    DECODE,
    PREFILL,
    VERIFY,
    Job,
    LaneSizes,
    ReadyQueues,
    Schedule,
    beside,
    chunks,
    job_of,
    rounds,
)
from outrider.sched.single import single_lane

# Hits and misses take turns, and a draft that nobody foresaw always takes the same.
AHEAD_TRIAL_TURNS = (8, 1)
# What is guessed from slows itself down: drafting ahead and verifying may share a memory.
AHEAD_DOUBTFUL = 1.3


class DraftAheadLanes:
    """`always` drafts ahead, however long that takes.

    The true verdict is looked up among those predicted (plugins/lanes/ahead/); after a hit the next
    draft is ready. New drafts go first on the decode lane, since the target waits for them. Where
    drafting ahead takes longer than a verification, or slows the target down, a round in turns may
    end sooner; then nothing is drafted ahead (`ModeTrial`), and the lane that verifies, which has
    all cores, drafts as well. Groups that were split meet again (`BatchMerger`).
    """

    lanes = (DECODE, VERIFY, PREFILL)

    def __init__(self, sizes: LaneSizes, *, always: bool = False) -> None:
        self._sizes, self._always = sizes, always
        self._groups = BatchMerger(sizes)
        self._contest = ModeTrial(AHEAD_TRIAL_TURNS, doubtful=AHEAD_DOUBTFUL)

    def next_job(self, lane: str, pool: ReadyQueues, num_live: int) -> Job | None:
        if lane == PREFILL:
            return beside(lane, pool, self._sizes)
        if lane == DECODE and pool.drafting:
            return None  # in a round of the other lane
        if not self._is_ahead(num_live):
            self._groups.forget_waits()
            return None if lane == DECODE else self._round(pool)
        if self._groups.holds(lane, pool):
            return job_of(pool.ahead) if lane == DECODE else None
        if lane != DECODE:
            return beside(lane, pool, self._sizes)
        return job_of(pool.draft[: self._sizes.decode] or pool.ahead)

    def _round(self, pool: ReadyQueues) -> Job | None:
        """Of all in one job, once nobody has a draft that was made for a job of its own."""
        if pool.verify:
            return beside(VERIFY, pool, self._sizes)
        if pool.drafting or pool.num_ahead:
            return None
        most = min(self._sizes.decode, self._sizes.verify)
        return job_of(rounds(pool.draft[:most]))

    def observe(self, trace: JobTrace) -> None:
        self._groups.observe(trace)
        self._contest.observe(trace, self._groups.in_turns(trace.num_live))

    def _is_ahead(self, num_live: int) -> bool:
        return self._always or self._contest.way(num_live) == 0


class PrefillDecode:
    """`chunk` prompt tokens at most, of `prefill_batch` prompts, in one pass of the prefill lane;
    rounds of `batch` sequences on the other.

    A long prompt holds nobody up, and the two lanes share the machine instead of a pass.
    """

    lanes = (DECODE, PREFILL)

    def __init__(self, chunk: int, *, batch: int = 1024, prefill_batch: int = 1024) -> None:
        self._chunk, self._batch, self._prefill_batch = chunk, batch, prefill_batch

    def next_job(self, lane: str, pool: ReadyQueues, num_live: int) -> Job | None:
        del num_live
        if lane == PREFILL:
            return job_of(chunks(pool, self._chunk, self._prefill_batch))
        return job_of(rounds(pool.draft[: self._batch]))


# Requests fewer than the threshold at which the lanes are joined again.
HYSTERESIS = 1
# Groups are of unequal sizes, and a round in one job always takes the same.
PDV_TRIAL_TURNS = (2, 1)
# After a trial groups have to find themselves again, so there must be some hope.
PDV_DOUBTFUL = 1.05


class PrefillDraftVerify:
    """Up to `threshold` live requests draft and verify in one job; one more separates the lanes,
    unless that does not pay, until there are fewer than `threshold`. 0 keeps them separate.

    With few requests there is nothing to do side by side, and a second job a round only costs: then
    the decode lane drafts and verifies in one job, as with two lanes. The number of live requests
    decides, with some hysteresis, at every job. With more requests it depends on the machine: two
    groups side by side read the weights twice, and may share one memory. So lanes are joined where
    that makes rounds shorter (`ModeTrial`), and groups go on together where that saves more than it
    hides (`BatchMerger`).
    """

    lanes = (DECODE, VERIFY, PREFILL)

    def __init__(self, sizes: LaneSizes, *, threshold: int = 3) -> None:
        self._sizes, self._threshold = sizes, threshold
        self._separate = threshold == 0
        self._groups = BatchMerger(sizes)
        self._contest = ModeTrial(PDV_TRIAL_TURNS, doubtful=PDV_DOUBTFUL)

    def next_job(self, lane: str, pool: ReadyQueues, num_live: int) -> Job | None:
        self._separate = self._is_separate(num_live)
        separate = self._separate and (not self._threshold or self._contest.way(num_live) == 0)
        if not separate:
            self._groups.forget_waits()
        elif lane != PREFILL and self._groups.holds(lane, pool):
            return None
        if lane != DECODE:
            return beside(lane, pool, self._sizes)
        waiting = pool.draft[: self._sizes.decode]
        if not separate:
            return job_of(rounds(waiting))
        half = -(-len(pool.draft) // 2)
        return job_of(waiting[:half] if self._groups.parts(pool) else waiting)

    def observe(self, trace: JobTrace) -> None:
        self._groups.observe(trace)
        if self._separate:
            self._contest.observe(trace, self._groups.in_turns(trace.num_live))

    def _is_separate(self, num_live: int) -> bool:
        if num_live > self._threshold:
            return True
        return self._separate and num_live > self._threshold - HYSTERESIS


def schedule_for(config: EngineConfig) -> Schedule:
    """That of a configuration whose schedule is resolved."""
    batch = config.most_batch
    sizes = LaneSizes(
        chunk=config.prefill_chunk,
        prefill=config.prefill_batch or batch,
        decode=config.decode_batch or batch,
        verify=config.verify_batch or batch,
    )
    match config.schedule:
        case "pd":
            return PrefillDecode(sizes.chunk, batch=sizes.decode, prefill_batch=sizes.prefill)
        case "pdv":
            return PrefillDraftVerify(sizes, threshold=config.hybrid_threshold)
        case "ssd":
            return DraftAheadLanes(sizes, always=_always_ahead(config))
        case _:
            return single_lane(config)


def _always_ahead(config: EngineConfig) -> bool:
    """Who forces hits studies drafting ahead. Seconds a turn tell which way is better only if both
    bring the same: with another fallback than jit a miss is not drafted for by the draft model."""
    return config.force_hits >= 0 or config.fallback != "jit" or config.hybrid_threshold == 0
