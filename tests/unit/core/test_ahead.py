"""Theorem 7: the published table, its ends, batches, shared memory, and hits that come in runs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.estimate.acceptance import expected_tokens
from outrider_lab.planner.overlap import AheadTimes, steady_hits

# Drafting K tokens in passes of the target, by K: 1B for 8B and 1B for 70B.
DRAFT_TIMES = {
    "8B/1B": {2: 0.36, 4: 0.69, 6: 1.02, 8: 1.35, 10: 1.67, 12: 2.01},
    "70B/1B": {2: 0.04, 4: 0.08, 6: 0.12, 8: 0.15, 10: 0.19, 12: 0.23},
}
HITS = (0, 0.5, 0.7, 0.9, 1)
# S over plain decoding at acceptance 0.9, by K and share of hits.
SPEEDS = {
    "8B/1B": {
        2: (1.99, 2.30, 2.45, 2.62, 2.71),
        4: (2.42, 3.04, 3.39, 3.83, 4.10),
        6: (2.58, 3.43, 3.95, 4.66, 5.11),
        8: (2.61, 3.31, 3.71, 4.22, 4.54),
        10: (2.57, 3.16, 3.48, 3.88, 4.11),
        12: (2.48, 2.97, 3.23, 3.53, 3.71),
    },
    "70B/1B": {
        2: (2.61, 2.66, 2.68, 2.70, 2.71),
        4: (3.79, 3.94, 4.00, 4.06, 4.10),
        6: (4.66, 4.92, 5.04, 5.16, 5.22),
        8: (5.33, 5.70, 5.86, 6.04, 6.13),
        10: (5.77, 6.27, 6.49, 6.73, 6.86),
        12: (6.06, 6.69, 6.98, 7.29, 7.46),
    },
}
shares = st.floats(0, 1)
times = st.builds(
    AheadTimes,
    p_hit=shares,
    tokens_hit=st.floats(1, 8),
    tokens_miss=st.floats(1, 8),
    ahead=st.floats(0, 3),
    fallback=st.floats(0, 3),
    batch=st.floats(1, 32),
    sync=shares,
    contention=shares,
)


@pytest.mark.parametrize("pair", SPEEDS)
def test_the_published_predictions_to_the_digit(pair: str) -> None:
    for k, speeds in SPEEDS[pair].items():
        tokens, taken = expected_tokens(0.9, k), DRAFT_TIMES[pair][k]
        found = [AheadTimes(p, tokens, tokens, taken, taken).speed for p in HITS]
        assert [f"{speed:.2f}" for speed in found] == [f"{speed:.2f}" for speed in speeds]


@given(one=times)
def test_a_prediction_lies_between_missing_and_hitting_always(one: AheadTimes) -> None:
    lost = one.contention * min(1, one.ahead) + one.sync
    slow, fast = sorted((1 + one.fallback + lost, max(1, one.ahead) + lost))
    assert slow - 1e-9 <= one.round_time <= fast + 1e-9
    least, most = sorted((one.tokens_hit, one.tokens_miss))
    assert least - 1e-9 <= one.tokens <= most + 1e-9


@given(one=times)
def test_a_batch_waits_for_its_slowest_row(one: AheadTimes) -> None:
    if max(1, one.ahead) <= 1 + one.fallback:
        assert one.round_time >= replace(one, batch=1).round_time - 1e-9


@given(one=times, more=shares)
def test_what_two_lanes_cost_each_other_never_helps(one: AheadTimes, more: float) -> None:
    worse = replace(one, contention=one.contention + more * (1 - one.contention))
    assert worse.speed <= one.speed + 1e-9


@given(tokens=st.floats(1, 8), taken=st.floats(0, 3), batch=st.floats(1, 32))
def test_without_a_hit_it_is_drafting_in_turns(tokens: float, taken: float, batch: float) -> None:
    ahead = AheadTimes(0, tokens, tokens, taken, taken, batch)
    assert ahead.speed == pytest.approx(tokens / (1 + taken))


@given(tokens=st.floats(1, 8), taken=shares)
def test_it_never_wins_more_than_the_draft_time_that_it_hides(tokens: float, taken: float) -> None:
    """Corollary 9, with all verdicts foreseen and equal drafts."""
    gain = AheadTimes(1, tokens, tokens, taken, taken).speed / (tokens / (1 + taken))
    assert gain == pytest.approx(1 + taken)


@pytest.mark.parametrize(("b", "share"), [(1, 0.9), (2, 0.81), (4, 0.66), (8, 0.43), (16, 0.19)])
def test_all_rows_of_a_batch_hit_seldom(b: int, share: float) -> None:
    round_time = AheadTimes(0.9, 1, 1, 0, 1, b).round_time
    assert round(2 - round_time, 2) == share


@pytest.mark.parametrize(("after_hit", "after_miss"), [(0.9, 0.6), (0.5, 0.5), (0.2, 0.95)])
def test_runs_of_hits_that_are_played_out(after_hit: float, after_miss: float) -> None:
    coins, hit, hits = random.Random(0), True, 0
    for _ in range(20_000):
        hit = coins.random() < (after_hit if hit else after_miss)
        hits += hit
    assert hits / 20_000 == pytest.approx(steady_hits(after_hit, after_miss), abs=0.015)


def test_hits_that_never_end() -> None:
    assert steady_hits(1, 0) == 1
    assert steady_hits(0.7, 0.7) == pytest.approx(0.7)
