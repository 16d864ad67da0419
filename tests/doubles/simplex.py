"""Exact probabilities of races: volumes of parts of a simplex.

A race with weights w gives each id i an exponential number E_i of its own, and the id with the
least E_i / w_i wins. The numbers divided by their sum are spread evenly over the simplex, so the
probability that a race, or each of several races with the same numbers, ends one way is a share of
its volume. That share is computed by cutting simplices in two along the planes
E_i w_j = E_j w_i, without sampling and without any law of races.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Point = tuple[float, ...]
_ON_THE_PLANE = 1e-13


@dataclass(frozen=True, slots=True)
class Piece:
    """A simplex and its volume."""

    corners: tuple[Point, ...]
    volume: float

    def moved(self, corner: int, to: Point, share: float) -> Piece:
        corners = (*self.corners[:corner], to, *self.corners[corner + 1 :])
        return Piece(corners, self.volume * share)


Region = tuple[Piece, ...]


def whole(size: int) -> Region:
    """The simplex of `size` corners, of volume 1."""
    corners = tuple(tuple(float(i == j) for j in range(size)) for i in range(size))
    return (Piece(corners, 1.0),)


def volume(region: Region) -> float:
    return sum(piece.volume for piece in region)


def won_by(region: Region, weights: Sequence[float], winner: int) -> Region:
    """The part of `region` in which `winner`, of positive weight, wins the race."""
    for other, weight in enumerate(weights):
        if other != winner and weight > 0:
            region = _clipped(region, _lead(winner, weights[winner], other, weight))
    return region


def _lead(winner: int, mine: float, other: int, its: float) -> Callable[[Point], float]:
    """By how much the winner leads, positive where E_winner / mine is below E_other / its."""
    return lambda point: point[other] * mine - point[winner] * its


def _clipped(region: Region, side: Callable[[Point], float]) -> Region:
    """The part of `region` where `side`, a linear function, is not negative."""
    kept: list[Piece] = []
    left = list(region)
    while left:
        piece = left.pop()
        values = [side(corner) for corner in piece.corners]
        low, high = values.index(min(values)), values.index(max(values))
        if values[low] >= -_ON_THE_PLANE:
            kept.append(piece)
        elif values[high] > _ON_THE_PLANE:
            at = values[high] / (values[high] - values[low])
            ends = zip(piece.corners[high], piece.corners[low], strict=True)
            cut = tuple(a + at * (b - a) for a, b in ends)
            left += [piece.moved(low, cut, at), piece.moved(high, cut, 1 - at)]
    return tuple(kept)
