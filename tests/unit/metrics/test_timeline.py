"""What lanes did, against a count of grid cells, and in small cases worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from doubles.timelines import cells, job, timelines, trace
from outrider.core.draft import JobTrace
from outrider_lab.metrics.timeline import (
    QUEUES,
    WAITING,
    QueueUse,
    hit_rate,
    over_time,
    overlap_fraction,
    queue_depth,
    timeline,
    window_use,
)


def covered(jobs: list[JobTrace], lane: str | None = None, kind: str | None = None) -> set[int]:
    return cells(
        [
            (job.began, job.ended)
            for job in jobs
            if lane in (None, job.lane) and (kind is None or kind in job.kinds)
        ]
    )


def share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


@given(timelines())
def test_busy_and_overlap_are_what_a_grid_counts(jobs: list[JobTrace]) -> None:
    found = timeline(jobs)
    by_lane = {lane: covered(jobs, lane) for lane in found.lanes}
    wall = int(max(j.ended for j in jobs) - min(j.began for j in jobs)) if jobs else 0
    anything = covered(jobs)
    twice = {c for c in anything if sum(c in own for own in by_lane.values()) > 1}
    assert found.seconds == wall
    assert found.busy_fraction == share(len(anything), wall)
    assert found.overlap_fraction == share(len(twice), len(anything))
    for lane, own in by_lane.items():
        assert found.lanes[lane].busy_seconds == len(own)
        assert found.lanes[lane].busy_fraction == share(len(own), wall)
    for (first, second), fraction in found.overlaps.items():
        one, other = by_lane[first], by_lane[second]
        assert fraction == share(len(one & other), min(len(one), len(other)))


@given(timelines())
def test_counts_of_lanes_add_up(jobs: list[JobTrace]) -> None:
    lanes = timeline(jobs).lanes
    assert set(lanes) == {job.lane for job in jobs}
    assert sum(use.num_jobs for use in lanes.values()) == len(jobs)
    assert sum(use.num_works for use in lanes.values()) == sum(len(j.seq_ids) for j in jobs)
    assert sum(use.num_tokens for use in lanes.values()) == sum(j.num_tokens for j in jobs)
    for lane, use in lanes.items():
        times = [job.seconds for job in jobs if job.lane == lane]
        assert use.job_seconds.p95 == np.percentile(times, 95)
        assert use.job_seconds.min <= use.job_seconds.p50 <= use.job_seconds.max == max(times)


@given(timelines())
def test_queue_depths_are_of_time_and_not_of_jobs(jobs: list[JobTrace]) -> None:
    found = timeline(jobs).queues
    if not jobs:
        assert found == {}
        return
    records = sorted(jobs, key=lambda job: job.began)
    ended = max(job.ended for job in jobs)
    for place, name in enumerate((*QUEUES, WAITING)):
        depths = [(*job.queues, job.num_waiting)[place] for job in records]
        held: list[int] = []
        for i, record in enumerate(records):
            until = records[i + 1].began if i + 1 < len(records) else ended
            held += [depths[i]] * int(until - record.began)
        held = sorted(held or depths)
        use = found[name]
        assert use.mean == pytest.approx(np.mean(held))
        assert use.p95 == held[-(-95 * len(held) // 100) - 1]
        assert use.max == max(depths)


@given(timelines())
def test_window_use_is_what_a_grid_counts(jobs: list[JobTrace]) -> None:
    found = window_use(jobs)
    if not any("ahead" in job.kinds for job in jobs):
        assert found is None
        return
    assert found is not None
    windows = covered(jobs, kind="verify")
    assert found.use == share(len(windows & covered(jobs, kind="ahead")), len(windows))
    assert 0 <= found.use <= 1


@given(timelines(), st.integers(1, 5))
def test_stretches_share_out_all_jobs(jobs: list[JobTrace], num: int) -> None:
    found = over_time(jobs, num)
    assert len(found) <= num
    assert [stretch.began for stretch in found] == sorted(stretch.began for stretch in found)
    for name, whole in timeline(jobs).queues.items():
        assert max(stretch.queues[name].max for stretch in found) == whole.max
    if num == 1 and jobs:
        whole = timeline(jobs)
        assert found[0].queues == whole.queues
        assert found[0].job_seconds == {n: use.job_seconds for n, use in whole.lanes.items()}


def test_a_lane_that_slows_down_shows_over_time() -> None:
    jobs = [job("main", "draft+verify", i, i + 0.1) for i in range(5)]
    jobs += [job("main", "draft+verify", i, i + 0.9) for i in range(5, 10)]
    first, second = over_time(jobs, 2)
    assert first.job_seconds["main"].p95 == pytest.approx(0.1)
    assert second.job_seconds["main"].p95 == pytest.approx(0.9)
    assert (first.began, second.began) == (0.0, 5.0)


@given(timelines())
def test_the_order_of_records_does_not_matter(jobs: list[JobTrace]) -> None:
    if len({job.began for job in jobs}) == len(jobs):
        assert timeline(jobs) == timeline(list(reversed(jobs)))


@given(timelines())
def test_a_timeline_is_plain_json(jobs: list[JobTrace]) -> None:
    json.dumps(timeline(jobs).to_dict(), allow_nan=False)


def test_overlap_is_over_the_lane_that_ran_less() -> None:
    assert overlap_fraction([(0, 10)], [(8, 12)]) == 0.5
    assert overlap_fraction([(8, 12)], [(0, 10)]) == 0.5
    assert overlap_fraction([(0, 10)], [(2, 3), (4, 5)]) == 1.0
    assert overlap_fraction([(0, 10)], [(10, 20)]) == 0.0
    assert overlap_fraction([(0, 10)], []) == 0.0


def test_lanes_in_turns_do_not_overlap_however_busy_they_are() -> None:
    """What a lock around every job looks like."""
    jobs = [job("decode", "draft", 2 * i, 2 * i + 1) for i in range(5)]
    jobs += [job("verify", "verify", 2 * i + 1, 2 * i + 2) for i in range(5)]
    found = timeline(jobs)
    assert (found.busy_fraction, found.overlap_fraction) == (1.0, 0.0)
    assert found.overlaps == {("decode", "verify"): 0.0}


def test_a_round_is_measured_against_the_verification_it_drafted_ahead_of() -> None:
    jobs = [
        job("verify", "verify", 0, 10, 1),
        job("decode", "ahead", 1, 6, 1),
        job("verify", "verify", 10, 14, 2),
        job("decode", "ahead", 11, 17, 2),
    ]
    found = window_use(jobs)
    assert found is not None
    assert found.ratios == (0.5, 1.5)
    assert found.mean_ratio == 1.0
    assert found.use == (5 + 3) / 14


def test_drafting_ahead_after_the_verdict_uses_no_window() -> None:
    """One lane after another, as the inline executor runs them: a ratio, but no use."""
    found = window_use([job("verify", "verify", 0, 4), job("decode", "ahead", 4, 6)])
    assert found is not None
    assert (found.use, found.ratios) == (0.0, (0.5,))


def test_drafting_ahead_of_nothing_has_no_ratio() -> None:
    found = window_use([job("verify", "verify", 0, 4, 1), job("decode", "ahead", 1, 2, 7)])
    assert found is not None
    assert found.ratios == ()
    assert found.mean_ratio == 0.0


def test_a_depth_holds_until_the_next_job() -> None:
    assert queue_depth([(0.0, 1), (9.0, 5)], 10.0) == QueueUse(1.4, 5, 5)
    assert queue_depth([(0.0, 1), (19.0, 5)], 20.0) == QueueUse(1.2, 1, 5)
    assert queue_depth([(3.0, 2)], 3.0) == QueueUse(2.0, 2, 2)


def test_failures_and_memory_are_told() -> None:
    jobs = [
        replace(job("main", "draft+verify", 0, 1), num_failed=1, num_free_tokens=64),
        replace(job("main", "draft+verify", 1, 2), num_free_tokens=32),
    ]
    found = timeline(jobs)
    assert found.lanes["main"].num_failed == 1
    assert found.least_free_tokens == 32


def test_hits_are_counted_where_somebody_drafted_ahead() -> None:
    assert hit_rate([trace(0, 0), trace(0, 1)]) is None
    assert hit_rate([trace(0, 0), trace(0, 1, hit=True), trace(0, 2, hit=False)]) == 0.5


def test_no_job_is_a_timeline_of_nothing() -> None:
    found = timeline([])
    assert (found.seconds, found.busy_fraction, found.lanes) == (0.0, 0.0, {})
    assert found.least_free_tokens is None
