"""The maths of fan-out: Theorem 12, whole counts that no others beat, and curves from ranks."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.effort import examples
from outrider.plugins.lanes.ahead.fan_out import (
    PRIOR_CURVE,
    MissCurve,
    Misses,
    calibrate,
    chances,
    expected_hit_rate,
    geometric,
    optimal,
    uniform,
    whole,
)


def same(power: float) -> Misses:
    return Misses(MissCurve(0.4, power), MissCurve(0.4, power))


# (budget, K, alpha, r): the best whole counts, their hit rate, and that of equal real counts.
FIXTURES = [
    (24, 5, 0.8, 1.0, [4, 4, 4, 3, 3, 6], 0.9048, 0.9000),
    (24, 7, 0.8, 1.0, [4, 3, 3, 3, 3, 2, 2, 4], 0.8725, 0.8667),
    (24, 7, 0.8, 0.5, [4, 4, 3, 3, 2, 2, 2, 4], 0.7763, 0.7691),
    (16, 3, 0.7, 1.0, [4, 4, 3, 5], 0.9020, 0.9000),
    (32, 4, 0.9, 1.0, [5, 5, 5, 4, 13], 0.9508, 0.9375),
]


@pytest.mark.parametrize(
    ("budget", "k", "alpha", "power", "counts", "rate", "equal_rate"), FIXTURES
)
def test_known_optima(
    budget: int,
    k: int,
    alpha: float,
    power: float,
    counts: list[int],
    rate: float,
    equal_rate: float,
) -> None:
    likely = chances(alpha, k)
    assert optimal(budget, likely, same(power)) == counts
    assert expected_hit_rate(counts, likely, same(power)) == pytest.approx(rate, abs=5e-5)
    equal = 1 - 0.4 * (budget / (k + 1)) ** -power
    assert equal == pytest.approx(equal_rate, abs=5e-5)


def test_the_closed_form() -> None:
    found = geometric(24, chances(0.8, 5), 1.0)
    assert found == pytest.approx([4.503, 4.027, 3.602, 3.222, 2.882, 5.764], abs=5e-4)
    assert whole(found) == [4, 4, 4, 3, 3, 6]


@examples(50)
@given(alpha=st.floats(0.05, 0.99), power=st.floats(0.1, 3), k=st.integers(1, 12))
def test_the_closed_form_is_theorem_12(alpha: float, power: float, k: int) -> None:
    found = geometric(24, chances(alpha, k), power)
    first = found[0]
    wanted = [first * alpha ** (n / (1 + power)) for n in range(k)]
    wanted.append(first * alpha ** (k / (1 + power)) * (1 - alpha) ** (-1 / (1 + power)))
    assert found == pytest.approx(wanted)
    assert math.fsum(found) == pytest.approx(24)


def test_all_goes_to_the_bonus_where_all_is_accepted() -> None:
    assert geometric(6, chances(1.0, 3), 1.0) == [0, 0, 0, 6]
    assert optimal(6, chances(1.0, 3), Misses()) == [0, 0, 0, 6]


def test_equal_shares() -> None:
    assert uniform(7, 3) == [3, 2, 2]
    assert uniform(2, 4) == [1, 1, 0, 0]


@examples(60)
@given(
    likely=st.lists(st.floats(0.01, 1), min_size=1, max_size=4),
    budget=st.integers(0, 7),
    power=st.floats(0.1, 2),
    share=st.floats(0.05, 1),
)
def test_no_other_whole_counts_are_better(
    likely: list[float], budget: int, power: float, share: float
) -> None:
    scale = share / (2 - 2**-power)
    misses = Misses(MissCurve(scale, power), MissCurve(scale / 2, power))
    found = optimal(budget, likely, misses)
    assert sum(found) == budget
    every = itertools.product(range(budget + 1), repeat=len(likely))
    best = max(
        expected_hit_rate(counts, likely, misses) for counts in every if sum(counts) == budget
    )
    assert expected_hit_rate(found, likely, misses) == pytest.approx(best)


def test_a_list_whose_first_is_never_right_is_still_opened() -> None:
    sure_to_miss_once = Misses(MissCurve(1.0, 1.0), MissCurve(1.0, 1.0))
    assert optimal(4, (0.5, 0.5), sure_to_miss_once) == [2, 2]


@examples(50)
@given(counts=st.lists(st.floats(0, 9), min_size=1, max_size=6))
def test_rounding_keeps_the_sum(counts: list[float]) -> None:
    total = math.ceil(math.fsum(counts))
    counts.append(total - math.fsum(counts))
    found = whole(counts)
    assert sum(found) == total
    assert all(abs(a - b) < 1 + 1e-9 for a, b in zip(found, counts, strict=True))


@pytest.mark.parametrize(("scale", "power"), [(0.4, 1.0), (0.7, 0.5), (1.0, 1.5)])
def test_a_curve_is_found_again(scale: float, power: float) -> None:
    total = 10**9
    curve = MissCurve(scale, power)
    missed = [total, *(round(total * curve(count)) for count in range(1, 21))]
    ranks = [a - b for a, b in itertools.pairwise(missed)]
    found = calibrate([*ranks, missed[-1]], PRIOR_CURVE)
    assert (found.scale, found.power) == pytest.approx((scale, power), rel=1e-3)


def test_too_few_ranks_say_nothing() -> None:
    for ranks in ([0, 0, 0], [5, 0, 0], [0, 0, 9], [3, 0, 4]):
        assert calibrate(ranks, PRIOR_CURVE) == PRIOR_CURVE


def test_chances_are_a_distribution() -> None:
    assert math.fsum(chances(0.8, 6)) == pytest.approx(1)
    assert chances(0.8, 0) == (1.0,)
