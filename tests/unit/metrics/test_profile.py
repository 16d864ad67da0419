"""Profiles: what a seed decides is the same bytes, the rest is measured."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from outrider.core.draft import RoundTrace
from outrider.metrics import MemoryTrace, aggregate, counts, profile, stage_peaks

READ = RoundTrace(
    seq_id=3,
    pass_index=40,
    drafter="model",
    batch_size=2,
    num_target_passes=1,
    num_prompt_tokens=256,
    num_drafted=0,
    num_accepted=0,
    num_emitted=0,
    num_rows_copied=0,
    draft_seconds=0.0,
    verify_seconds=0.5,
    accept_seconds=0.0,
)
FIRST = replace(
    READ,
    pass_index=41,
    num_prompt_tokens=9,
    num_drafted=3,
    num_accepted=3,
    num_emitted=4,
    draft_seconds=0.003,
    verify_seconds=0.25,
    accept_seconds=0.001,
)
SECOND = replace(
    FIRST, pass_index=43, num_prompt_tokens=0, num_accepted=1, num_emitted=2, num_rows_copied=1
)
LAST = replace(SECOND, pass_index=44, num_drafted=1, num_accepted=0, num_emitted=1)
TRACES = [READ, FIRST, SECOND, LAST]
MEMORY = MemoryTrace(load_bytes=1000, pass_bytes=(3000, 2500, 1200, 1300))


def counted(traces: list[RoundTrace] = TRACES) -> dict[str, Any]:
    return counts(traces, k=3)


def profiled(**given: Any) -> dict[str, Any]:
    return profile(TRACES, k=3, **given)


def test_a_profile_has_five_parts() -> None:
    assert list(profiled()) == ["metadata", "counts", "aggregate", "memory", "rounds"]


def test_a_profile_is_plain_json() -> None:
    found = profiled(memory=MEMORY, metadata={"seed": 7})
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["metadata"] == {"seed": 7}


def test_rounds_and_passes_are_counted_apart() -> None:
    found = counted()
    assert (found["num_passes"], found["num_rounds"]) == (4, 3)
    assert (found["num_prompt_tokens"], found["num_emitted"]) == (265, 7)


def test_each_round_is_listed() -> None:
    found = counted()
    assert (found["drafted"], found["accepted"]) == ([3, 3, 1], [3, 1, 0])
    assert found["num_rows_copied"] == 2


def test_acceptance_by_round_and_position() -> None:
    found = counted()
    assert found["acceptance_histogram"] == [1, 1, 0, 1]
    assert found["positions"] == [
        {"num_drafted": 3, "num_accepted": 2, "rate": 2 / 3},
        {"num_drafted": 2, "num_accepted": 1, "rate": 0.5},
        {"num_drafted": 2, "num_accepted": 1, "rate": 0.5},
    ]


def test_acceptance_by_what_was_drafted() -> None:
    assert counted()["by_num_drafted"] == [
        {"num_drafted": 1, "num_rounds": 1, "num_accepted": 0},
        {"num_drafted": 3, "num_rounds": 2, "num_accepted": 4},
    ]


def test_plain_decoding_has_no_positions() -> None:
    plain = [replace(LAST, num_drafted=0)]
    found = counts(plain, k=0)
    assert (found["positions"], found["acceptance_histogram"]) == ([], [])
    assert found["by_num_drafted"] == [{"num_drafted": 0, "num_rounds": 1, "num_accepted": 0}]


def test_counts_do_not_depend_on_time_or_on_earlier_requests() -> None:
    other = [
        replace(
            trace,
            seq_id=9,
            pass_index=trace.pass_index + 100,
            batch_size=5,
            draft_seconds=8.0,
            verify_seconds=9.0,
            accept_seconds=7.0,
        )
        for trace in TRACES
    ]
    assert json.dumps(counted(other)) == json.dumps(counted())


def test_times_have_total_mean_and_deviation() -> None:
    found = aggregate(TRACES)
    assert found["draft_ms"] == {"total": 9, "mean": 2.25, "std": pytest.approx(1.299038)}
    assert found["verify_ms"]["total"] == 1250
    assert found["num_accepted"] == {
        "total": 4,
        "mean": pytest.approx(4 / 3, abs=1e-6),
        "std": pytest.approx(1.247219),
    }


def test_a_pass_that_sequences_share_is_timed_once() -> None:
    mate = replace(SECOND, seq_id=4)
    assert aggregate([SECOND, mate])["verify_ms"]["total"] == 250
    assert aggregate([SECOND, mate])["num_drafted"]["total"] == 6


def test_nothing_at_all_is_zeros() -> None:
    assert set(aggregate([])["verify_ms"].values()) == {0.0}
    assert profile([], k=2)["rounds"] == []


def test_memory_peaks_by_stage() -> None:
    assert stage_peaks(TRACES, MEMORY) == {"load": 1000, "prefill": 3000, "decode": 1300}


def test_a_stage_that_did_not_occur_has_no_peak() -> None:
    assert stage_peaks(TRACES[:1], MemoryTrace(5, (7,)))["decode"] is None


def test_memory_and_traces_go_together() -> None:
    with pytest.raises(ValueError, match="shorter"):
        stage_peaks(TRACES, MemoryTrace(5, (7,)))


def test_memory_that_was_not_watched_is_none() -> None:
    found = profiled()
    assert found["memory"] is None
    assert {part["memory_bytes"] for part in found["rounds"]} == {None}


def test_a_round_tells_its_times_counts_and_memory() -> None:
    assert profiled(memory=MEMORY)["rounds"][2] == {
        "pass": 3,
        "drafter": "model",
        "batch_size": 2,
        "num_prompt_tokens": 0,
        "num_drafted": 3,
        "num_accepted": 1,
        "num_emitted": 2,
        "draft_ms": 3.0,
        "verify_ms": 250.0,
        "accept_ms": 1.0,
        "mask_ms": 0.0,
        "memory_bytes": 1200,
    }
