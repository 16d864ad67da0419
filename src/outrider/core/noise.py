"""Randomness as an argument: counter-based numbers keyed by what they decide.

A number is a pure function of (seed, sample, start, node, role), where `start` is the number of
tokens that the sequence had when the round began, its pending one included. Text therefore does not
depend on batch mates, scheduling, pre-emption or kill switches. The round's start belongs in the
key: under trees and block rules the later drafts influence how much is kept, so a number used again
at the same position in the next round would bias the output. Only the match and coupled rules key
by absolute position.

The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as
1, 2, 3", SC 2011). Tests substitute a `Noise` that walks every branch with its weight.

Shapes:  V = vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

ROOT = -1


class Role(IntEnum):
    """What a number decides; part of its key, so no number is used twice."""

    DRAFT = 0
    ACCEPT = 1
    NEXT = 2
    POSITION = 3


class Noise(Protocol):
    """The only source of randomness. `node` is a draft node's index, or ROOT."""

    def coin(self, probability: float, node: int, role: Role) -> bool: ...
    def pick(self, weights_V: Tensor, node: int, role: Role) -> int: ...
    def pick_at(self, weights_V: Tensor, depth: int) -> int:
        """Keyed by absolute position: `depth` tokens after the round's start."""
        ...


@dataclass(frozen=True, slots=True)
class KeyedNoise:
    """The production `Noise` of one round of one sample of one request."""

    seed: int
    sample: int
    start: int

    def coin(self, probability: float, node: int, role: Role) -> bool:
        return probability >= 1 or self._uniform(self.start, node, role) < probability

    def pick(self, weights_V: Tensor, node: int, role: Role) -> int:
        return inverse_cdf(weights_V, self._uniform(self.start, node, role))

    def pick_at(self, weights_V: Tensor, depth: int) -> int:
        return inverse_cdf(weights_V, self._uniform(self.start + depth, ROOT, Role.POSITION))

    def _uniform(self, start: int, node: int, role: Role) -> float:
        counter = (node + 1, start, self.sample, int(role))
        return philox_uniform(self.seed, counter)


def inverse_cdf(weights_V: Tensor, uniform: float) -> int:
    """The index at which the running sum of `weights_V` first exceeds `uniform` of its total.

    Sums in float64. An index of weight zero is never returned.
    """
    cdf_V = weights_V.cumsum(0, dtype=torch.float64)
    total = float(cdf_V[-1])
    # Rounding of uniform * total may reach total itself; step back to the last real increase.
    threshold = min(uniform * total, math.nextafter(total, 0.0))
    return int(torch.searchsorted(cdf_V, cdf_V.new_tensor(threshold), right=True))


_MASK = 0xFFFFFFFF


def philox_uniform(seed: int, counter: tuple[int, int, int, int]) -> float:
    """A float64 in [0, 1) with 53 random bits, from one Philox4x32-10 block."""
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    c0, c1, c2, c3 = counter
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return ((c0 << 21) | (c1 >> 11)) * 2.0**-53
