"""Nodes of a greedy draft tree: the worthiest candidates, found level by level (EAGLE-2).

A node's worth is the product of the drafter's own probabilities along its path (Li et al. 2024,
arXiv 2406.16858). A level has only nodes whose children may still be among the worthiest. Of equal
nodes the earliest are kept: parents before children and, of equal tokens, lower ids first.
This file is the definition; kernels/native/trees.py does the same in C++.

Shapes:  V = vocabulary, M = nodes of a level, R = ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from outrider.core.clock import host_floats, host_rows
from outrider.core.tree import ROOT

# The target's likeliest token is a draft model's first more often than its distribution gives it
# mass, so greedy trees take chances from a sharper distribution. On the embedded pair, 15 nodes a
# round: 5.1 to 5.5 tokens a round at 1, 6.2 to 6.3 at 1.5, 6.0 at 2; a chain of 15 has 5.4 to 5.9.
SHARPNESS = 1.5
# Mask that is xor-ed to a negative float32's bits, so that integers rise as the floats do.
_MAGNITUDE = 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """Limits of a tree: its nodes, the nodes of a path, and the nodes of a level that are read,
    none of which is worth less than `least_read`."""

    num_nodes: int
    depth: int
    width: int
    least_read: float = 0.0


@dataclass(frozen=True, slots=True)
class Level:
    """Nodes to read next: their tokens, and their parents' indices in the level before (or 0)."""

    tokens: Sequence[int] = ()
    above: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class KeptNodes:
    """The worthiest nodes, worthiest first; parents are indices into them, or ROOT."""

    tokens: Sequence[int]
    parents: Sequence[int]
    worths: Sequence[float]


@dataclass(frozen=True, slots=True)
class Ranked:
    """The likeliest tokens after each of M nodes, and their probabilities; 0 for fillers."""

    tokens: Sequence[Sequence[int]]
    shares: Sequence[Sequence[float]]


class NodeChoice(Protocol):
    """The nodes of one tree while it grows."""

    @property
    def level(self) -> Level:
        """Nodes to read next; empty before the first `grow` (of the root) and at the end."""
        ...

    def grow(self, logits_MV: Tensor) -> bool:
        """Add the children of the level, given the logits after each of its nodes. False, and the
        end, if some of the logits are not numbers."""
        ...

    def kept(self) -> KeptNodes: ...


# Makes the choice of nodes for trees within these limits.
MakeNodes: TypeAlias = Callable[[TreeLimits], NodeChoice]
# (logits_MV, num_ranks, sharpness); None if some logits are no numbers.
Rank: TypeAlias = Callable[[Tensor, int, float], Ranked | None]


def sharp_shares(best_MR: Tensor, logits_MV: Tensor, sharpness: float = SHARPNESS) -> Tensor:
    """Probabilities of candidates from all logits of a distribution: shares_MR, sum at most 1."""
    # Where all logits are far below zero, only differences have bits left for a share.
    top_M1 = logits_MV.amax(-1, keepdim=True)
    total_M1 = (sharpness * (logits_MV - top_M1)).logsumexp(-1, keepdim=True)
    return (sharpness * (best_MR - top_M1) - total_M1).exp().clamp_max(1.0)


def rank(logits_MV: Tensor, num_ranks: int, sharpness: float) -> Ranked | None:
    """The likeliest tokens of each row; of equal ones the first. `num_ranks` is at most V."""
    if bool(logits_MV.isnan().any()):
        return None
    ids_MR = _first_of_equals(logits_MV, num_ranks)
    shares_MR = sharp_shares(logits_MV.gather(-1, ids_MR), logits_MV, sharpness)
    shares_M = host_floats(shares_MR.nan_to_num(0.0).flatten())
    rows = [shares_M[at : at + num_ranks] for at in range(0, len(shares_M), num_ranks)]
    return Ranked(host_rows(ids_MR), rows)


def _first_of_equals(logits_MV: Tensor, num_ranks: int) -> Tensor:
    """Ids by falling logits. No two keys are equal, as `topk` does not specify their order."""
    # Zero has two signs; the sum makes them one.
    bits_MV = (logits_MV.float() + 0.0).view(torch.int32)
    rising_MV = torch.where(bits_MV < 0, bits_MV ^ _MAGNITUDE, bits_MV).long()
    ids_V = torch.arange(logits_MV.shape[-1], device=logits_MV.device)
    return ((rising_MV << 32) - ids_V).topk(num_ranks).indices


class ChosenNodes:
    """NodeChoice by sorting lists. `rank` gives the candidates after a node."""

    def __init__(self, limits: TreeLimits, rank: Rank = rank) -> None:
        self._limits, self._rank = limits, rank
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._worths: list[float] = []
        # The worthiest nodes so far, worthiest first: any other node can never be among them.
        self._kept: Sequence[int] = ()
        self._reading: Sequence[int] = (ROOT,)
        self._depth = 0
        self.level = Level()

    def grow(self, logits_MV: Tensor) -> bool:
        limits, parents = self._limits, self._reading
        num_ranks = min(limits.width, limits.num_nodes, logits_MV.shape[-1])
        ranked = self._rank(logits_MV, num_ranks, SHARPNESS)
        if ranked is None:
            return False
        first = len(self._tokens)
        for parent, tokens, shares in zip(parents, ranked.tokens, ranked.shares, strict=True):
            above = 1.0 if parent == ROOT else self._worths[parent]
            self._tokens += tokens
            self._parents += [parent] * len(tokens)
            self._worths += [above * share for share in shares]
        newest = range(first, len(self._tokens))
        self._keep(newest)
        self._depth += 1
        promising = [
            node
            for node in self._kept
            if node in newest and self._worths[node] >= limits.least_read
        ]
        self._reading = promising[: limits.width] if self._depth < limits.depth else ()
        index_of = {parent: index for index, parent in enumerate(parents)}
        self.level = Level(
            [self._tokens[node] for node in self._reading],
            [index_of[self._parents[node]] for node in self._reading],
        )
        return True

    def kept(self) -> KeptNodes:
        index_of = {node: index for index, node in enumerate(self._kept)} | {ROOT: ROOT}
        return KeptNodes(
            [self._tokens[node] for node in self._kept],
            [index_of[self._parents[node]] for node in self._kept],
            [self._worths[node] for node in self._kept],
        )

    def _keep(self, newest: range) -> None:
        nodes = [*self._kept, *(node for node in newest if self._worths[node] > 0)]
        nodes.sort(key=lambda node: (-self._worths[node], node))
        self._kept = nodes[: self._limits.num_nodes]
