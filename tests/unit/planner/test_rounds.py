"""What rounds cost and bring: closed forms, batches and where gains end."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.effort import examples
from doubles.planned import costs, flat, sloped
from outrider.estimate.acceptance import expected_tokens
from outrider.estimate.cost import Curve
from outrider_lab.planner.calibration import PLAIN, Calibration, PassCosts, RoundStats
from outrider_lab.planner.rounds import (
    DecodeLoad,
    Rates,
    binomial,
    break_even,
    forecast,
    plain_times,
    round_stats,
    round_times,
)

shares = st.floats(0, 1)
loads = st.builds(DecodeLoad, batch=st.integers(1, 40), context=st.floats(0, 5000))


@examples(20)
@given(load=loads, step=st.floats(0.001, 2), per_row=st.floats(0, 0.1))
def test_no_draft_no_gain(load: DecodeLoad, step: float, per_row: float) -> None:
    calibration = sloped(costs(step), per_row=per_row)
    found = forecast(calibration, calibration.drafters[0], load, PLAIN, depth=0)
    assert found.speed_up == 1
    assert found.times == plain_times(calibration, load)


@examples(20)
@given(beta=shares, k=st.integers(1, 12), step=st.floats(0.001, 2), load=loads)
def test_where_verifying_is_free_it_is_the_usual_formula(
    beta: float, k: int, step: float, load: DecodeLoad
) -> None:
    calibration = flat(costs(step))
    stats = round_stats(Rates((beta,)), k)
    found = forecast(calibration, calibration.drafters[0], load, stats, depth=k)
    assert found.draft_over_plain == pytest.approx(k * step)
    assert found.speed_up == pytest.approx(found.speed_up_if_free)
    assert found.speed_up == pytest.approx(expected_tokens(beta, k) / (1 + k * step))


def test_every_term_of_a_round() -> None:
    rows = Curve(((1.0, 1.0), (100.0, 100.0)))
    calibration = replace(
        flat(replace(costs(0.5, each=0.25), per_context=0.001, per_emitted=0.04)),
        target=PassCosts(rows, per_context=0.01, per_read=0.0001),
        overhead=7.0,
        host=0.5,
        rule=0.125,
    )
    stats = round_stats(Rates((0.5,)), 3)
    found = round_times(calibration, calibration.drafters[0], DecodeLoad(2, 100), stats, depth=3)
    assert found.verify == pytest.approx(8 + 0.01 * 200 + 0.0001 * 800)
    assert found.host == pytest.approx(7 + 2 * 0.5 + 8 * 0.125)
    # E = 1 + 1/2 + 1/4 + 1/8, of each of the two.
    assert found.draft == pytest.approx(3 * 0.75 + 0.001 * 3 * 200 + 0.04 * 2 * 1.875)
    assert found.total == found.draft + found.verify + found.host
    plain = plain_times(calibration, DecodeLoad(2, 100))
    assert (plain.draft, plain.host) == (0, pytest.approx(8.25))
    assert plain.verify == pytest.approx(2 + 2 + 0.02)


def test_both_meanings_of_t_sd_differ_where_verifying_costs_rows() -> None:
    calibration = sloped(costs(0.1), per_row=0.25)
    stats = round_stats(Rates((0.9,)), 4)
    found = forecast(calibration, calibration.drafters[0], DecodeLoad(), stats, depth=4)
    assert found.draft_over_plain == pytest.approx(0.4)
    assert found.draft_over_verify == pytest.approx(0.4 / 2)
    assert found.speed_up == pytest.approx(stats.tokens / 2.4)
    assert found.speed_up_if_free == pytest.approx(stats.tokens / 1.4)


def test_only_those_that_draft_cost_rows() -> None:
    """Two sequences that draft 4 tokens in half of the rounds: 0, 1 or 2 of them at once."""
    calibration = sloped(costs(0.5, each=0.5), per_row=0.1)
    stats = round_stats(Rates((0.5,), offered=(0.5, 1.0)), 4)
    found = round_times(calibration, calibration.drafters[0], DecodeLoad(2), stats, depth=4)
    assert found.draft == pytest.approx(0.5 * 2 + 0.25 * 4)
    assert found.verify == pytest.approx(1.1 + 0.1 * 4)


def test_only_those_that_draft_read_what_was_emitted() -> None:
    """Of two sequences one drafts on the mean; rounds bring 1.6 tokens, drafts or not."""
    free = costs(0.5, each=0.5)
    stats = RoundStats((0.4, 0.2), drafting=0.5, num_drafted=2.0)
    without, found = (
        round_times(flat(one), one, DecodeLoad(2), stats, depth=2)
        for one in (free, replace(free, per_emitted=0.1))
    )
    assert found.draft - without.draft == pytest.approx(0.1 * 1.6)
    assert (found.verify, found.host) == (without.verify, without.host)


# (acceptance, a draft pass in passes of the target): the best K and its speed-up.
BEST = [
    (0.8, 0.02, 11, 3.82),
    (0.8, 0.05, 8, 3.09),
    (0.8, 0.1, 6, 2.47),
    (0.8, 0.17, 4, 2.00),
    (0.9, 0.02, None, 6.37),
    (0.9, 0.05, None, 4.67),
    (0.9, 0.1, None, 3.43),
    (0.9, 0.17, None, 2.60),
    (0.9, 0.1675, 7, 2.62),
]


def longest(
    calibration: Calibration, beta: float, *, most: int, batch: int = 1
) -> tuple[int, float]:
    """The K with the largest speed-up, and that."""
    drafter, rates = calibration.drafters[0], Rates((beta,))

    def gain(k: int) -> float:
        stats = round_stats(rates, k)
        return forecast(calibration, drafter, DecodeLoad(batch), stats, depth=k).speed_up

    k = max(range(most + 1), key=gain)
    return k, gain(k)


@pytest.mark.parametrize(("beta", "share", "best", "speed"), BEST)
def test_known_best_lengths(beta: float, share: float, best: int | None, speed: float) -> None:
    calibration = flat(costs(share))
    k, gain = longest(calibration, beta, most=40)
    assert best in (None, k)
    assert f"{gain:.2f}" == f"{speed:.2f}"


def test_a_full_tile_is_used_to_its_edge() -> None:
    """Up to 8 rows cost one second, the ninth a second more."""
    rows = Curve(((1.0, 1.0), (8.0, 1.0), (9.0, 2.0), (16.0, 2.0)))
    calibration = replace(flat(costs(0.001)), target=PassCosts(rows))
    assert longest(calibration, 0.8, most=15)[0] == 7
    assert longest(calibration, 0.8, most=7, batch=2)[0] == 3


@examples(20)
@given(beta=st.floats(0.3, 0.95), step=st.floats(0.01, 0.2), per_row=st.floats(0.001, 0.2))
def test_gains_end_at_some_batch(beta: float, step: float, per_row: float) -> None:
    calibration = sloped(costs(step), per_row=per_row)
    stats = round_stats(Rates((beta,)), 4)

    def gain(batch: int) -> float:
        return forecast(
            calibration, calibration.drafters[0], DecodeLoad(batch), stats, depth=4
        ).speed_up

    assert all(b <= a + 1e-9 for a, b in pairwise(gain(2**i) for i in range(9)))
    found = break_even(gain, least=1, most=256)
    scanned = next((batch for batch in range(1, 257) if gain(batch) <= 1), None)
    assert found == scanned


def test_break_even_of_what_always_or_never_pays() -> None:
    assert break_even(lambda _: 1.5, least=1, most=100) is None
    assert break_even(lambda _: 0.5, least=0, most=100) == 0
    assert break_even(lambda n: 2 - n / 50, least=0, most=100) == 50


@examples(20)
@given(num=st.integers(1, 40), share=shares)
def test_binomial_counts_are_a_stats(num: int, share: float) -> None:
    chances = binomial(num, share)
    assert math.fsum(chances) == pytest.approx(1)
    assert math.fsum(n * chance for n, chance in enumerate(chances)) == pytest.approx(num * share)
