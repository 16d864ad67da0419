"""Which of many ways are worth having: those that no other beats in both respects.

Here both are to be large: tokens a second that one user sees, and that all users get together. A
larger batch gives more of the second and less of the first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    """Tokens a second: `each` of one sequence, `total` of all that decode together."""

    name: str
    each: float
    total: float


def frontier(points: Iterable[Point]) -> list[Point]:
    """Those that no other dominates, by falling `each`; of equal ones the first."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda one: (-one.each, -one.total)):
        if not kept or point.total > kept[-1].total:
            kept.append(point)
    return kept
