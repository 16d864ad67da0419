"""Few rows that still try every value of every factor together with every value of every other.

Most faults show when two settings meet; a covering array of strength two meets all pairs in some
tens of rows where the full product has thousands. Rows are chosen greedily: each is the best of
some random rows that begin with a pair not yet covered. The same factors give the same rows.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations

Factors = Mapping[str, Sequence[str]]
Row = dict[str, str]
_Pair = tuple[tuple[str, str], tuple[str, str]]
_CANDIDATES = 40


def covering_rows(factors: Factors) -> list[Row]:
    """Rows that cover all pairs of `factors` (at least two of them)."""
    rng = random.Random(0)
    missing = set(all_pairs(factors))
    rows: list[Row] = []
    while missing:
        start = min(missing)
        candidates = [_fill(dict(start), factors, missing, rng) for _ in range(_CANDIDATES)]
        best = max(candidates, key=lambda row: len(_covered(row) & missing))
        missing -= _covered(best)
        rows.append({name: best[name] for name in factors})
    return rows


def all_pairs(factors: Factors) -> list[_Pair]:
    """Every pair of (factor, value) entries of two different factors, in a fixed order."""
    return [
        ((first, a), (second, b))
        for first, second in combinations(sorted(factors), 2)
        for a in factors[first]
        for b in factors[second]
    ]


def _fill(row: Row, factors: Factors, missing: set[_Pair], rng: random.Random) -> Row:
    """Add the other factors in random order, each with the value that covers most."""
    others = [name for name in factors if name not in row]
    rng.shuffle(others)
    for name in others:
        values = list(factors[name])
        rng.shuffle(values)
        row[name] = max(values, key=lambda value: len(_covered({**row, name: value}) & missing))
    return row


def _covered(row: Row) -> set[_Pair]:
    return set(combinations(sorted(row.items()), 2))
