"""Covering rows: every pair meets, with far fewer rows than the product."""

from __future__ import annotations

from itertools import combinations
from math import prod

from hypothesis import given
from hypothesis import strategies as st
from matrices.matrix import all_pairs, covering_rows

from checks.effort import examples

sizes = st.lists(st.integers(1, 5), min_size=2, max_size=5)


@examples(30)
@given(sizes=sizes)
def test_every_pair_of_values_meets_in_some_row(sizes: list[int]) -> None:
    factors = {f"f{i}": [str(value) for value in range(size)] for i, size in enumerate(sizes)}
    rows = covering_rows(factors)
    met = {pair for row in rows for pair in combinations(sorted(row.items()), 2)}
    assert met == set(all_pairs(factors))
    assert len(rows) <= prod(sizes)
    assert rows == covering_rows(factors)


def test_many_factors_need_few_rows() -> None:
    factors = {f"f{i}": ["a", "b", "c"] for i in range(8)}
    assert len(covering_rows(factors)) <= 27
