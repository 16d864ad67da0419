"""Races among enumerated choices: a later race at a place knows what the earlier ones have told.

Each place has the region of numbers that its races so far have left possible. A race there is one
more choice, whose weights are the shares of that region which each winner has; so the joint
distribution of any number of races at a place is exact, and nothing is assumed of which of them
matter.

Exact probabilities of races: volumes of parts of a simplex.

A race with weights w gives each id i an exponential number E_i of its own, and the id with the
least E_i / w_i wins. The numbers divided by their sum are spread evenly over the simplex, so the
probability that a race, or each of several races with the same numbers, ends one way is a share of
its volume. That share is computed by cutting simplices in two along the planes
E_i w_j = E_j w_i, without sampling and without any distribution of races.

Every branch of experiments in which several distributions are drawn from by one number.

A drafter ahead draws after each verdict that may come with the numbers of the round that would then
start. Verdicts of the same length share them, and so does the draft made when none of them came. So
a number stands here for an interval of [0, 1): each draw with it splits what earlier draws have
left of it, at the places where a running sum of the distribution passes from one token to the next.

Noise that is written down: the uniform numbers of one round of a chain, by the token rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from doubles.every_branch import EveryBranch
from outrider.core.rng import Rng, Role, inverse_cdf

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


class Racing:
    """The choices of `rng`, with races of this kind."""

    def __init__(self, rng: EveryBranch) -> None:
        self._rng = rng
        self._start = 0
        self._num_races = 0
        self._regions: dict[int, Region] = {}

    def at(self, start: int) -> Racing:
        self._start = start
        self._rng.at(start)
        return self

    def coin(self, probability: float, node: int, role: Role) -> bool:
        return self._rng.coin(probability, node, role)

    def pick(self, weights_V: Tensor, node: int, role: Role) -> int:
        return self._rng.pick(weights_V, node, role)

    def pick_at(self, weights_V: Tensor, depth: int) -> int:
        return self._rng.pick_at(weights_V, depth)

    def race_at(self, weights_V: Tensor, depth: int) -> int:
        weights = [float(weight) for weight in weights_V.double()]
        region = self._regions.get(self._start + depth, whole(len(weights)))
        won = [won_by(region, weights, i) if w > 0 else () for i, w in enumerate(weights)]
        shares_V = torch.tensor([volume(part) for part in won], dtype=torch.float64)
        self._num_races += 1
        winner = self._rng.pick(shares_V, self._num_races, Role.RACE)
        self._regions[self._start + depth] = won[winner]
        return winner


# Pieces shorter than this are rounding.
_TINY = 1e-13
# Draws with one number are keyed apart by this much.
_AGAIN = 1 << 16


@dataclass(slots=True)
class SharedNumbers:
    """`Rounds` over `rng`; only draft numbers may be drawn with more than once."""

    rng: EveryBranch
    _left: dict[tuple[int, int], tuple[int, float, float]] = field(
        default_factory=dict[tuple[int, int], tuple[int, float, float]]
    )

    def at(self, start: int) -> Rng:
        return _RoundRng(self, start)

    def draft(self, weights_V: Tensor, start: int, node: int) -> int:
        times, low, high = self._left.get((start, node), (0, 0.0, 1.0))
        ends_V = weights_V.double().cumsum(0)
        ends_V = ends_V / ends_V[-1]
        begins_V = torch.cat([ends_V.new_zeros(1), ends_V[:-1]])
        pieces_V = ends_V.clamp(low, high) - begins_V.clamp(low, high)
        pieces_V = torch.where(pieces_V > _TINY, pieces_V, 0.0)
        token = self.rng.at(start).pick(pieces_V, node + _AGAIN * times, Role.DRAFT)
        left = max(low, float(begins_V[token])), min(high, float(ends_V[token]))
        self._left[start, node] = (times + 1, *left)
        return token


@dataclass(frozen=True, slots=True)
class _RoundRng:
    shared: SharedNumbers
    start: int

    def coin(self, probability: float, node: int, role: Role) -> bool:
        return self.shared.rng.at(self.start).coin(probability, node, role)

    def pick(self, weights_V: Tensor, node: int, role: Role) -> int:
        if role is Role.DRAFT:
            return self.shared.draft(weights_V, self.start, node)
        return self.shared.rng.at(self.start).pick(weights_V, node, role)

    def pick_at(self, weights_V: Tensor, depth: int) -> int:
        return self.shared.rng.at(self.start).pick_at(weights_V, depth)

    def race_at(self, weights_V: Tensor, depth: int) -> int:
        return self.shared.rng.at(self.start).race_at(weights_V, depth)


@dataclass(frozen=True, slots=True)
class Written:
    """One number for each drafted token that is looked at, and one for the round's own token."""

    coins: tuple[float, ...]
    last: float

    def coin(self, probability: float, node: int, role: Role) -> bool:
        assert role is Role.ACCEPT
        return self.coins[node] < probability

    def pick(self, weights_V: Tensor, node: int, role: Role) -> int:
        assert role is Role.NEXT
        assert node < len(self.coins)
        return inverse_cdf(weights_V, self.last)

    def pick_at(self, weights_V: Tensor, depth: int) -> int:
        raise AssertionError(weights_V, depth)

    def race_at(self, weights_V: Tensor, depth: int) -> int:
        raise AssertionError(weights_V, depth)
