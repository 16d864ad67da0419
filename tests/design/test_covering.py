"""What stays of a test's combinations: every value, every pair, and little else."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from checks.effort import covering, spread


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_every_combination_of_so_many_values_stays(strength: int) -> None:
    axes = [
        [(name, value) for value in range(size)]
        for name, size in zip("abc", (4, 3, 2), strict=True)
    ]
    rows = list(product(*axes))
    kept = covering(rows, strength)
    met = {values for number in kept for values in combinations(rows[number], strength)}
    assert met == {values for row in rows for values in combinations(row, strength)}
    assert len(kept) == {1: 4, 2: 12, 3: 24}[strength]


def test_one_parameter_keeps_all_its_values() -> None:
    assert covering([[("a", 0)], [("a", 1)]], 2) == {0, 1}


def test_what_is_not_combined_is_not_missed() -> None:
    assert covering([[("a", 0), ("b", 0)], [("a", 1), ("b", 0)]], 2) == {0, 1}
    assert covering([], 1) == set()


def test_a_sample_is_spread_over_the_rows() -> None:
    assert spread(9, 3) == {0, 4, 8}
    assert spread(31, 1) == {0}
    assert spread(3, 8) == {0, 1, 2}
    assert all(len(spread(rows, 5)) == min(rows, 5) for rows in range(1, 60))
