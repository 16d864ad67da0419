"""Trust follows what the text does, of each kind of context by itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.suffix import SharedTrust, Trust, bucket


def test_contexts_are_told_apart_by_length_and_share() -> None:
    lengths = [bucket(length, 1, 1) for length in (1, 2, 3, 4, 7, 8, 15, 16, 1000)]
    assert lengths[0] < lengths[1] == lengths[2] < lengths[3] == lengths[4] < lengths[5]
    assert lengths[5] == lengths[6] < lengths[7] == lengths[8]
    shares = [bucket(2, count, total) for count, total in ((1, 1), (1, 3), (1, 2), (7, 8), (2, 2))]
    assert len(set(shares)) == 4
    assert shares[3] == shares[4]


def test_longer_runs_are_trusted_more_before_anything_is_known() -> None:
    trust = Trust(SharedTrust())
    rates = [trust.rate(bucket(length, 1, 1)) for length in (1, 2, 4, 8, 16)]
    assert rates == sorted(rates)
    assert 0 < rates[0] < rates[-1] < 1


@pytest.mark.parametrize("right", [True, False])
def test_it_comes_to_what_is_seen(right: bool) -> None:
    trust = Trust(SharedTrust())
    place, other = bucket(3, 1, 1), bucket(9, 1, 1)
    before = trust.rate(other)
    for _ in range(60):
        trust.learn(place, right=right)
    assert abs(trust.rate(place) - right) < 0.06
    # A request that is easier or harder than others is so in every kind of context.
    assert (trust.rate(other) > before) == right


def test_what_one_request_shows_counts_less_for_another() -> None:
    shared = SharedTrust()
    first, second = Trust(shared), Trust(shared)
    place = bucket(2, 1, 1)
    for _ in range(5):
        first.learn(place, right=False)
    assert first.rate(place) < second.rate(place) < Trust(SharedTrust()).rate(place)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9), st.booleans()), max_size=60))
def test_rates_are_probabilities(trials: list[tuple[int, int, bool]]) -> None:
    trust = Trust(SharedTrust())
    for length, count, right in trials:
        trust.learn(bucket(length, count, count + 1), right=right)
        assert 0 < trust.rate(bucket(length, count, count + 1)) < 1
