"""Estimators that learn in constant time a value: what each is, by its definition."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.estimate.acceptance import (
    FadingMean,
    FadingRate,
    RequestRates,
    RunningMedian,
    add_to_first,
    fit_line,
    nearest_rank,
)

values = st.lists(st.floats(0, 1e6), min_size=1, max_size=40)


def test_a_rate_follows_the_newest_trials() -> None:
    rate = FadingRate(0.98)
    assert rate.mean == 0
    for hit in [0.0] * 500 + [1.0] * 500:
        rate.add(hit)
    assert rate.mean == pytest.approx(1, abs=1e-3)
    assert rate.trials == pytest.approx(1 / (1 - 0.98), abs=1e-3)


def test_a_prior_counts_as_so_many_trials() -> None:
    rate = FadingRate(1.0)
    assert rate.posterior(0.3, 5) == pytest.approx(0.3)
    for hit in (1, 1, 0):
        rate.add(hit)
    assert rate.posterior(0.3, 5) == pytest.approx((0.3 * 5 + 2) / (5 + 3))
    assert rate.mean == pytest.approx(2 / 3)


@given(
    trials=st.lists(
        st.tuples(st.integers(0, 4), st.none() | st.integers(0, 4), st.floats(0, 1)), max_size=30
    )
)
def test_a_trial_of_many_is_one_of_each(trials: list[tuple[int, int | None, float]]) -> None:
    together, apart = [[FadingRate(0.9) for _ in range(4)] for _ in range(2)]
    for num_rates, hit, expected in trials:
        add_to_first(together, num_rates, hit, expected)
        for number in range(num_rates):
            apart[number].add(number == hit, expected)
    assert together == apart


def test_what_a_request_shows_in_one_kind_of_trial_counts_in_others() -> None:
    rates = RequestRates(2, 0.9, weight=4, evenness=2, highest=0.95)
    assert (rates.rate(0, 0.5), rates.rate(1, 0.97)) == (0.5, 0.95)
    rates.add(0, 1, 0.5)
    factor = (2 + 1) / (2 + 0.5)
    assert rates.rate(0, 0.5) == pytest.approx((4 * factor * 0.5 + 1) / (4 + 1))
    assert rates.rate(1, 0.5) == pytest.approx(factor * 0.5)
    rates.add(1, 0, 0.6)
    factor = (2 + 0.9) / (2 + 0.9 * 0.5 + 0.6)
    assert rates.rate(1, 0.5) == pytest.approx(4 * factor * 0.5 / (4 + 1))


def test_the_first_value_of_a_mean_counts_whole() -> None:
    mean = FadingMean(0.25)
    assert mean.value is None
    mean.add(4.0)
    assert mean.value == 4
    mean.add(8.0)
    assert mean.value == 5


@given(values, st.integers(1, 9))
def test_a_running_median_is_that_of_the_newest(values: list[float], size: int) -> None:
    median = RunningMedian(size)
    for count, value in enumerate(values, start=1):
        median.add(value)
        newest = values[max(count - size, 0) : count]
        assert len(median) == len(newest)
        assert median.median == statistics.median(newest)
        assert median.low == statistics.median_low(newest)


@given(values, st.integers(1, 100))
def test_as_many_values_as_asked_lie_at_or_below_a_rank(values: list[float], percent: int) -> None:
    found = nearest_rank(values, percent)
    below = sum(value < found for value in values)
    reached = sum(value <= found for value in values)
    assert 100 * below < percent * len(values) <= 100 * reached


def test_a_line_goes_through_points_on_it_and_weights_count() -> None:
    assert fit_line([(1, 3, 1), (2, 5, 4), (4, 9, 1)]) == pytest.approx((1, 2))
    assert fit_line([(2, 3, 1), (2, 7, 3)]) == (6, 0)
    twice = fit_line([(1, 2, 1), (3, 5, 2), (4, 4, 1)])
    assert twice == pytest.approx(fit_line([(1, 2, 1), (3, 5, 1), (3, 5, 1), (4, 4, 1)]))


def test_neither_start_nor_slope_is_below_nought() -> None:
    assert fit_line([(2, 4, 1), (4, 16, 1)]) == pytest.approx((0, 10 / 3))
    assert fit_line([(2, 0.5, 1), (4, 0.25, 1)]) == pytest.approx((0.375, 0))
