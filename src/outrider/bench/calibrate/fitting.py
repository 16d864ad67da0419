"""Least squares whose coefficients may not fall below 0, for very few of them.

The best set of coefficients above 0 is found by trying every set, which is exact and quick for the
two or three that a cost has (Lawson and Hanson 1974, chapter 23, search smartly for many).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import combinations

import numpy as np


def nonnegative(
    columns: Sequence[Sequence[float]], values: Sequence[float], weights: Sequence[float]
) -> list[float]:
    """Coefficients c >= 0 that bring sum of c_j columns_j nearest to `values`, by squares, each
    multiplied by its weight; 0 where a column tells nothing."""
    root = np.sqrt(np.asarray(weights, dtype=np.float64))
    rows = np.asarray(columns, dtype=np.float64).T * root[:, None]
    wanted = np.asarray(values, dtype=np.float64) * root
    # Columns of one size, for the numbers that decide what is singular.
    sizes = np.linalg.norm(rows, axis=0)
    rows = rows / np.where(sizes > 0, sizes, 1.0)
    best, found = float(wanted @ wanted), np.zeros(len(columns))
    for count in range(1, len(columns) + 1):
        for chosen in combinations(range(len(columns)), count):
            part = rows[:, chosen]
            some, _, _, _ = np.linalg.lstsq(part, wanted, rcond=1e-9)
            left = wanted - part @ some
            if (some >= 0).all() and left @ left < best * (1 - 1e-12):
                best, found = float(left @ left), np.zeros(len(columns))
                found[list(chosen)] = some
    return [float(c / size) if size > 0 else 0.0 for c, size in zip(found, sizes, strict=True)]


def within_groups(
    groups: Sequence[Hashable], values: Sequence[float], weights: Sequence[float]
) -> list[float]:
    """`values` less the weighted mean of their group: what is left for slopes that all groups
    share, whatever the level of each."""
    means = group_means(groups, values, weights)
    return [value - means[group] for group, value in zip(groups, values, strict=True)]


def group_means(
    groups: Sequence[Hashable], values: Sequence[float], weights: Sequence[float]
) -> dict[Hashable, float]:
    sums: dict[Hashable, tuple[float, float]] = {}
    for group, value, weight in zip(groups, values, weights, strict=True):
        total, mass = sums.get(group, (0.0, 0.0))
        sums[group] = total + weight * value, mass + weight
    return {group: total / mass for group, (total, mass) in sums.items()}
