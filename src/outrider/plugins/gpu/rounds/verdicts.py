"""Acceptance rules on tensors: many chains or trees judged at once, each up to its own depth.

Each function makes the decisions of its rule in verify/exact.py, row by row, given the same
numbers. This form serves captured rounds, and large samples in `outrider verify`. A pass over all
distributions of a batch costs more than the walk of one chain, which reads the vocabulary only
after a rejection, so rounds on a CPU walk. No function waits for the device.

Shapes:  B = chains, K = drafted tokens, W = K + 1 = distributions of a chain, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ChainNumbers:
    """Uniform float64 numbers in [0, 1): column i of `accept_BK` is the coin of draft token i,
    column n of `next_BW` draws the target's own token after n accepted ones."""

    accept_BK: Tensor
    next_BW: Tensor


@dataclass(frozen=True, slots=True)
class ChainVerdicts:
    """The number of accepted tokens of each chain, and the target's own token after them."""

    num_accepted_B: Tensor
    next_B: Tensor


def judge_chains(
    tokens_BK: Tensor,
    q_BKV: Tensor | None,
    p_BWV: Tensor,
    numbers: ChainNumbers,
    depth_B: Tensor | None = None,
) -> ChainVerdicts:
    """The token rule. `q_BKV` is None for tokens chosen deterministically. The first `depth_B`
    tokens of each chain count, or all of them if it is None."""
    depth_B = _depths(tokens_BK) if depth_B is None else depth_B
    chance_BK = ratios(tokens_BK, q_BKV, p_BWV)
    kept_B = kept_prefix((chance_BK >= 1) | (numbers.accept_BK < chance_BK), depth_B)
    p_BV, q_BV = _distributions_at(kept_B, tokens_BK, q_BKV, p_BWV)
    return _drawn(p_BV, leftover(p_BV, q_BV), kept_B, depth_B, numbers)


def judge_blocks(
    tokens_BK: Tensor,
    q_BKV: Tensor,
    p_BWV: Tensor,
    numbers: ChainNumbers,
    depth_B: Tensor | None = None,
) -> ChainVerdicts:
    """The block rule; arguments as for `judge_chains`."""
    depth_B = _depths(tokens_BK) if depth_B is None else depth_B
    share_B = torch.ones(tokens_BK.shape[0], dtype=torch.float64, device=p_BWV.device)
    shares = [share_B]
    for ratio_B in ratios(tokens_BK, q_BKV, p_BWV).unbind(-1):
        shares.append((shares[-1] * ratio_B).clamp_max(1))
    kept_B = torch.zeros_like(depth_B)
    for length in range(1, len(shares)):
        chance_B = shares[length]
        if length + 1 < len(shares):
            left_BV = _uncovered(p_BWV[:, length], q_BKV[:, length], chance_B)
            inner_B = _block_chance(left_BV.sum(-1), chance_B)
            chance_B = torch.where(depth_B > length, inner_B, chance_B)
        heads_B = (chance_B >= 1) | (numbers.accept_BK[:, length - 1] < chance_B)
        heads_B = heads_B & (depth_B >= length)
        kept_B = torch.where(heads_B, length, kept_B)
    p_BV, q_BV = _distributions_at(kept_B, tokens_BK, q_BKV, p_BWV)
    share_B = torch.stack(shares, -1).gather(-1, kept_B[:, None])[:, 0]
    return _drawn(p_BV, leftover(p_BV, q_BV, share_B), kept_B, depth_B, numbers)


@dataclass(frozen=True, slots=True)
class TreeDrafts:
    """Trees of at most K nodes. A parent below ROOT marks an unused node. `drawn_B` marks the trees
    whose tokens were drawn from `q_BKV`, which may be None if none were."""

    tokens_BK: Tensor
    parents_BK: Tensor
    drawn_B: Tensor
    q_BKV: Tensor | None = None


@dataclass(frozen=True, slots=True)
class TreeVerdicts:
    """The accepted nodes of each tree in their order (later columns hold arbitrary nodes), their
    number, and the target's own token after them."""

    path_BK: Tensor
    num_accepted_B: Tensor
    next_B: Tensor


class _Walks:
    """Walks down trees, node by node in the order of their numbers. Children of a node come after
    it, in the order in which they were drawn."""

    def __init__(self, parents_BK: Tensor) -> None:
        num_trees, num_nodes = parents_BK.shape
        self._parents_BK = parents_BK
        # One more column, for nodes that are not accepted.
        self._path_BW = parents_BK.new_zeros(num_trees, num_nodes + 1)
        self._kept_B = parents_BK.new_zeros(num_trees)
        self.row_B = parents_BK.new_zeros(num_trees)

    def offered(self, node: int) -> Tensor:
        """Booleans of the walks that have reached the parent of `node`."""
        return self._parents_BK[:, node] + 1 == self.row_B

    def go(self, node: int, heads_B: Tensor) -> None:
        """Accept `node` in some trees."""
        last = self._parents_BK.shape[1]
        column_B1 = torch.where(heads_B, self._kept_B, last)[:, None]
        self._path_BW.scatter_(1, column_B1, torch.full_like(column_B1, node))
        self._kept_B = self._kept_B + heads_B
        self.row_B = torch.where(heads_B, node + 1, self.row_B)

    def ended(self, next_B: Tensor) -> TreeVerdicts:
        return TreeVerdicts(self._path_BW[:, :-1], self._kept_B, next_B)


def follow_trees(drafts: TreeDrafts, own_BW: Tensor) -> TreeVerdicts:
    """The match rule on trees, also the rule of greedy decoding: walk down each tree as long as a
    child is the target's own token, which `own_BW` has after the root and after each node."""
    walks = _Walks(drafts.parents_BK)
    for node in range(drafts.tokens_BK.shape[1]):
        own_B = own_BW.gather(1, walks.row_B[:, None])[:, 0]
        walks.go(node, walks.offered(node) & (drafts.tokens_BK[:, node] == own_B))
    return walks.ended(own_BW.gather(1, walks.row_B[:, None])[:, 0])


def judge_trees(drafts: TreeDrafts, p_BWV: Tensor, numbers: ChainNumbers) -> TreeVerdicts:
    """The token rule on trees of any shape. Column i + 1 of `next_BW` draws after node i."""
    walks, drawn_B1 = _Walks(drafts.parents_BK), drafts.drawn_B[:, None]
    left_BV = p_BWV[:, 0].double()
    for node in range(drafts.tokens_BK.shape[1]):
        token_B1 = drafts.tokens_BK[:, node, None]
        # A large number covers all mass of a chosen token, as `residual` in exact.py does.
        q_BV = torch.zeros_like(left_BV).scatter_(1, token_B1, 2.0)
        mass_B1 = torch.ones_like(left_BV[:, :1])
        if drafts.q_BKV is not None:
            own_BV = drafts.q_BKV[:, node].double()
            mass_B1 = torch.where(drawn_B1, own_BV.gather(1, token_B1), mass_B1)
            q_BV = torch.where(drawn_B1, own_BV, q_BV)
        ratio_B1 = torch.where(mass_B1 > 0, left_BV.gather(1, token_B1) / mass_B1, 0.0)
        heads_B1 = (ratio_B1 >= 1) | (numbers.accept_BK[:, node, None] < ratio_B1)
        offered_B1 = walks.offered(node)[:, None]
        rest_BV = (left_BV - q_BV).clamp_min(0)
        total_B1 = rest_BV.sum(-1, keepdim=True)
        refused_B1 = offered_B1 & ~heads_B1 & (total_B1 > 0)
        left_BV = torch.where(refused_B1, rest_BV / total_B1, left_BV)
        left_BV = torch.where(offered_B1 & heads_B1, p_BWV[:, node + 1].double(), left_BV)
        walks.go(node, (offered_B1 & heads_B1)[:, 0])
    number_B = numbers.next_BW.gather(1, walks.row_B[:, None])[:, 0]
    return walks.ended(pick(left_BV, number_B))


def kept_prefix(heads_BK: Tensor, depth_B: Tensor) -> Tensor:
    """The number of tokens before the first rejection or the end of each chain."""
    position_BK = torch.ones_like(heads_BK, dtype=torch.int64).cumsum(-1)
    accepted_BK = heads_BK & (position_BK <= depth_B[:, None])
    return accepted_BK.cumprod(-1).sum(-1)


def ratios(tokens_BK: Tensor, q_BKV: Tensor | None, p_BWV: Tensor) -> Tensor:
    """p / q of each draft token, of shape BK and float64; 0 where q is."""
    index_BK1 = tokens_BK[..., None]
    p_BK = p_BWV[:, : tokens_BK.shape[1]].gather(-1, index_BK1)[..., 0].double()
    if q_BKV is None:
        return p_BK
    q_BK = q_BKV.gather(-1, index_BK1)[..., 0].double()
    return torch.where(q_BK > 0, p_BK / q_BK, 0.0)


def leftover(p_BV: Tensor, q_BV: Tensor, share_B: Tensor | None = None) -> Tensor:
    """Weights of the residual: `p_BV` (or `share_B` times it) minus `q_BV`, at least 0; `p_BV`
    itself if nothing is left."""
    left_BV = (p_BV - q_BV).clamp_min(0) if share_B is None else _uncovered(p_BV, q_BV, share_B)
    return torch.where(left_BV.sum(-1, keepdim=True) > 0, left_BV, p_BV.to(left_BV.dtype))


def pick(weights_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """`inverse_cdf` of core/rng.py, row by row."""
    cdf_BV = weights_BV.cumsum(-1, dtype=torch.float64)
    total_B = cdf_BV[:, -1]
    below_B = torch.nextafter(total_B, torch.zeros_like(total_B))
    threshold_B = torch.minimum(uniforms_B * total_B, below_B)
    return torch.searchsorted(cdf_BV, threshold_B[:, None], right=True)[:, 0]


def _uncovered(p_BV: Tensor, q_BV: Tensor, share_B: Tensor) -> Tensor:
    return (share_B[:, None] * p_BV.double() - q_BV.double()).clamp_min(0)


def _block_chance(left_B: Tensor, share_B: Tensor) -> Tensor:
    return torch.where(left_B > 0, left_B / (left_B + 1 - share_B), (share_B == 1).double())


def _depths(tokens_BK: Tensor) -> Tensor:
    num_chains, num_tokens = tokens_BK.shape
    return torch.full((num_chains,), num_tokens, device=tokens_BK.device)


def _distributions_at(
    kept_B: Tensor, tokens_BK: Tensor, q_BKV: Tensor | None, p_BWV: Tensor
) -> tuple[Tensor, Tensor]:
    """The target's distribution after `kept_B` tokens, and the drafter's there. After a whole chain
    the latter is arbitrary, as it is not used."""
    row_B = torch.arange(len(kept_B), device=kept_B.device)
    p_BV = p_BWV[row_B, kept_B]
    if tokens_BK.shape[1] == 0:
        return p_BV, torch.zeros_like(p_BV)
    last_B = kept_B.clamp_max(tokens_BK.shape[1] - 1)
    if q_BKV is not None:
        return p_BV, q_BKV[row_B, last_B]
    # A large number covers all mass of the token, as `residual` in exact.py does.
    return p_BV, torch.zeros_like(p_BV).scatter(-1, tokens_BK[row_B, last_B][:, None], 2.0)


def _drawn(
    p_BV: Tensor, left_BV: Tensor, kept_B: Tensor, depth_B: Tensor, numbers: ChainNumbers
) -> ChainVerdicts:
    """Verdicts with own tokens from the residual `left_BV` after a rejection, else from `p_BV`."""
    weights_BV = torch.where((kept_B < depth_B)[:, None], left_BV, p_BV.to(left_BV.dtype))
    uniform_B = numbers.next_BW.gather(-1, kept_B[:, None])[:, 0]
    return ChainVerdicts(kept_B, pick(weights_BV, uniform_B))
