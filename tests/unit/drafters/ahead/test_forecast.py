"""What is expected of a verdict follows those that came."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.effort import examples
from outrider.plugins.lanes.ahead.fan_out import PRIOR_CURVE, chances
from outrider.plugins.lanes.ahead.forecast import ENOUGH_RANKS, Forecast, Policy


def test_before_any_verdict_the_prior_holds() -> None:
    assert Forecast().chances(3, hit=True) == pytest.approx(chances(0.8, 3))


def test_it_learns_how_many_are_kept_of_hits_and_of_misses() -> None:
    forecast = Forecast()
    for _ in range(2000):
        forecast.observe(3, 3, hit=True)
        forecast.observe(3, 0, hit=False)
    assert forecast.chances(3, hit=True) == pytest.approx((0, 0, 0, 1), abs=0.01)
    assert forecast.chances(3, hit=False)[0] == pytest.approx(1, abs=0.01)
    # Places that were never reached are as likely as before.
    assert forecast.chances(5, hit=True)[3] == pytest.approx(0.2, abs=0.01)


@examples(40)
@given(
    verdicts=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.booleans()), max_size=30),
    policy=st.sampled_from(["optimal", "geometric", "uniform"]),
    budget=st.integers(1, 20),
    depth=st.integers(0, 6),
)
def test_chances_are_a_distribution_and_hits_and_misses_get_equal_sums(
    verdicts: list[tuple[int, int, bool]], policy: Policy, budget: int, depth: int
) -> None:
    forecast = Forecast(policy)
    for drafted, accepted, hit in verdicts:
        forecast.observe(drafted, min(accepted, drafted), hit=hit)
    for hit in (True, False):
        assert math.fsum(forecast.chances(depth, hit=hit)) == pytest.approx(1)
        assert sum(forecast.counts(budget, depth, hit=hit)) == budget


def test_curves_of_the_recovered_and_of_the_bonus_token_are_apart() -> None:
    forecast = Forecast()
    for index in range(ENOUGH_RANKS):
        forecast.observe_rank(index % 7, bonus=True)
        assert forecast.misses.recovered == PRIOR_CURVE
    forecast.observe_rank(None, bonus=True)
    assert forecast.misses.bonus != PRIOR_CURVE
    assert forecast.misses.recovered == PRIOR_CURVE


def test_what_follows_a_whole_draft_is_foreseen_more_often_where_all_is_kept() -> None:
    forecast = Forecast("optimal")
    before = forecast.counts(16, 4, hit=True)
    for _ in range(100):
        forecast.observe(4, 4, hit=True)
    after = forecast.counts(16, 4, hit=True)
    assert after[4] > before[4]
    assert after[0] < before[0]
