"""Arrivals to latencies: shares add up, pauses are gaps, percentiles are numpy's."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.metrics import (
    inter_token_latencies,
    percentile,
    round_latencies,
    token_latencies,
)

# Two tokens after 0.3 s, one 0.1 s later, three 0.6 s after that.
ARRIVALS = (0.3, 0.3, 0.4, 1.0, 1.0, 1.0)

ROUNDS = st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 6)), max_size=20)


def arrivals_of(rounds: list[tuple[int, int]]) -> list[float]:
    """Of rounds of so many milliseconds and tokens."""
    times = accumulate(milliseconds for milliseconds, _ in rounds)
    return [1e-3 * time for time, (_, size) in zip(times, rounds, strict=True) for _ in range(size)]


def test_rounds_are_the_gaps_between_arrivals() -> None:
    assert round_latencies(ARRIVALS) == pytest.approx((0.3, 0.1, 0.6))


def test_a_token_has_an_equal_share_of_its_round() -> None:
    assert token_latencies(ARRIVALS) == pytest.approx((0.15, 0.15, 0.1, 0.2, 0.2, 0.2))


def test_the_first_round_is_not_between_tokens() -> None:
    assert inter_token_latencies(ARRIVALS) == pytest.approx((0.1, 0.2, 0.2, 0.2))


@pytest.mark.parametrize("view", [round_latencies, token_latencies, inter_token_latencies])
def test_no_tokens_have_no_latencies(view: object) -> None:
    assert callable(view)
    assert view(()) == ()


def test_a_single_token_has_the_time_to_it_and_nothing_after() -> None:
    assert token_latencies((0.5,)) == round_latencies((0.5,)) == (0.5,)
    assert inter_token_latencies((0.5,)) == ()


@given(ROUNDS)
def test_there_is_one_latency_a_token_and_they_add_up(rounds: list[tuple[int, int]]) -> None:
    arrivals = arrivals_of(rounds)
    found = token_latencies(arrivals)
    assert len(found) == len(arrivals)
    assert sum(found) == pytest.approx(arrivals[-1] if arrivals else 0)


@given(ROUNDS)
def test_pauses_add_up_to_the_same(rounds: list[tuple[int, int]]) -> None:
    arrivals = arrivals_of(rounds)
    assert len(round_latencies(arrivals)) == len(rounds)
    assert sum(round_latencies(arrivals)) == pytest.approx(sum(token_latencies(arrivals)))


@given(ROUNDS)
def test_plain_decoding_has_one_definition(rounds: list[tuple[int, int]]) -> None:
    """With a token a round, all views agree."""
    arrivals = arrivals_of([(milliseconds, 1) for milliseconds, _ in rounds])
    assert token_latencies(arrivals) == round_latencies(arrivals)
    assert inter_token_latencies(arrivals) == round_latencies(arrivals)[1:]


@given(ROUNDS)
def test_what_follows_the_first_round_is_a_tail(rounds: list[tuple[int, int]]) -> None:
    arrivals = arrivals_of(rounds)
    tail = inter_token_latencies(arrivals)
    assert len(tail) == sum(size for _, size in rounds[1:])
    assert tail == token_latencies(arrivals)[len(arrivals) - len(tail) :]


@pytest.mark.parametrize(("percent", "expected"), [(0, 80), (50, 90), (95, 98), (99, 99.6)])
def test_percentiles_of_the_worked_example(percent: float, expected: float) -> None:
    assert percentile([80, 90, 80, 100, 90], percent) == pytest.approx(expected)


def test_a_percentile_of_nothing_is_nothing() -> None:
    assert percentile((), 95) == 0


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == np.percentile(values, percent)
