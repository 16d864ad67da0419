"""Timeline of lanes from job records: busy and overlap fractions, queue depths, window use.

- *Busy fraction* of a lane: the time of its jobs over the time from the first job's beginning to
  the last job's end. For all lanes together: the share of time in which at least one ran.
- *Overlap fraction* of two lanes: the time in which both ran, over the time of the one that ran
  less. For all lanes together: the time in which at least two ran, over that in which any ran.
- *Queue depth*: the depth that a job found when it began holds until the next job begins. Means
  and percentiles are over time, not over jobs.
- *Window use*: the time of AHEAD jobs inside verifying jobs, over the time of verifying jobs. The
  T_ahead / T_verify of a round is the duration of its AHEAD job over that of its verification.

Intervals of time are half-open. Nothing is sampled: every figure is a sum of differences of the
given times, so it is exact if those differences are.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, islice, pairwise
from typing import TypedDict

from outrider.core.draft import JobTrace, RoundTrace
from outrider.metrics import percentile

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals into disjoint ones, in order; empty ones are left out."""
    found: list[Interval] = []
    for began, ended in sorted(intervals):
        if ended <= began:
            continue
        if found and began <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], ended))
        else:
            found.append((began, ended))
    return found


def seconds(intervals: Iterable[Interval]) -> float:
    """Return the length of the union of the intervals."""
    return sum(ended - began for began, ended in union(intervals))


def shared_seconds(first: Iterable[Interval], second: Iterable[Interval]) -> float:
    """Return the length of the intersection of both."""
    return sum(seconds_by_depth([list(first), list(second)])[2:])


def seconds_by_depth(tracks: Sequence[Iterable[Interval]]) -> list[float]:
    """Entry n is the time that exactly n of the tracks cover, between the first beginning and the
    last end. There are `len(tracks) + 1` entries."""
    changes: list[tuple[float, int]] = []
    for track in tracks:
        for began, ended in union(track):
            changes += [(began, 1), (ended, -1)]
    changes.sort()
    found = [0.0] * (len(tracks) + 1)
    depth = 0
    for (moment, change), (following, _) in pairwise(changes):
        depth += change
        if following > moment:
            found[depth] += following - moment
    return found


QUEUES = ("prefill", "draft", "verify")
WAITING = "waiting"


@dataclass(frozen=True, slots=True)
class TimeSpread:
    """Distribution of durations in seconds; percentiles as np.percentile computes them."""

    mean: float
    min: float
    max: float
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class LaneUse:
    """Use of one lane. `num_works` counts a sequence once for each of its jobs."""

    num_jobs: int
    num_works: int
    num_tokens: int
    num_failed: int
    busy_seconds: float
    busy_fraction: float
    job_seconds: TimeSpread


@dataclass(frozen=True, slots=True)
class QueueUse:
    """Waiting sequences over time: mean, depth not exceeded in 95 % of it, and maximum."""

    mean: float
    p95: int
    max: int


@dataclass(frozen=True, slots=True)
class WindowUse:
    """Use of the verification time by drafting ahead. `use` is a share of the verifying time;
    `ratios` has T_ahead / T_verify of each AHEAD job, in order."""

    use: float
    ratios: tuple[float, ...]

    @property
    def mean_ratio(self) -> float:
        return statistics.fmean(self.ratios) if self.ratios else 0.0


@dataclass(frozen=True, slots=True)
class Timeline:
    """Use of all lanes in a run. `overlaps` has an entry for each pair of lanes that ran; `queues`
    has prefill, draft and verify (sequences) and waiting (requests that were not admitted).
    `window` is None without drafting ahead, `least_free_tokens` without a job."""

    seconds: float
    busy_fraction: float
    overlap_fraction: float
    lanes: Mapping[str, LaneUse]
    overlaps: Mapping[tuple[str, str], float]
    queues: Mapping[str, QueueUse]
    window: WindowUse | None
    least_free_tokens: int | None

    def to_dict(self) -> dict[str, object]:
        window = self.window
        return {
            "seconds": self.seconds,
            "busy_fraction": self.busy_fraction,
            "overlap_fraction": self.overlap_fraction,
            "lanes": {lane: asdict(use) for lane, use in self.lanes.items()},
            "overlaps": [{"lanes": list(two), "fraction": x} for two, x in self.overlaps.items()],
            "queues": {name: asdict(use) for name, use in self.queues.items()},
            "window": None
            if window is None
            else {"use": window.use, "ahead_over_verify": list(window.ratios)},
            "least_free_tokens": self.least_free_tokens,
        }


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a run. `began` is the start of its first job, in seconds since the run's first
    job; `job_seconds` is by lane."""

    began: float
    job_seconds: Mapping[str, TimeSpread]
    queues: Mapping[str, QueueUse]


def timeline(jobs: Iterable[JobTrace]) -> Timeline:
    """Return the use of lanes. All fractions are 0 if no job ran or no job took time."""
    records = sorted(jobs, key=lambda job: job.began)
    by_lane = _by_lane(records)
    tracks = {lane: [_interval(job) for job in own] for lane, own in by_lane.items()}
    wall = max((job.ended for job in records), default=0.0) - (records[0].began if records else 0.0)
    depths = seconds_by_depth(list(tracks.values()))
    busy = sum(depths[1:])
    return Timeline(
        seconds=wall,
        busy_fraction=_share(busy, wall),
        overlap_fraction=_share(sum(depths[2:]), busy),
        lanes={lane: _lane_use(own, wall) for lane, own in by_lane.items()},
        overlaps={
            (first, second): overlap_fraction(tracks[first], tracks[second])
            for first, second in combinations(tracks, 2)
        },
        queues=_queues(records, max((job.ended for job in records), default=0.0)),
        window=window_use(records),
        least_free_tokens=min((job.num_free_tokens for job in records), default=None),
    )


def over_time(jobs: Iterable[JobTrace], num: int = 10) -> list[Stretch]:
    """Divide a run into `num` equal stretches, without empty ones. A job counts where it began;
    depths found by a stretch's jobs hold until it ends."""
    records = sorted(jobs, key=lambda job: job.began)
    if not records:
        return []
    origin, ended = records[0].began, max(job.ended for job in records)
    length = (ended - origin) / num
    found: list[Stretch] = []
    for i in range(num):
        # The last stretch includes jobs that begin at the very end.
        until = origin + (i + 1) * length if i + 1 < num else ended
        own = [job for job in records if job.began < until or i + 1 == num]
        del records[: len(own)]
        if own:
            by_lane = _by_lane(own)
            times = {lane: _spread([j.seconds for j in some]) for lane, some in by_lane.items()}
            found.append(Stretch(own[0].began - origin, times, _queues(own, until)))
    return found


def overlap_fraction(first: Iterable[Interval], second: Iterable[Interval]) -> float:
    """Return the time in both over the time of the shorter one; 0 if either is empty."""
    tracks = list(first), list(second)
    return _share(shared_seconds(*tracks), min(map(seconds, tracks)))


def window_use(jobs: Iterable[JobTrace]) -> WindowUse | None:
    """Return the use of verification time by drafting ahead; None without AHEAD jobs."""
    records = sorted(jobs, key=lambda job: job.began)
    ahead = [job for job in records if "ahead" in job.kinds]
    if not ahead:
        return None
    verify = [job for job in records if "verify" in job.kinds]
    windows = [_interval(job) for job in verify]
    inside = shared_seconds([_interval(job) for job in ahead], windows)
    pairs = ((job, _window_of(job, verify)) for job in ahead)
    ratios = tuple(
        job.seconds / window.seconds for job, window in pairs if window and window.seconds > 0
    )
    return WindowUse(_share(inside, seconds(windows)), ratios)


def hit_rate(rounds: Iterable[RoundTrace]) -> float | None:
    """Return p_hit, ready drafts over requested ones; None without drafting ahead."""
    hits = [trace.hit for trace in rounds if trace.hit is not None]
    return statistics.fmean(hits) if hits else None


def queue_depth(samples: Sequence[tuple[float, int]], ended: float) -> QueueUse:
    """Return the depth of a queue over time. `samples` are times in order, each with the depth
    that holds until the next one; the last holds until `ended`. At least one is required."""
    moments = [moment for moment, _ in samples]
    spans = [b - a for a, b in zip(moments, [*moments[1:], ended], strict=True)]
    if sum(spans) <= 0:
        spans = [1.0] * len(samples)
    total = sum(spans)
    weighted = sorted((depth, span) for (_, depth), span in zip(samples, spans, strict=True))
    mean = sum(depth * span for depth, span in weighted) / total
    return QueueUse(mean, _percentile_of_time(weighted, 95), weighted[-1][0])


def _percentile_of_time(weighted: Sequence[tuple[int, float]], percent: int) -> int:
    """Return the least depth such that the time at or below it is `percent` of all time."""
    total, passed = sum(span for _, span in weighted), 0.0
    for depth, span in weighted:
        passed += span
        if 100 * passed >= percent * total:
            return depth
    return weighted[-1][0]


def _queues(records: Sequence[JobTrace], ended: float) -> dict[str, QueueUse]:
    if not records:
        return {}
    found = {
        name: queue_depth([(job.began, job.queues[i]) for job in records], ended)
        for i, name in enumerate(QUEUES)
    }
    found[WAITING] = queue_depth([(job.began, job.num_waiting) for job in records], ended)
    return found


def _lane_use(jobs: Sequence[JobTrace], wall: float) -> LaneUse:
    busy = seconds(map(_interval, jobs))
    return LaneUse(
        num_jobs=len(jobs),
        num_works=sum(len(job.seq_ids) for job in jobs),
        num_tokens=sum(job.num_tokens for job in jobs),
        num_failed=sum(job.num_failed for job in jobs),
        busy_seconds=busy,
        busy_fraction=_share(busy, wall),
        job_seconds=_spread([job.seconds for job in jobs]),
    )


def _spread(values: Sequence[float]) -> TimeSpread:
    return TimeSpread(
        statistics.fmean(values),
        min(values),
        max(values),
        *(percentile(values, percent) for percent in (50, 95, 99)),
    )


def _window_of(ahead: JobTrace, verify: Sequence[JobTrace]) -> JobTrace | None:
    """The verification during which `ahead` drafted: of the same sequences, and nearest in time.

    A sequence is verified by one job at a time, so only the neighbours of `ahead` need be compared.
    """
    ids = set(ahead.seq_ids)
    index = bisect_right(verify, ahead.began, key=lambda job: job.began)
    sides = range(index - 1, -1, -1), range(index, len(verify))
    near = [
        verify[i]
        for side in sides
        for i in islice((i for i in side if not ids.isdisjoint(verify[i].seq_ids)), 1)
    ]
    return max(near, key=lambda job: _common(job, ahead), default=None)


def _common(first: JobTrace, second: JobTrace) -> float:
    """Seconds in which both run; if negative, the gap between them."""
    return min(first.ended, second.ended) - max(first.began, second.began)


def _by_lane(records: Sequence[JobTrace]) -> dict[str, list[JobTrace]]:
    found: dict[str, list[JobTrace]] = {}
    for job in records:
        found.setdefault(job.lane, []).append(job)
    return found


def _interval(job: JobTrace) -> Interval:
    return job.began, job.ended


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


# State of lanes and scheduler at one moment, with the field names of pdverify's reports.
#
# The figures derive from job records and from counts of the engine. A lane's queue has a slot for
# every sequence that may run, so a lane never rejects. Only the queue of requests is bounded and
# rejects; it is reported as one more lane, `waiting`.
class LaneStats(TypedDict):
    """Counts of one lane, a sequence once per job; `utilization` is size over `max_size`."""

    current_size: int
    max_size: int
    total_processed: int
    total_rejected: int
    utilization: float


class SchedulerStats(TypedDict):
    """Counts of requests; `uptime` in seconds. A submitted request is pending, active, completed,
    failed or cancelled. A rejected request does not count as submitted."""

    uptime: float
    submitted: int
    completed: int
    pending: int
    active: int
    lanes: Mapping[str, LaneStats]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Counts of requests since the engine was built, and of those that it holds now. At most
    `max_waiting` requests wait, and at most `max_live` sequences run."""

    uptime_seconds: float
    num_submitted: int
    num_completed: int
    num_rejected: int
    num_waiting: int
    num_live: int
    max_waiting: int
    max_live: int


def scheduler_stats(jobs: Iterable[JobTrace], counters: Counters) -> SchedulerStats:
    """Return the state of the scheduler; queue sizes are those that the newest job found."""
    records = sorted(jobs, key=lambda job: job.began)
    lanes: dict[str, list[JobTrace]] = {}
    for job in records:
        lanes.setdefault(job.lane, []).append(job)
    waiting = lane_stats(
        size=counters.num_waiting,
        max_size=counters.max_waiting,
        processed=counters.num_submitted - counters.num_waiting,
        rejected=counters.num_rejected,
    )
    return SchedulerStats(
        uptime=counters.uptime_seconds,
        submitted=counters.num_submitted,
        completed=counters.num_completed,
        pending=counters.num_waiting,
        active=counters.num_live,
        lanes={WAITING: waiting}
        | {
            lane: lane_stats(
                size=sum(records[-1].queues[QUEUES.index(name)] for name in served_queues(own)),
                max_size=counters.max_live,
                processed=sum(len(job.seq_ids) for job in own),
            )
            for lane, own in lanes.items()
        },
    )


def lane_stats(*, size: int, max_size: int, processed: int, rejected: int = 0) -> LaneStats:
    return LaneStats(
        current_size=size,
        max_size=max_size,
        total_processed=processed,
        total_rejected=rejected,
        utilization=size / max_size if max_size else 0.0,
    )


def served_queues(jobs: Iterable[JobTrace]) -> frozenset[str]:
    """Queues from which a lane takes sequences: those that wait for a job's first stage, and those
    whose prompts it reads. A sequence that one job drafts for and verifies waits only once."""
    found: set[str] = set()
    for job in jobs:
        found.update((job.kinds[0], *({"prefill"} & set(job.kinds))))
    return frozenset(found & set(QUEUES))


@dataclass(frozen=True, slots=True)
class PassShapes:
    """Sharing of target passes. `mean_sequences` is over all passes. `equal_rows_fraction` is the
    share of passes with several sequences in which all had the same number of rows, None without
    such a pass. Rows are prompt tokens, or drafted tokens and the pending token before them."""

    num_passes: int
    num_shared: int
    mean_sequences: float
    equal_rows_fraction: float | None


def pass_shapes(traces: Iterable[RoundTrace]) -> PassShapes:
    """Return the sharing of passes by the `traces` of all requests, in any order."""
    rows: dict[int, list[int]] = {}
    for trace in traces:
        num_rows = trace.num_prompt_tokens + trace.num_drafted + (trace.num_emitted > 0)
        rows.setdefault(trace.pass_index, []).append(num_rows)
    shared = [group for group in rows.values() if len(group) > 1]
    equal = sum(len(set(group)) == 1 for group in shared)
    return PassShapes(
        num_passes=len(rows),
        num_shared=len(shared),
        mean_sequences=sum(map(len, rows.values())) / len(rows) if rows else 0.0,
        equal_rows_fraction=equal / len(shared) if shared else None,
    )
