"""State of lanes and scheduler at one moment, with the field names of pdverify's reports.

The figures derive from job records and from counts of the engine. A lane's queue has a slot for
every sequence that may run, so a lane never rejects. Only the queue of requests is bounded and
rejects; it is reported as one more lane, `waiting`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypedDict

from outrider.core.budget import JobTrace
from outrider_lab.metrics.timeline import QUEUES, WAITING


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
