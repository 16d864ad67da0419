"""How many examples a property gets, and which rows of many parameters stand for the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import combinations

from hypothesis import settings


def examples(percent: int) -> settings:
    """Of 50 examples in the gate, where a property has 30 otherwise; a profile has as many more."""
    profile = settings()
    return settings(profile, max_examples=max(1, profile.max_examples * 5 * percent // 300))


def covering(rows: Sequence[Sequence[tuple[str, Hashable]]], strength: int) -> set[int]:
    """Numbers of rows that have every combination of `strength` values that any row has.

    Greedy: the row with most that is new, among equals that of the values used least.
    """
    combined = [set(combinations(row, min(strength, len(row)))) for row in rows]
    missing = {values for row in combined for values in row}
    used: Counter[tuple[str, Hashable]] = Counter()
    kept: set[int] = set()
    while missing:
        best = max(
            range(len(rows)),
            key=lambda i: (len(combined[i] & missing), -sum(used[value] for value in rows[i])),
        )
        kept.add(best)
        missing -= combined[best]
        used.update(rows[best])
    return kept


def spread(num_rows: int, number: int) -> set[int]:
    """`number` of the rows, evenly spread, the first and the last among them."""
    if number >= num_rows:
        return set(range(num_rows))
    return {row * (num_rows - 1) // max(number - 1, 1) for row in range(number)}
