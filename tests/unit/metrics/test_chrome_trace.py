"""A trace file: the format's rules for any timeline, and what a person finds in it."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from checks.documents import check_trace, nanoseconds
from doubles.timelines import job, timelines, trace
from outrider.core.draft import JobTrace, RoundTrace
from outrider_lab.metrics.chrome_trace import trace_events, trace_pieces


def written(jobs: list[JobTrace], rounds: list[RoundTrace] | None = None) -> list[dict[str, Any]]:
    return check_trace("".join(trace_pieces(jobs, rounds or ())))


@given(timelines(), st.sampled_from([1.0, 1e-6, 1e-9, 0.1234567]), st.floats(0, 1e6))
def test_any_timeline_makes_a_valid_file(jobs: list[JobTrace], scale: float, origin: float) -> None:
    """At any length of jobs, also those below the clock's grain, and wherever the clock began."""
    moved = [
        replace(one, began=origin + scale * one.began, ended=origin + scale * one.ended)
        for one in jobs
    ]
    events = written(moved)
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(jobs)
    assert sum(event["ph"] == "C" for event in events) == 3 * len(jobs)


@given(timelines())
def test_a_file_with_rounds_is_valid(jobs: list[JobTrace]) -> None:
    passes = [job for job in jobs if job.lane != "decode"]
    rounds = [trace(s, i) for i, one in enumerate(passes) for s in one.seq_ids]
    events = written(jobs, rounds)
    told = [event for event in events if "rounds" in event.get("args", {})]
    assert all(
        [one["sequence"] for one in event["args"]["rounds"]] == event["args"]["sequences"]
        for event in told
    )


def test_a_lane_is_a_thread_and_a_job_says_what_it_did() -> None:
    jobs = [
        replace(
            job("verify", "verify", 5, 8.25, 3),
            queues=(1, 2, 3),
            num_waiting=4,
            num_free_tokens=55,
        )
    ]
    events = written(jobs, [trace(3, 7, hit=True)])
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["verify"]
    whole, verify, accept = [event for event in events if event["ph"] == "X"]
    assert (whole["name"], whole["ts"], whole["dur"]) == ("verify", 0, 3.25e6)
    assert whole["args"]["rounds"] == [
        {
            "sequence": 3,
            "prompt": 0,
            "drafted": 4,
            "accepted": 2,
            "emitted": 3,
            "hit": True,
        }
    ]
    assert (verify["name"], nanoseconds(verify)) == ("verify", (0, 2 * 10**9))
    assert (accept["name"], nanoseconds(accept)) == ("accept", (2 * 10**9, 25 * 10**8))
    counted = {event["name"]: event["args"] for event in events if event["ph"] == "C"}
    assert counted == {
        "queues": {"prefill": 1, "draft": 2, "verify": 3},
        "requests": {"waiting": 4, "live": 1},
        "free memory": {"tokens": 55},
    }


def test_arrows_follow_a_sequence_from_lane_to_lane() -> None:
    """Draft, then its verification and what is drafted ahead beside it, then the next draft."""
    jobs = [
        job("decode", "draft", 0, 2, 1),
        job("verify", "verify", 2, 8, 1),
        job("decode", "ahead", 3, 6, 1),
        job("decode", "draft", 9, 10, 1),
    ]
    arrows = [event for event in trace_events(jobs) if event["ph"] in ("s", "f")]
    by_id: dict[object, list[tuple[object, object]]] = {}
    for event in arrows:
        by_id.setdefault(event["id"], []).append((event["ph"], event["ts"]))
    assert list(by_id.values()) == [
        [("s", 2e6 - 0.001), ("f", 2e6)],
        [("s", 8e6 - 0.001), ("f", 9e6)],
    ]


def test_jobs_of_one_lane_need_no_arrow() -> None:
    jobs = [job("main", "draft+verify", i, i + 1, 1) for i in range(4)]
    assert not [event for event in trace_events(jobs) if event["ph"] in ("s", "f")]


def test_events_come_while_the_trace_is_read() -> None:
    """Nothing but the events of running jobs is held, so a long trace needs no more memory."""
    jobs = [job("main", "verify", i, i + 1, 1) for i in range(1000)]
    pieces = trace_pieces(jobs)
    assert len(list(islice(pieces, 20))) == 20
    text = "".join(trace_pieces(jobs))
    assert text.count("\n") == len(json.loads(text)["traceEvents"]) + 2


def test_what_a_file_is_about_is_kept_in_it() -> None:
    record = json.loads("".join(trace_pieces([], about={"k": 4})))
    assert record["otherData"]["k"] == 4
    assert [event["name"] for event in record["traceEvents"]] == ["process_name"]
