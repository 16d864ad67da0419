"""Lanes and scheduler at one moment, under the names of the reports that read them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given

from doubles.timelines import job, timelines
from outrider.core.draft import JobTrace
from outrider_lab.metrics.timeline import Counters, scheduler_stats, served_queues

COUNTERS = Counters(
    uptime_seconds=2.5,
    num_submitted=20,
    num_completed=9,
    num_rejected=3,
    num_waiting=4,
    num_live=4,
    max_waiting=8,
    max_live=16,
)


@given(timelines())
def test_every_lane_that_ran_has_stats(jobs: list[JobTrace]) -> None:
    found = scheduler_stats(jobs, COUNTERS)
    assert set(found["lanes"]) == {"waiting"} | {job.lane for job in jobs}
    for lane, stats in found["lanes"].items():
        assert stats["utilization"] == stats["current_size"] / stats["max_size"]
        works = sum(len(job.seq_ids) for job in jobs if job.lane == lane)
        assert lane == "waiting" or stats["total_processed"] == works
    json.dumps(found, allow_nan=False)


def test_the_scheduler_has_the_figures_of_its_counters() -> None:
    found = scheduler_stats([], COUNTERS)
    assert list(found) == ["uptime", "submitted", "completed", "pending", "active", "lanes"]
    assert (found["uptime"], found["submitted"], found["completed"]) == (2.5, 20, 9)
    assert (found["pending"], found["active"]) == (4, 4)


def test_the_queue_of_requests_is_what_rejects() -> None:
    waiting = scheduler_stats([], COUNTERS)["lanes"]["waiting"]
    assert waiting == {
        "current_size": 4,
        "max_size": 8,
        "total_processed": 16,
        "total_rejected": 3,
        "utilization": 0.5,
    }


def test_the_newest_job_tells_how_long_queues_are() -> None:
    old = replace(job("decode", "draft", 0, 1, 1, 2), queues=(7, 7, 7))
    new = replace(job("verify", "verify", 3, 9, 1), queues=(1, 8, 2))
    lanes = scheduler_stats([new, old], COUNTERS)["lanes"]
    assert (lanes["decode"]["current_size"], lanes["decode"]["total_processed"]) == (8, 2)
    assert (lanes["verify"]["current_size"], lanes["verify"]["max_size"]) == (2, 16)


@pytest.mark.parametrize(
    ("kinds", "queues"),
    [
        (["prefill"], {"prefill"}),
        (["draft", "ahead"], {"draft"}),
        (["draft+verify"], {"draft"}),
        (["draft+verify", "verify"], {"draft", "verify"}),
        (["draft+prefill+verify"], {"draft", "prefill"}),
    ],
)
def test_a_lane_serves_the_queues_it_takes_from(kinds: list[str], queues: set[str]) -> None:
    assert served_queues(job("lane", one, 0, 1) for one in kinds) == queues
