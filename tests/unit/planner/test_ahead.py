"""Drafting ahead and lanes from a calibration, and which fallback is better at which batch."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.effort import examples
from doubles.planned import costs, flat
from outrider_lab.planner.calibration import PLAIN
from outrider_lab.planner.overlap import (
    AheadTimes,
    AheadWays,
    ahead,
    crossover_batch,
    hide_limit,
    lanes,
    outcome_chances,
    predicted_share,
)
from outrider_lab.planner.rounds import DecodeLoad, Rates, RoundForecast, forecast, round_stats

shares = st.floats(0, 1)


def found(beta: float, k: int, step: float, batch: int = 1) -> RoundForecast:
    calibration = flat(costs(step))
    stats = round_stats(Rates((beta,)), k)
    return forecast(calibration, calibration.drafters[0], DecodeLoad(batch), stats, depth=k)


@examples(20)
@given(beta=shares, k=st.integers(1, 10))
def test_outcomes_are_a_stats(beta: float, k: int) -> None:
    chances = outcome_chances(round_stats(Rates((beta,)), k))
    assert math.fsum(chances) == pytest.approx(1)
    assert chances[k] == pytest.approx(beta**k)
    assert chances[0] == pytest.approx(1 - beta)


def test_hits_are_those_of_the_best_fan_out() -> None:
    """algorithms: B = 24, K = 5, acceptance 0.8 and misses 0.4 / F give 0.9048."""
    stats = round_stats(Rates((0.8,)), 5)
    assert predicted_share(stats, AheadWays(fan_out=24)) == pytest.approx(0.9048, abs=5e-5)
    assert predicted_share(stats, AheadWays(p_hit=0.3)) == 0.3
    assert predicted_share(PLAIN, AheadWays(fan_out=4)) == pytest.approx(0.9)


@examples(20)
@given(beta=st.floats(0.1, 0.99), k=st.integers(1, 8), step=st.floats(0.01, 1), b=st.integers(1, 8))
def test_without_a_hit_it_is_no_worse_than_in_turns(
    beta: float, k: int, step: float, b: int
) -> None:
    turns = found(beta, k, step, b)
    got = ahead(costs(step), DecodeLoad(b), turns, AheadWays(p_hit=0.0, contention=0.0))
    if got.fallback == "jit":
        assert got.speed_up == pytest.approx(turns.speed_up)
    else:
        assert got.speed_up == pytest.approx(1.0)
        assert turns.speed_up <= 1 + 1e-9


@examples(20)
@given(beta=st.floats(0.1, 0.99), k=st.integers(1, 8), step=st.floats(0.001, 0.1), hit=shares)
def test_it_gains_at_most_what_it_hides(beta: float, k: int, step: float, hit: float) -> None:
    turns = found(beta, k, step)
    got = ahead(costs(step), DecodeLoad(), turns, AheadWays(p_hit=hit, contention=0.0))
    assert got.hides == ((k + 1) * step <= 1)
    if got.hides:
        most = turns.speed_up * (1 + turns.draft_over_verify)
        assert got.speed_up <= most + 1e-9
        if got.fallback == "jit":
            assert got.speed_up >= turns.speed_up - 1e-9


def test_a_shared_memory_takes_the_gain_away() -> None:
    turns = found(0.9, 4, 0.1)
    apart = ahead(costs(0.1), DecodeLoad(), turns, AheadWays(p_hit=1.0, contention=0.0))
    shared = ahead(costs(0.1), DecodeLoad(), turns, AheadWays(p_hit=1.0, contention=1.0))
    assert apart.speed_up == pytest.approx(turns.stats.tokens)
    # One step more than in turns: over the draft that is being verified.
    assert shared.speed_up == pytest.approx(turns.stats.tokens / 1.5)
    assert shared.speed_up < turns.speed_up


def test_with_no_fallback_hits_come_in_runs() -> None:
    """A dear drafter: after a miss nothing is drafted, and then one token has all branches."""
    turns = found(0.9, 4, 0.25, batch=8)
    ways = AheadWays(fan_out=8, contention=0.0)
    got = ahead(costs(0.25), DecodeLoad(8), turns, ways)
    hit, after_miss = predicted_share(turns.stats, ways), predicted_share(PLAIN, ways)
    assert got.fallback == "none"
    assert got.times.p_hit == pytest.approx(after_miss / (1 - hit + after_miss))
    assert got.times.tokens_miss == 1


@examples(20)
@given(
    hit=st.floats(0.05, 0.98),
    tokens=st.floats(1.2, 8),
    lost=st.floats(0.05, 0.9),
    fallback=st.floats(0.05, 2),
    batch=st.integers(1, 64),
)
def test_the_crossover_is_where_both_fallbacks_are_equal(
    hit: float, tokens: float, lost: float, fallback: float, batch: int
) -> None:
    none_tokens = hit * tokens + (1 - hit) * max(1.0, tokens * lost)
    turn = crossover_batch(hit, tokens, none_tokens, fallback)
    jit = AheadTimes(hit, tokens, tokens, 0.5, fallback, batch).speed
    none = none_tokens
    if batch < turn - 1e-6:
        assert jit >= none - 1e-9
    elif batch > turn + 1e-6:
        assert jit <= none + 1e-9


def test_ends_of_the_crossover() -> None:
    assert crossover_batch(0.9, 4, 4, 1) == 0
    assert crossover_batch(0.9, 4, 1, 1) == math.inf
    assert crossover_batch(1.0, 4, 3.9, 1) == math.inf
    assert crossover_batch(0.9, 4, 3, 0) == math.inf


def test_how_deep_can_be_hidden() -> None:
    """2.54 ms a step beside a verification of 11.5 ms."""
    assert hide_limit(11.5, 2.54) == 4
    assert hide_limit(1.0, 0.0) is None
    # Draft passes in a verification: about 6 of 1B beside 8B, 50 beside 70B.
    assert hide_limit(1.0, 0.1646) == 6
    assert hide_limit(1.0, 0.23 / 12) == 52


@examples(20)
@given(beta=shares, k=st.integers(1, 6), step=st.floats(0.01, 0.5), batch=st.integers(2, 16))
def test_lanes_of_one_device_gain_nothing(beta: float, k: int, step: float, batch: int) -> None:
    calibration = flat(costs(step))
    stats = round_stats(Rates((beta,)), k)
    drafter, load = calibration.drafters[0], DecodeLoad(batch)
    turns = forecast(calibration, drafter, load, stats, depth=k).times.total
    shared = lanes(calibration, drafter, load, stats, contention=1.0)
    apart = lanes(calibration, drafter, load, stats, contention=0.0)
    assert shared >= turns - 1e-9
    assert apart == pytest.approx(2 * max(1.0, k * step))


def test_one_sequence_cannot_be_in_two_lanes() -> None:
    calibration = flat(costs(0.1))
    stats = round_stats(Rates((0.8,)), 4)
    assert lanes(calibration, calibration.drafters[0], DecodeLoad(), stats, contention=0.0) == 1.4
