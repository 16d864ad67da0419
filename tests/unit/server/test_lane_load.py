"""How busy lanes are, by the jobs that they ran."""

from __future__ import annotations

from outrider.core.draft import JobTrace
from outrider.server.thread_port import SECONDS, LaneLoad


def job(lane: str, began: float, ended: float) -> JobTrace:
    return JobTrace(lane, ("verify",), (0,), 1, began, ended, (0, 0, 0), 0, 1, 0)


def test_a_lane_is_as_busy_as_its_jobs_of_the_last_seconds() -> None:
    now = [0.0]
    load = LaneLoad(lambda: now[0])
    assert load.words == {}
    load.note(job("draft", 10.0, 11.0))
    load.note(job("verify", 11.0, 13.0))
    now[0] = 10.0 + SECONDS
    assert load.words == {"draft": "25% busy", "verify": "50% busy"}
    now[0] += 1.5
    assert load.words == {"draft": "0% busy", "verify": "38% busy"}
    now[0] += 100
    assert load.words == {"draft": "0% busy", "verify": "0% busy"}


def test_many_short_jobs_are_told_of_the_time_that_they_cover() -> None:
    now = [8.0]
    load = LaneLoad(lambda: now[0])
    for i in range(8000):
        load.note(job("all", i / 1000, i / 1000 + 0.0005))
    assert load.words == {"all": "50% busy"}
