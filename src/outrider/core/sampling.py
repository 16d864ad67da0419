"""Sampling: logits to probabilities by temperature, top-k, top-p, min-p; draws, logprobs, trees.

The processed distribution of a node is one and the same in the acceptance ratio, in the residual
and in the draw. A greedy distribution is a point mass, held as a token id, so greedy decoding
builds no probabilities. `Sampling` holds the operators: an engine passes those of its kernels
(kernels/registry.py), all other code uses the PyTorch definitions of this file.

Shapes:  N = nodes or distributions of one sequence's round, V = vocabulary, M = nodes of a level,
         R = ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from outrider.core.clock import host_floats, host_ints, host_rows
from outrider.core.draft import TokenLogprobs
from outrider.core.errors import ContractError
from outrider.core.params import SamplingParams
from outrider.core.rng import Pick, Rng, Role, inverse_cdf
from outrider.core.tree import ROOT

# (logits_NV, temperature, out_NV): rows of softmax(logits / temperature); `out` may be `logits`.
Softmax: TypeAlias = Callable[[Tensor, float, Tensor], None]
# (logits_NV, k, out_NV): the rows with -inf below their k-th largest; `out` may be `logits`.
TopK: TypeAlias = Callable[[Tensor, int, Tensor], None]
# (probs_NV, top_p, min_p): each row without its unlikely tokens, in place, its sum one again.
KeepLikely: TypeAlias = Callable[[Tensor, float, float], None]
# (probs_NV, tokens): the probability of each token under the distribution of its position.
Masses: TypeAlias = Callable[[Tensor, Sequence[int]], list[float]]


class Leftover(Protocol):
    def __call__(
        self, p_V: Tensor, proposal: int | Tensor, share: float = 1.0
    ) -> tuple[Tensor, float]:
        """Weights of shape V and their sum: the rest of `share` times `p_V` without `proposal`.

        The proposal is a distribution q, which leaves max(share * p - q, 0), or a point mass, a
        token id, which leaves nothing of its token. The next call may overwrite the weights, and
        may get them as its `p_V`.
        """
        ...


def softmax(logits_NV: Tensor, temperature: float, out_NV: Tensor) -> None:
    """Softmax row by row; a row's bits depend on that row alone. Accepts inference tensors."""
    with torch.inference_mode():
        out_NV.copy_(torch.softmax(logits_NV / temperature, dim=-1))


def top_k(logits_NV: Tensor, k: int, out_NV: Tensor) -> None:
    """Top-k filter. Ties with the k-th largest are kept."""
    with torch.inference_mode():
        edge_N1 = torch.topk(logits_NV, k, dim=-1).values[:, -1:]
        out_NV.copy_(logits_NV.masked_fill(logits_NV < edge_N1, float("-inf")))


def keep_likely(probs_NV: Tensor, top_p: float, min_p: float) -> None:
    """Keep the smallest set of likeliest tokens whose mass reaches `top_p`, at least one and of
    equal ones the first; then drop tokens below `min_p` of the likeliest."""
    with torch.inference_mode():
        if top_p < 1:
            probs_NV.copy_(nucleus(probs_NV, top_p))
        if min_p > 0:
            floor_N1 = min_p * probs_NV.amax(-1, keepdim=True)
            probs_NV.copy_(renormalised(probs_NV.masked_fill(probs_NV < floor_N1, 0)))


def nucleus(probs_NV: Tensor, top_p: float | Tensor) -> Tensor:
    """Rows with the smallest set of likeliest tokens whose mass reaches `top_p`, renormalised.
    `top_p` has shape [N, 1] if rows have their own."""
    sorted_NV, order_NV = probs_NV.sort(dim=-1, descending=True, stable=True)
    before_NV = sorted_NV.double().cumsum(-1) - sorted_NV
    keep_NV = before_NV < top_p
    keep_NV[:, :1].fill_(True)
    mask_NV = torch.zeros_like(keep_NV).scatter(-1, order_NV, keep_NV)
    return renormalised(probs_NV.masked_fill(~mask_NV, 0))


def renormalised(probs_NV: Tensor) -> Tensor:
    """Rows divided by their sums."""
    # A running sum adds in one order; a plain sum of one long row is split among threads.
    total_N1 = probs_NV.cumsum(-1, dtype=torch.float64)[:, -1:]
    return probs_NV / total_N1.to(probs_NV.dtype)


def leftover(p_V: Tensor, proposal: int | Tensor, share: float = 1.0) -> tuple[Tensor, float]:
    """Plain version of `Leftover`; weights and sum are float64."""
    if isinstance(proposal, int):
        left_V = share * p_V.double()
        left_V[proposal] = 0
    else:
        left_V = (share * p_V.double() - proposal.double()).clamp_min(0)
    return left_V, float(left_V.sum())


def masses(probs_NV: Tensor, tokens: Sequence[int]) -> list[float]:
    """Plain version of `Masses`; waits for the device once."""
    return probs_at(probs_NV, range(len(tokens)), tokens)


def probs_at(probs_NV: Tensor, rows: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """Probability of `tokens[i]` in row `rows[i]`; waits for the device once."""
    vocab_size = probs_NV.shape[-1]
    indices = [row * vocab_size + token for row, token in zip(rows, tokens, strict=True)]
    where = torch.tensor(indices, dtype=torch.int64, device=probs_NV.device)
    return host_floats(probs_NV.take(where))


# The target's likeliest token is a draft model's first more often than its distribution gives it
# mass, so greedy trees take chances from a sharper distribution. On the embedded pair, 15 nodes a
# round: 5.1 to 5.5 tokens a round at 1, 6.2 to 6.3 at 1.5, 6.0 at 2; a chain of 15 has 5.4 to 5.9.
SHARPNESS = 1.5
# Mask that is xor-ed to a negative float32's bits, so that integers rise as the floats do.
_MAGNITUDE = 0x7FFFFFFF


# Nodes of a greedy draft tree: the worthiest candidates, found level by level (EAGLE-2).
#
# A node's worth is the product of the drafter's own probabilities along its path (Li et al. 2024,
# arXiv 2406.16858). A level has only nodes whose children may still be among the worthiest. Of
# equal nodes the earliest are kept: parents before children and, of equal tokens, lower ids first.
# `ChosenNodes` is the definition; kernels/native/sampling.py does the same in C++.
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


@dataclass(frozen=True, slots=True)
class Sampling:
    """The operators of one backend: all native, or all as defined here."""

    softmax: Softmax = softmax
    pick: Pick = inverse_cdf
    leftover: Leftover = leftover
    masses: Masses = masses
    top_k: TopK = top_k
    keep_likely: KeepLikely = keep_likely
    nodes: MakeNodes = ChosenNodes


PLAIN = Sampling()


# A quotient by less would overflow to infinity, and its distribution would not be numeric.
MIN_TEMPERATURE = 1e-20


@dataclass(frozen=True, slots=True)
class Distributions:
    """One distribution per node: exactly one of `tokens` (point masses) and `probs_NV` is given."""

    tokens: tuple[int, ...] | None = None
    probs_NV: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.probs_NV is None):
            raise ContractError("distributions are either tokens or probabilities")

    def at(self, index: int) -> int | Tensor:
        """A token id (all mass on it) or probabilities of shape V."""
        if self.tokens is not None:
            return self.tokens[index]
        if self.probs_NV is None:
            raise ContractError("there are no probabilities")
        return self.probs_NV[index]


def empty_probs(count: int, logits_V: Tensor) -> Tensor:
    """Uninitialised memory for `count` distributions of logits like these, in their dtype."""
    # MPS lacks float64, which sums and draws use.
    device = "cpu" if logits_V.device.type == "mps" else logits_V.device
    return logits_V.new_empty((count, logits_V.shape[-1]), device=device)


def processed_probs(
    logits_NV: Tensor,
    params: SamplingParams,
    sampling: Sampling = PLAIN,
    out_NV: Tensor | None = None,
) -> Tensor:
    """Probabilities under `params`, temperature > 0; the dtype of `logits_NV` is kept.

    Filters apply in the order temperature, top-k, top-p, min-p, each to the rest. Ties at a top-k
    edge are all kept, so the distribution does not depend on the order of a sort. The result is
    written to `out_NV`, if given: a tensor of `empty_probs`, or the logits themselves on a CPU.
    """
    if out_NV is None:
        out_NV = empty_probs(len(logits_NV), logits_NV)
    if 0 < params.top_k < logits_NV.shape[-1]:
        sampling.top_k(logits_NV, params.top_k, out_NV)
        logits_NV = out_NV
    sampling.softmax(logits_NV, max(params.temperature, MIN_TEMPERATURE), out_NV)
    if params.top_p < 1 or params.min_p > 0:
        sampling.keep_likely(out_NV, params.top_p, params.min_p)
    return out_NV


def mass(distribution: int | Tensor, token: int) -> float:
    """Probability of `token` under `distribution`, a point mass or probabilities of shape V."""
    if isinstance(distribution, int):
        return float(distribution == token)
    return float(distribution[token])


def draw(distribution: int | Tensor, rng: Rng, node: int) -> int:
    """The target's own token after draft node `node`."""
    return (
        distribution if isinstance(distribution, int) else rng.pick(distribution, node, Role.NEXT)
    )


def draw_at(distribution: int | Tensor, rng: Rng, depth: int) -> int:
    """The target's own token `depth` positions after the round's start, keyed by position."""
    return distribution if isinstance(distribution, int) else rng.pick_at(distribution, depth)


def log_probs(logits_NV: Tensor) -> Tensor:
    """Log-probabilities of `logits_NV` at temperature 1."""
    return torch.log_softmax(logits_NV, dim=-1)


def token_logprobs(
    log_NV: Tensor, distributions: Sequence[int], tokens: Sequence[int], num_top: int
) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of `tokens`, the i-th of which came from row `distributions[i]` of
    `log_NV`.

    Greedy decoding has only a point mass; its log-probabilities come from the processed logits at
    temperature 1, so that they still say how sure the model was.
    """
    return tuple(
        TokenLogprobs(
            token, float(log_NV[distribution, token]), _top(log_NV[distribution], num_top)
        )
        for distribution, token in zip(distributions, tokens, strict=True)
    )


def _top(log_V: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    if count == 0:
        return ()
    least = torch.topk(log_V, min(count, len(log_V))).values[-1]
    ids = (log_V >= least).nonzero()[:, 0]
    values, order = torch.sort(log_V[ids], descending=True, stable=True)
    best = zip(host_ints(ids[order]), host_floats(values), strict=True)
    return tuple(pair for pair in islice(best, count) if pair[1] > float("-inf"))
