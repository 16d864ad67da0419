"""The closed forms against published tables and against rounds that are played out."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.estimate.acceptance import (
    beta_rates,
    expected_tokens,
    measured_speed_up,
    prefix_products,
)
from outrider_lab.planner.rounds import acceptance_rate, estimated_beta, expected_by_place, speed_up

NUM_ROUNDS = 20_000
shares = st.floats(0, 1)


def played(beta: float, k: int, seed: int) -> list[int]:
    """Accepted tokens of rounds: each token is a coin, and the first tails ends the round."""
    coins = random.Random(seed)
    return [next((i for i in range(k) if coins.random() >= beta), k) for _ in range(NUM_ROUNDS)]


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("k", [1, 4, 8])
def test_rounds_that_are_played_out_emit_what_is_expected(beta: float, k: int) -> None:
    accepted = played(beta, k, seed=k)
    mean = sum(accepted) / NUM_ROUNDS
    spread = math.sqrt(sum((n - mean) ** 2 for n in accepted) / NUM_ROUNDS)
    margin = 4 * spread / math.sqrt(NUM_ROUNDS) + 1e-12
    assert abs(mean + 1 - expected_tokens(beta, k)) <= margin
    assert abs(mean / k - acceptance_rate(beta, k)) <= margin / k
    num_refused = sum(n < k for n in accepted)
    found = estimated_beta(sum(accepted), num_refused)
    judged = sum(accepted) + num_refused
    assert found is not None
    assert abs(found - beta) <= 4 * math.sqrt(beta * (1 - beta) / judged) + 1e-12


@given(beta=shares, k=st.integers(0, 64))
def test_the_sum_is_the_quotient(beta: float, k: int) -> None:
    found = expected_tokens(beta, k)
    assert 1 <= found <= k + 1
    if beta < 0.999:
        assert found == pytest.approx((1 - beta ** (k + 1)) / (1 - beta))
    if k:
        assert acceptance_rate(beta, k) <= beta + 1e-12


@given(beta=shares, draft=st.floats(0, 10), plain=st.floats(0.1, 10), k=st.integers(0, 16))
def test_both_forms_agree_where_verifying_costs_a_plain_pass(
    beta: float, draft: float, plain: float, k: int
) -> None:
    tokens = expected_tokens(beta, k)
    found = measured_speed_up(tokens, plain=plain, draft=draft * plain, verify=plain)
    assert found == pytest.approx(speed_up(tokens, draft))


def test_beta_of_nothing_is_unknown() -> None:
    assert estimated_beta(0, 0) is None
    assert estimated_beta(3, 1) == 0.75


@given(rates=st.lists(shares, max_size=12))
def test_rates_of_places_multiply(rates: list[float]) -> None:
    kept = prefix_products(rates)
    assert all(b <= a for a, b in pairwise([1.0, *kept]))
    assert expected_by_place(rates) == pytest.approx(
        1 + sum(math.prod(rates[: place + 1]) for place in range(len(rates)))
    )


@given(beta=shares, k=st.integers(0, 20))
def test_equal_rates_give_the_usual_sum(beta: float, k: int) -> None:
    assert expected_by_place([beta] * k) == pytest.approx(expected_tokens(beta, k))


@pytest.mark.parametrize(("u", "v"), [(1.0, 1.0), (5.6, 2.4), (0.5, 3.0)])
def test_a_beta_that_differs_between_requests(u: float, v: float) -> None:
    """Against betas that are drawn; and the mean beta alone promises less."""
    chance = random.Random(0)
    betas = [chance.betavariate(u, v) for _ in range(NUM_ROUNDS)]
    drawn = sum(expected_tokens(beta, 6) for beta in betas) / NUM_ROUNDS
    found = expected_by_place(beta_rates(u, v, 6))
    assert found == pytest.approx(drawn, rel=0.02)
    assert found > expected_tokens(u / (u + v), 6)


def test_many_judgements_leave_no_doubt_of_beta() -> None:
    assert beta_rates(7e9, 3e9, 5) == pytest.approx([0.7] * 5)
