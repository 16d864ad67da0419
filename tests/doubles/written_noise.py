"""Noise that is written down: the uniform numbers of one round of a chain, by the token rule."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from outrider.core.rng import Role, inverse_cdf


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
