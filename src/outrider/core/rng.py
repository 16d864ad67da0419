"""Random numbers: a counter-based RNG (Philox4x32-10), keyed by request, round and purpose.

A number is a pure function of (seed, sample, start, node, role); `start` is the number of tokens
that the sequence had when the round began, its pending one included. So text does not depend on
batch mates, scheduling or pre-emption. `Rng` is the interface, `KeyedRng` the generator; tests
substitute a `Rng` that walks every branch with its weight. Blocks of words are made in philox.py.

Shapes:  V = vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.errors import NumericsError
from outrider.core.philox import philox_exponentials, philox_uniform
from outrider.core.tree import ROOT

# Race numbers are made for so many ids at a time: 2.5 times as fast as a whole vocabulary at once.
_IN_CACHE = 1 << 15


class Role(IntEnum):
    """The purpose of a number; part of its key, so no number is used twice."""

    DRAFT = 0
    ACCEPT = 1
    NEXT = 2
    POSITION = 3
    RACE = 4


@dataclass(frozen=True, slots=True)
class RoundKeys:
    """Keys of a round's numbers except node and role, one a sequence, on a device.

    `seed_B` is int64 (its bits are the seed's), the others of any integer dtype below 2^32.
    """

    seed_B: Tensor
    sample_B: Tensor
    start_B: Tensor


class Rng(Protocol):
    """The only source of randomness. `node` is a draft node's index, or ROOT.

    The round's start belongs in the key: under trees and block rules the later drafts influence how
    much is accepted, so a number used again at the same position in the next round would bias the
    output. Only the match and coupled rules key by absolute position.

    A race gives each token id an exponential number of its own and takes the token whose number,
    divided by its weight, is least: each wins in proportion to its weight, and similar weights
    mostly have the same winner. It is the Gumbel-max draw, argmax of log p + g, without the
    logarithm of p.
    """

    def coin(self, probability: float, node: int, role: Role) -> bool: ...
    def pick(self, weights_V: Tensor, node: int, role: Role) -> int: ...
    def pick_at(self, weights_V: Tensor, depth: int) -> int:
        """A draw keyed by absolute position: `depth` tokens after the round's start."""
        ...

    def race_at(self, weights_V: Tensor, depth: int) -> int:
        """A race at an absolute position: every race there draws with the same numbers."""
        ...


# (weights_V, uniform) -> index: `inverse_cdf`, or an equivalent kernel.
Pick: TypeAlias = Callable[[Tensor, float], int]
# Draws the token of draft node `node`, `depth` tokens below the pending one, for a drafter:
# (probs_V, rng, node, depth) -> token.
DrawNode: TypeAlias = Callable[[Tensor, Rng, int, int], int]


def pick_node(probs_V: Tensor, rng: Rng, node: int, depth: int) -> int:
    """A draw with the node's own number, as rules need it that compare p with q."""
    del depth
    return rng.pick(probs_V, node, Role.DRAFT)


def race_node(probs_V: Tensor, rng: Rng, node: int, depth: int) -> int:
    """A race with the numbers that the coupled rule will use at the node's position. A younger
    sibling is the runner-up of the same race."""
    del node
    return rng.race_at(probs_V, depth)


def draw_for(sampler: str) -> DrawNode:
    """The method of drawing drafts for the acceptance rule `sampler`: they agree most with the
    coupled rule's own draws when both race with the same numbers."""
    return race_node if sampler == "coupled" else pick_node


def inverse_cdf(weights_V: Tensor, uniform: float) -> int:
    """The index at which the running sum of `weights_V` first exceeds `uniform` of its total.

    Sums in float64. An index of weight zero is never returned. Raises NumericsError if the weights
    are no distribution.
    """
    cdf_V = weights_V.cumsum(0, dtype=torch.float64)
    total = float(cdf_V[-1])
    _check_total(total)
    # Rounding of uniform * total may reach total itself; step back to the last real increase.
    threshold = min(uniform * total, math.nextafter(total, 0.0))
    return int(torch.searchsorted(cdf_V, cdf_V.new_tensor(threshold), right=True))


def _check_total(total: float) -> None:
    if not 0 < total < math.inf:
        raise NumericsError("the model")


@dataclass(frozen=True, slots=True)
class KeyedRng:
    """The production `Rng` of one round of a sample. `choose` maps a uniform number to an index."""

    seed: int
    sample: int
    start: int
    choose: Pick = inverse_cdf

    def coin(self, probability: float, node: int, role: Role) -> bool:
        if not 0 < probability < 1:
            return probability >= 1
        return self._uniform(self.start, node, role) < probability

    def pick(self, weights_V: Tensor, node: int, role: Role) -> int:
        return self.choose(weights_V, self._uniform(self.start, node, role))

    def pick_at(self, weights_V: Tensor, depth: int) -> int:
        return self.choose(weights_V, self._uniform_at(depth))

    def _uniform_at(self, depth: int) -> float:
        return self._uniform(self.start + depth, ROOT, Role.POSITION)

    def race_at(self, weights_V: Tensor, depth: int) -> int:
        """A pure function of the weights and the key, bit for bit. Waits for the device."""
        weights = weights_V.double().cpu().numpy()
        _check_total(float(weights.sum()))
        ids = np.flatnonzero(weights)
        parts = [ids[at : at + _IN_CACHE] for at in range(0, len(ids), _IN_CACHE)]
        times = np.concatenate([self._race_numbers(part, self.start + depth) for part in parts])
        with np.errstate(over="ignore"):  # a weight too small to divide by cannot win
            return int(ids[np.argmin(times / weights[ids])])

    def _race_numbers(self, ids: NDArray[np.intp], position: int) -> NDArray[np.float64]:
        counter = (ids.astype(np.uint64), position, self.sample, int(Role.RACE))
        return philox_exponentials(self.seed, counter)

    def _uniform(self, start: int, node: int, role: Role) -> float:
        counter = (node + 1, start, self.sample, int(role))
        return philox_uniform(self.seed, counter)


@dataclass(frozen=True, slots=True)
class NotingRng(KeyedRng):
    """The same numbers, with a record of those that decided: `coins` has by draft node the
    probability of heads and the number, None if heads or tails were certain; `picks` has the
    numbers of picked tokens, in order. A race has no single number."""

    coins: dict[int, tuple[float, float | None]] = field(
        default_factory=dict[int, tuple[float, float | None]]
    )
    picks: list[float] = field(default_factory=list[float])

    @classmethod
    def of(cls, rng: KeyedRng) -> NotingRng:
        return cls(rng.seed, rng.sample, rng.start, rng.choose)

    def coin(self, probability: float, node: int, role: Role) -> bool:
        is_open = 0 < probability < 1
        uniform = self._uniform(self.start, node, role) if is_open else None
        self.coins[node] = (min(probability, 1.0), uniform)
        return probability >= 1 if uniform is None else uniform < probability

    def pick(self, weights_V: Tensor, node: int, role: Role) -> int:
        return self._noted(weights_V, self._uniform(self.start, node, role))

    def pick_at(self, weights_V: Tensor, depth: int) -> int:
        return self._noted(weights_V, self._uniform_at(depth))

    def _noted(self, weights_V: Tensor, uniform: float) -> int:
        self.picks.append(uniform)
        return self.choose(weights_V, uniform)
