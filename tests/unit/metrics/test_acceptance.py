"""Acceptance by round and position, and the figures that load generators check."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.draft import RoundTrace
from outrider.metrics import (
    SpecMetrics,
    acceptance_histogram,
    position_counts,
    spec_metrics,
    summarise,
)

ROUND = RoundTrace(
    seq_id=0,
    pass_index=0,
    drafter="ngram",
    batch_size=1,
    num_target_passes=1,
    num_prompt_tokens=0,
    num_drafted=3,
    num_accepted=2,
    num_emitted=3,
    num_rows_copied=0,
    draft_seconds=0.0,
    verify_seconds=0.0,
    accept_seconds=0.0,
)


def rounds(*drafted_and_kept: tuple[int, int]) -> list[RoundTrace]:
    return [
        replace(
            ROUND,
            pass_index=i,
            num_drafted=drafted,
            num_accepted=accepted,
            num_emitted=accepted + 1,
        )
        for i, (drafted, accepted) in enumerate(drafted_and_kept)
    ]


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, list[RoundTrace]]:
    """A K, and rounds that drafted and accepted within it."""
    k = draw(st.integers(1, 6))
    drafted = draw(st.lists(st.integers(0, k), max_size=20))
    return k, rounds(*((number, draw(st.integers(0, number))) for number in drafted))


def measured(k: int, traces: list[RoundTrace], *, adaptive: bool = False) -> SpecMetrics:
    stats = summarise(traces, drafter="ngram", k=k, total_seconds=1.0)
    return spec_metrics(
        stats.acceptance_histogram, num_drafted=stats.num_drafted, k=None if adaptive else k
    )


def test_the_histogram_counts_rounds_by_what_they_kept() -> None:
    assert acceptance_histogram(rounds((3, 0), (3, 2), (2, 2), (3, 3)), 3) == (1, 0, 2, 1)


def test_the_histogram_has_a_place_for_every_length() -> None:
    assert acceptance_histogram([], 4) == (0, 0, 0, 0, 0)


def test_a_round_without_a_draft_refused_nothing() -> None:
    assert acceptance_histogram(rounds((0, 0), (1, 0)), 1) == (1, 0)


def test_plain_decoding_has_no_histogram() -> None:
    assert acceptance_histogram(rounds((0, 0), (0, 0)), 0) == ()


def test_positions_count_what_was_proposed_and_kept() -> None:
    assert position_counts(rounds((3, 0), (3, 2), (1, 1)), 3) == [(3, 2), (2, 1), (2, 0)]


def test_positions_of_a_tree_end_at_its_depth() -> None:
    assert position_counts(rounds((7, 2)), 3) == [(1, 1), (1, 1), (1, 0)]


def test_a_prompt_chunk_is_no_round() -> None:
    chunk = replace(ROUND, num_drafted=0, num_accepted=0, num_emitted=0, num_prompt_tokens=8)
    assert acceptance_histogram([chunk], 2) == (0, 0, 0)
    assert position_counts([chunk], 2) == [(0, 0), (0, 0)]


def test_the_published_example() -> None:
    """vLLM's own: 90 steps of two draft tokens."""
    found = spec_metrics([39, 21, 30], num_drafted=180, k=2)
    assert found == {
        "mean_acceptance_length": 1.9,
        "draft_acceptance_rate": 0.45,
        "acceptance_histogram": [39, 21, 30],
        "num_spec_steps": 90,
        "num_accepted_draft_tokens": 81,
        "num_draft_tokens": 180,
        "num_spec_tokens": 2,
    }


def test_an_adaptive_length_is_not_told() -> None:
    assert "num_spec_tokens" not in measured(3, rounds((3, 1)), adaptive=True)


def test_nothing_drafted_divides_by_nothing() -> None:
    found = measured(2, [])
    assert (found["mean_acceptance_length"], found["draft_acceptance_rate"]) == (1, 0)


@given(runs())
def test_the_histogram_adds_up_to_the_steps(run: tuple[int, list[RoundTrace]]) -> None:
    k, traces = run
    found = measured(k, traces)
    assert sum(found["acceptance_histogram"]) == found["num_spec_steps"]
    assert found["num_spec_steps"] == sum(trace.num_drafted > 0 for trace in traces)
    assert len(found["acceptance_histogram"]) == found.get("num_spec_tokens", 0) + 1


@given(runs())
def test_the_weighted_histogram_adds_up_to_the_accepted(run: tuple[int, list[RoundTrace]]) -> None:
    k, traces = run
    found = measured(k, traces)
    weighted = sum(j * count for j, count in enumerate(found["acceptance_histogram"]))
    assert weighted == found["num_accepted_draft_tokens"]
    assert weighted == sum(trace.num_accepted for trace in traces)


@given(runs())
def test_the_mean_is_one_more_than_accepted_a_step(run: tuple[int, list[RoundTrace]]) -> None:
    k, traces = run
    found = measured(k, traces)
    if found["num_spec_steps"]:
        share = found["num_accepted_draft_tokens"] / found["num_spec_steps"]
        assert found["mean_acceptance_length"] == pytest.approx(1 + share)
    assert found["num_accepted_draft_tokens"] <= found["num_draft_tokens"]


@given(runs())
def test_emitted_is_accepted_and_one_a_round(run: tuple[int, list[RoundTrace]]) -> None:
    k, traces = run
    found = measured(k, traces)
    num_plain = sum(trace.num_drafted == 0 for trace in traces)
    emitted = found["num_accepted_draft_tokens"] + found["num_spec_steps"] + num_plain
    assert emitted == sum(trace.num_emitted for trace in traces)


@given(runs())
def test_positions_add_up_to_the_totals(run: tuple[int, list[RoundTrace]]) -> None:
    k, traces = run
    found = position_counts(traces, k)
    assert sum(drafted for drafted, _ in found) == sum(trace.num_drafted for trace in traces)
    assert sum(kept for _, kept in found) == sum(trace.num_accepted for trace in traces)
    assert all(kept <= drafted for drafted, kept in found)
