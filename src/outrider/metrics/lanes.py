"""State of lanes and scheduler at one moment, under the names that pdverify's reports read.

The figures derive from job records and from counts of the engine. A lane's queue has a place for
every sequence that may be live, so a lane cannot refuse; only the queue of requests, given as one
more lane by the name of `waiting`, has an end and refuses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypedDict

from outrider.core.budget import JobTrace
from outrider.metrics.timeline import QUEUES, WAITING


class LaneStats(TypedDict):
    """`total_processed` counts a sequence once for each job; `utilization` is the share of
    `max_size` places that is taken."""

    current_size: int
    max_size: int
    total_processed: int
    total_rejected: int
    utilization: float


class SchedulerStats(TypedDict):
    """`uptime` in seconds. Who was submitted is pending, active or completed, or has failed or was
    cancelled; who was rejected was not submitted."""

    uptime: float
    submitted: int
    completed: int
    pending: int
    active: int
    lanes: Mapping[str, LaneStats]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Requests since the engine was built, and what it holds now. `max_waiting` requests may wait,
    `max_live` sequences may be live."""

    uptime_seconds: float
    num_submitted: int
    num_completed: int
    num_rejected: int
    num_waiting: int
    num_live: int
    max_waiting: int
    max_live: int


def scheduler_stats(jobs: Iterable[JobTrace], counters: Counters) -> SchedulerStats:
    """Queues are as the newest job found them."""
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
    """Queues that a lane takes from: a job takes sequences that wait for its first stage, and
    those whose prompts it reads. Who is drafted for and verified in one job waits once."""
    found: set[str] = set()
    for job in jobs:
        found.update((job.kinds[0], *({"prefill"} & set(job.kinds))))
    return frozenset(found & set(QUEUES))
