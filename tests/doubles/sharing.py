"""Every branch of experiments in which several laws are drawn from by one number.

A drafter ahead draws after each verdict that may come with the numbers of the round that would then
start. Verdicts of the same length share them, and so does the draft made when none of them came. So
a number stands here for an interval of [0, 1): each draw with it splits what earlier draws have
left of it, at the places where a running sum of the law passes from one token to the next.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from doubles.every_branch import EveryBranch
from outrider.core.rng import Rng, Role

# Pieces shorter than this are rounding.
_TINY = 1e-13
# Draws with one number are keyed apart by this much.
_AGAIN = 1 << 16


@dataclass(slots=True)
class SharedNumbers:
    """`Rounds` over `noise`; only draft numbers may be drawn with more than once."""

    noise: EveryBranch
    _left: dict[tuple[int, int], tuple[int, float, float]] = field(
        default_factory=dict[tuple[int, int], tuple[int, float, float]]
    )

    def at(self, start: int) -> Rng:
        return _RoundNoise(self, start)

    def draft(self, weights_V: Tensor, start: int, node: int) -> int:
        times, low, high = self._left.get((start, node), (0, 0.0, 1.0))
        ends_V = weights_V.double().cumsum(0)
        ends_V = ends_V / ends_V[-1]
        begins_V = torch.cat([ends_V.new_zeros(1), ends_V[:-1]])
        pieces_V = ends_V.clamp(low, high) - begins_V.clamp(low, high)
        pieces_V = torch.where(pieces_V > _TINY, pieces_V, 0.0)
        token = self.noise.at(start).pick(pieces_V, node + _AGAIN * times, Role.DRAFT)
        left = max(low, float(begins_V[token])), min(high, float(ends_V[token]))
        self._left[start, node] = (times + 1, *left)
        return token


@dataclass(frozen=True, slots=True)
class _RoundNoise:
    shared: SharedNumbers
    start: int

    def coin(self, probability: float, node: int, role: Role) -> bool:
        return self.shared.noise.at(self.start).coin(probability, node, role)

    def pick(self, weights_V: Tensor, node: int, role: Role) -> int:
        if role is Role.DRAFT:
            return self.shared.draft(weights_V, self.start, node)
        return self.shared.noise.at(self.start).pick(weights_V, node, role)

    def pick_at(self, weights_V: Tensor, depth: int) -> int:
        return self.shared.noise.at(self.start).pick_at(weights_V, depth)

    def race_at(self, weights_V: Tensor, depth: int) -> int:
        return self.shared.noise.at(self.start).race_at(weights_V, depth)
