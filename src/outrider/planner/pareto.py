"""Which of many ways are worth having: those that no other beats in both respects.

Here both are to be large: tokens a second that one user sees, and that all users get together. A
larger batch gives more of the second and less of the first. The hypervolume, the area that points
dominate above a reference, is one number for a whole frontier (Zitzler, Thiele 1998).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


def hypervolume(points: Sequence[Point], *, each: float = 0.0, total: float = 0.0) -> float:
    """The area between the frontier of `points` and the reference (each, total)."""
    area, low = 0.0, total
    for point in frontier(points):
        if point.each > each and point.total > low:
            area += (point.each - each) * (point.total - low)
            low = point.total
    return area
