"""Races among enumerated choices: a later race at a place knows what the earlier ones have told.

Each place has the region of numbers that its races so far have left possible. A race there is one
more choice, whose weights are the shares of that region which each winner has; so the joint law of
any number of races at a place is exact, and nothing is assumed of which of them matter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from doubles.every_branch import EveryBranch
from doubles.simplex import Region, volume, whole, won_by
from outrider.core.rng import Role


class Racing:
    """The choices of `noise`, with races of this kind."""

    def __init__(self, noise: EveryBranch) -> None:
        self._noise = noise
        self._start = 0
        self._num_races = 0
        self._regions: dict[int, Region] = {}

    def at(self, start: int) -> Racing:
        self._start = start
        self._noise.at(start)
        return self

    def coin(self, probability: float, node: int, role: Role) -> bool:
        return self._noise.coin(probability, node, role)

    def pick(self, weights_V: Tensor, node: int, role: Role) -> int:
        return self._noise.pick(weights_V, node, role)

    def pick_at(self, weights_V: Tensor, depth: int) -> int:
        return self._noise.pick_at(weights_V, depth)

    def race_at(self, weights_V: Tensor, depth: int) -> int:
        weights = [float(weight) for weight in weights_V.double()]
        region = self._regions.get(self._start + depth, whole(len(weights)))
        won = [won_by(region, weights, i) if w > 0 else () for i, w in enumerate(weights)]
        shares_V = torch.tensor([volume(part) for part in won], dtype=torch.float64)
        self._num_races += 1
        winner = self._noise.pick(shares_V, self._num_races, Role.RACE)
        self._regions[self._start + depth] = won[winner]
        return winner
