"""Likely tokens lose mass to the others, in the distribution that is drawn from and reported."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checks.effort import examples
from outrider.plugins.lanes.ahead.forecast import Saguaro, likeliest

DISTRIBUTION = torch.tensor([0.5, 0.1, 0.1, 0.3], dtype=torch.float64)


def changed(weight: float, count: int, probs_V: torch.Tensor = DISTRIBUTION) -> list[float]:
    probs_NV = probs_V.clone()[None]
    Saguaro(weight, [count])(probs_NV, 0)
    return [float(p) for p in probs_NV[0]]


def test_the_likeliest_keep_a_share_and_the_distribution_sums_to_one() -> None:
    # 0.25 and 0.15 of what was 0.5 and 0.3: divided by 0.6.
    assert changed(0.5, 2) == pytest.approx([0.25 / 0.6, 0.1 / 0.6, 0.1 / 0.6, 0.15 / 0.6])
    assert changed(0.0, 2) == pytest.approx([0, 0.5, 0.5, 0])


def test_exactly_so_many_of_equal_ones_the_first() -> None:
    assert changed(0.0, 3) == pytest.approx([0, 0, 1, 0])
    assert likeliest(torch.tensor([1.0, 2.0, 2.0, 2.0]), 2) == [1, 2]
    assert likeliest(torch.tensor([1.0, 2.0]), 5) == [1, 0]


def test_a_distribution_with_nothing_else_stays() -> None:
    assert changed(0.0, 4) == pytest.approx([0.5, 0.1, 0.1, 0.3])
    sure = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    assert changed(0.0, 1, sure) == [0, 1, 0]


def test_each_place_has_its_own_count() -> None:
    saguaro = Saguaro(0.0, [1, 0])
    for node, wanted in ((0, 0.0), (1, 0.5), (2, 0.5)):
        probs_NV = DISTRIBUTION.clone()[None]
        saguaro(probs_NV, node)
        assert float(probs_NV[0, 0]) == wanted


def test_counts_are_planned_from_the_budget() -> None:
    saguaro = Saguaro.planned(0.5, budget=24, depth=5)
    for node, count in enumerate([4, 4, 4, 3, 3]):
        probs_NV = torch.full((1, 40), 1 / 40, dtype=torch.float64)
        saguaro(probs_NV, node)
        assert int((probs_NV < 1 / 40).sum()) == count


@examples(60)
@given(
    weights=st.lists(st.floats(0, 1), min_size=2, max_size=8).filter(lambda w: sum(w) > 0.01),
    weight=st.floats(0, 0.99),
    count=st.integers(0, 8),
)
def test_it_is_a_distribution_and_keeps_the_order_of_the_others(
    weights: list[float], weight: float, count: int
) -> None:
    probs_V = torch.tensor(weights, dtype=torch.float64)
    probs_V /= probs_V.sum()
    found_V = torch.tensor(changed(weight, count, probs_V), dtype=torch.float64)
    assert float(found_V.sum()) == pytest.approx(1)
    top = likeliest(probs_V, count) if count else []
    rest = [i for i in range(len(weights)) if i not in top]
    assert float(found_V[rest].sum()) >= float(probs_V[rest].sum()) - 1e-9
