"""Schedules of several lanes: pd, pdv and ssd, as pure functions of the ledger."""

from __future__ import annotations

from outrider.core.config import EngineConfig
from outrider.core.draft import JobTrace
from outrider.plugins.lanes.overlap import BatchMerger, ModeTrial
from outrider.sched.jobs import (
    DECODE,
    PREFILL,
    VERIFY,
    Job,
    LaneSizes,
    ReadyQueues,
    Schedule,
    chunks,
    job_of,
    lane_job,
    rounds,
    single_lane,
)

# Hits and misses alternate in the first mode, while rounds of the second all take the same time.
AHEAD_TRIAL_TURNS = (8, 1)
# The guess adds times that slow each other down: drafting ahead and verifying may share a memory.
AHEAD_DOUBTFUL = 1.3


class DraftAheadLanes:
    """A schedule that drafts for the likely verdicts while the target verifies (ssd).

    The true verdict is looked up among the predicted ones (plugins/lanes/ahead/); after a cache hit
    the next draft is ready. Drafts of misses go first on the decode lane, since the target waits
    for them. Where drafting ahead takes longer than a verification, or slows the target down, a
    round in turns may be shorter. Then nothing is drafted ahead (`ModeTrial`), and the lane that
    verifies, which has all cores, drafts as well. `always` drafts ahead at any cost. Split groups
    are merged again (`BatchMerger`).
    """

    lanes = (DECODE, VERIFY, PREFILL)

    def __init__(self, sizes: LaneSizes, *, always: bool = False) -> None:
        self._sizes, self._always = sizes, always
        self._groups = BatchMerger(sizes)
        self._trial = ModeTrial(AHEAD_TRIAL_TURNS, doubtful=AHEAD_DOUBTFUL)

    def next_job(self, lane: str, pool: ReadyQueues, num_live: int) -> Job | None:
        if lane == PREFILL:
            return lane_job(lane, pool, self._sizes)
        if lane == DECODE and pool.drafting:
            return None  # in a round of the other lane
        if not self._is_ahead(num_live):
            self._groups.forget_waits()
            return None if lane == DECODE else self._round(pool)
        if self._groups.holds(lane, pool):
            return job_of(pool.ahead) if lane == DECODE else None
        if lane != DECODE:
            return lane_job(lane, pool, self._sizes)
        return job_of(pool.draft[: self._sizes.decode] or pool.ahead)

    def _round(self, pool: ReadyQueues) -> Job | None:
        """Return a job for all sequences, once none has a separately made draft."""
        if pool.verify:
            return lane_job(VERIFY, pool, self._sizes)
        if pool.drafting or pool.num_ahead:
            return None
        most = min(self._sizes.decode, self._sizes.verify)
        return job_of(rounds(pool.draft[:most]))

    def observe(self, trace: JobTrace) -> None:
        self._groups.observe(trace)
        self._trial.observe(trace, self._groups.in_turns(trace.num_live))

    def _is_ahead(self, num_live: int) -> bool:
        return self._always or self._trial.mode(num_live) == 0


class PrefillDecode:
    """A schedule of two lanes (pd): one pass of the prefill lane reads at most `chunk` prompt
    tokens of `prefill_batch` prompts; the other lane runs rounds of `batch` sequences.

    A long prompt delays no other request, and the two lanes share the machine instead of a pass.
    """

    lanes = (DECODE, PREFILL)

    def __init__(self, chunk: int | None, *, batch: int = 1024, prefill_batch: int = 1024) -> None:
        self._chunk, self._batch, self._prefill_batch = chunk, batch, prefill_batch

    def next_job(self, lane: str, pool: ReadyQueues, num_live: int) -> Job | None:
        del num_live
        if lane == PREFILL:
            return job_of(chunks(pool, self._chunk, self._prefill_batch))
        return job_of(rounds(pool.draft[: self._batch]))


# Lanes are joined again at so many requests below the threshold.
HYSTERESIS = 1
# The groups of the first mode have unequal sizes; rounds in one job all take the same time.
PDV_TRIAL_TURNS = (2, 1)
# After a trial groups have to form again, so a trial needs some prospect.
PDV_DOUBTFUL = 1.05


class PrefillDraftVerify:
    """A schedule of three lanes (pdv). Up to `threshold` running requests draft and verify in one
    job; one more separates the lanes, unless that does not pay, until fewer than `threshold` run. A
    threshold of 0 keeps them separate.

    With few requests there is nothing to run in parallel, and a second job a round only costs time:
    then the decode lane drafts and verifies in one job, as with two lanes. At every job the number
    of running requests decides, with some hysteresis. With more requests the machine decides: two
    groups in parallel read the weights twice, and may share one memory. So lanes are joined where
    that shortens rounds (`ModeTrial`), and split groups are merged where one pass saves more than
    overlap hides (`BatchMerger`).
    """

    lanes = (DECODE, VERIFY, PREFILL)

    def __init__(self, sizes: LaneSizes, *, threshold: int = 3) -> None:
        self._sizes, self._threshold = sizes, threshold
        self._separate = threshold == 0
        self._groups = BatchMerger(sizes)
        self._trial = ModeTrial(PDV_TRIAL_TURNS, doubtful=PDV_DOUBTFUL)

    def next_job(self, lane: str, pool: ReadyQueues, num_live: int) -> Job | None:
        self._separate = self._is_separate(num_live)
        separate = self._separate and (not self._threshold or self._trial.mode(num_live) == 0)
        if not separate:
            self._groups.forget_waits()
        elif lane != PREFILL and self._groups.holds(lane, pool):
            return None
        if lane != DECODE:
            return lane_job(lane, pool, self._sizes)
        waiting = pool.draft[: self._sizes.decode]
        if not separate:
            return job_of(rounds(waiting))
        half = -(-len(pool.draft) // 2)
        return job_of(waiting[:half] if self._groups.parts(pool) else waiting)

    def observe(self, trace: JobTrace) -> None:
        self._groups.observe(trace)
        if self._separate:
            self._trial.observe(trace, self._groups.in_turns(trace.num_live))

    def _is_separate(self, num_live: int) -> bool:
        if num_live > self._threshold:
            return True
        return self._separate and num_live > self._threshold - HYSTERESIS


def schedule_for(config: EngineConfig) -> Schedule:
    """Return the schedule of a configuration in which it is resolved."""
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
    """Return whether to draft ahead without a trial: when forced hits study it, or when turns
    cannot be compared, since without jit the draft model does not draft after a miss."""
    return config.force_hits >= 0 or config.fallback != "jit" or config.hybrid_threshold == 0
