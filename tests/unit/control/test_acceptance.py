"""Beliefs about acceptance: what they come to, from how little, and when they change."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.estimate.acceptance import FIRST_RATE, MOST_SEQUENCES, Acceptance

K = 4
Rates = tuple[float, ...]


def play(beliefs: Acceptance, seq_id: int, rates: Rates, num_rounds: int, seed: int = 0) -> None:
    chance = random.Random(seed)
    for _ in range(num_rounds):
        accepted = 0
        while accepted < len(rates) and chance.random() < rates[accepted]:
            accepted += 1
        beliefs.observe(seq_id, len(rates), accepted)


@given(
    rounds=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(0, 9)), max_size=60
    ),
    k=st.integers(0, 6),
)
def test_rates_are_probabilities_whatever_is_seen(
    rounds: list[tuple[int, int, int]], k: int
) -> None:
    beliefs = Acceptance(k)
    for seq_id, drafted, accepted in rounds:
        beliefs.observe(seq_id, drafted, min(accepted, drafted))
    for seq_id in range(4):
        assert len(beliefs.rates(seq_id)) == k
        assert all(0 <= rate <= 1 for rate in beliefs.rates(seq_id))
        kept = beliefs.prefixes(seq_id)
        assert kept == sorted(kept, reverse=True)


def test_before_anything_was_judged() -> None:
    rates = Acceptance(K).rates(0)
    assert rates[0] == pytest.approx(FIRST_RATE)
    assert rates == sorted(rates)  # who came far is likely to be easy


@pytest.mark.parametrize(
    "rates", [(0.9,) * K, (0.2,) * K, (0.9, 0.7, 0.5, 0.3), (0.3, 0.6, 0.9, 1)]
)
def test_it_comes_to_the_rate_of_each_place(rates: Rates) -> None:
    beliefs = Acceptance(K)
    play(beliefs, 0, rates, 2000)
    for place, (found, wanted) in enumerate(zip(beliefs.rates(0), rates, strict=True)):
        num_judged = math.prod(rates[:place]) * 48
        if num_judged > 10:
            assert found == pytest.approx(wanted, abs=0.13)
    assert beliefs.prefixes(0)[-1] == pytest.approx(math.prod(rates), abs=0.13)


def test_requests_that_differ_are_told_apart_within_a_few_rounds() -> None:
    beliefs = Acceptance(K)
    for index in range(12):
        play(beliefs, 0, (0.95,) * K, 1, seed=index)
        play(beliefs, 1, (0.2,) * K, 1, seed=100 + index)
    assert beliefs.rates(0)[0] > 0.8
    assert beliefs.rates(1)[0] < 0.45


def test_a_new_request_starts_from_what_the_others_show() -> None:
    beliefs = Acceptance(K)
    for seq_id in range(20):
        play(beliefs, seq_id, (0.3,) * K, 20, seed=seq_id)
    assert not beliefs.knows(99)
    assert beliefs.knows(3)
    assert beliefs.rates(99)[0] == pytest.approx(0.3, abs=0.1)


def test_a_hard_request_is_known_after_two_refused_drafts() -> None:
    """And the next one after its first, for hard requests come together."""
    beliefs = Acceptance(K)
    for seq_id in range(4):
        play(beliefs, seq_id, (0.9,) * K, 20, seed=seq_id)
    easy = beliefs.rates(99)[0]
    beliefs.observe(8, K, 0)
    beliefs.observe(8, K, 0)
    assert easy > 0.75
    assert beliefs.rates(8)[0] < 0.4 < easy - 0.2 < beliefs.rates(99)[0]
    beliefs.observe(9, K, 0)
    assert beliefs.rates(9)[0] < beliefs.rates(8)[0] + 0.2
    # One token that is accepted shows that a request is not hard.
    beliefs.observe(9, K, K)
    assert beliefs.rates(9)[0] > 0.6


def test_deep_places_of_a_mixture_are_not_those_of_its_hard_requests() -> None:
    """Only the easy one is ever judged at place four; the hard one's is none the better for it."""
    beliefs = Acceptance(K)
    for index in range(300):
        play(beliefs, 0, (0.95,) * K, 1, seed=index)
        play(beliefs, 1, (0.3,) * K, 1, seed=1000 + index)
    assert beliefs.rates(0)[3] > 0.85
    assert beliefs.rates(1)[3] < 0.55


def test_places_that_were_not_judged_are_not_counted() -> None:
    """Refused at once, again and again, says nothing of later places but that the text is hard."""
    beliefs, other = Acceptance(K), Acceptance(K)
    for _ in range(50):
        beliefs.observe(0, K, 0)
        other.observe(0, 1, 0)
    assert beliefs.rates(0) == other.rates(0)


def test_a_text_that_turns_is_followed() -> None:
    beliefs = Acceptance(K)
    play(beliefs, 0, (0.95,) * K, 500)
    play(beliefs, 0, (0.1,) * K, 60)
    assert beliefs.rates(0)[0] < 0.35
    play(beliefs, 0, (0.95,) * K, 150)
    assert beliefs.rates(0)[0] > 0.8


def test_who_was_found_hard_is_thought_ordinary_again_some_time() -> None:
    beliefs = Acceptance(K)
    for index in range(100):
        play(beliefs, 0, (0.9,) * K, 1, seed=index)
        play(beliefs, 1, (0.1,) * K, 1, seed=index)
    before = beliefs.rates(1)[0]
    for _ in range(400):
        play(beliefs, 0, (0.9,) * K, 1)
        beliefs.observe(1, 0, 0)
    assert beliefs.rates(1)[0] > before + 0.2


def test_rounds_without_drafts_teach_nothing_new() -> None:
    beliefs = Acceptance(K)
    beliefs.observe(0, 0, 0)
    assert not beliefs.knows(0)
    assert beliefs.rates(0) == Acceptance(K).rates(0)


def test_running_sequences_are_never_forgotten() -> None:
    beliefs = Acceptance(K)
    for other in range(1, 2 * MOST_SEQUENCES):
        beliefs.observe(0, K, K)
        beliefs.observe(other, K, 0)
    assert beliefs.knows(0)
    assert not beliefs.knows(1)
