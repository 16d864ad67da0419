"""Draft lengths for a batch against every other choice there is."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.control.goodput import allocated, best_allocation
from outrider.estimate.acceptance import prefix_products

DEPTH = 3
rates = st.lists(st.sampled_from([0, 0.1, 0.3, 0.5, 0.77, 0.9, 1]), max_size=DEPTH)
batches = st.lists(rates.map(prefix_products), min_size=1, max_size=3)
steps = st.lists(st.floats(0, 2), min_size=13, max_size=13)


def rising(steps: list[float], start: float) -> list[float]:
    """Costs that never fall."""
    found = [start]
    for step in steps:
        found.append(found[-1] + step)
    return found


@given(prefixes=batches, target=steps, draft=steps)
def test_no_other_lengths_bring_more(
    prefixes: list[list[float]], target: list[float], draft: list[float]
) -> None:
    rows, passes = rising(target, 1.0), rising(draft, 0.0)

    def seconds(num_rows: int, depth: int, num_drafting: int) -> float:
        assert (depth > 0) == (num_drafting > 0)
        return rows[num_rows] + passes[depth]

    found = best_allocation(prefixes, seconds)
    choices = product(*(range(len(row) + 1) for row in prefixes))
    best = max(allocated(prefixes, choice, seconds).goodput for choice in choices)
    assert found.goodput == pytest.approx(best)
    again = allocated(prefixes, found.depths, seconds)
    assert again.num_tokens == pytest.approx(found.num_tokens)
    assert again.seconds == found.seconds
    assert found.is_plain == (sum(found.depths) == 0)


@given(prefixes=batches, target=steps)
def test_what_brings_nothing_is_not_drafted(
    prefixes: list[list[float]], target: list[float]
) -> None:
    rows = rising(target, 1.0)
    nothing = [[0.0] * len(row) for row in prefixes]
    assert best_allocation(nothing, lambda r, d, n: rows[r]).is_plain
    free = best_allocation(prefixes, lambda r, d, n: 1.0)
    assert free.depths == tuple(sum(kept > 0 for kept in row) for row in prefixes)


def test_rows_go_to_the_request_that_keeps_them() -> None:
    """Eight rows are free, the ninth is not."""
    easy, hard = prefix_products([0.9] * 8), prefix_products([0.2] * 8)
    found = best_allocation([easy, hard], lambda r, d, n: 1.0 if r <= 8 else 10.0)
    assert found.depths == (6, 0)
    assert best_allocation([hard, easy], lambda r, d, n: 1.0 if r <= 8 else 10.0).depths == (0, 6)


def test_a_deep_draft_must_pay_for_the_drafters_passes() -> None:
    """By rows alone the easy request would get all; a pass of the drafter serves all three."""
    easy, fair = prefix_products([0.9] * 4), prefix_products([0.6] * 4)

    def seconds(num_rows: int, depth: int, num_drafting: int) -> float:
        del num_drafting
        return 1.0 + 0.5 * depth + (10.0 if num_rows > 6 else 0.0)

    assert best_allocation([easy, fair, fair], seconds).depths == (1, 1, 1)


def test_how_many_draft_is_told() -> None:
    asked: list[tuple[int, int, int]] = []

    def seconds(num_rows: int, depth: int, num_drafting: int) -> float:
        asked.append((num_rows, depth, num_drafting))
        return 1.0

    best_allocation([[0.9, 0.8], [0.5]], seconds)
    assert asked[0] == (2, 0, 0)
    assert (5, 2, 2) in asked
    assert set(asked) == {(2, 0, 0), (3, 1, 1), (4, 1, 2), (4, 2, 1), (5, 2, 2)}


def test_an_empty_batch_drafts_nothing() -> None:
    assert allocated([], [], lambda r, d, n: 1.0).depths == ()
