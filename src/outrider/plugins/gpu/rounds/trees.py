"""Verdicts on drafts that the host made, chains and trees, inside a captured round.

`TreeProbs` is the interface; the definitions of this file run on any device, triton.py has fused
kernels. A batch is decided in one way: greedy rows have point masses, alike in every way.

Shapes:  B = rows, K = drafted nodes, W = K + 1, V = vocabulary, R = B times W.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from outrider.core.rng import Role, RoundKeys
from outrider.core.tree import ROOT
from outrider.plugins.gpu.rounds.sampling import (
    Decisions,
    Rows,
    distributions,
    keyed_uniforms,
    torch_best,
    within,
)
from outrider.plugins.gpu.rounds.verdicts import (
    ChainNumbers,
    TreeDrafts,
    TreeVerdicts,
    follow_trees,
    judge_blocks,
    judge_trees,
    pick,
)

# How a batch is decided: all greedy; by draws from the target; by the token rule; by the block
# rule, for sampled chains.
Way = Literal["greedy", "match", "token", "block"]
# The ways that read the distributions of drafts.
DRAWN_WAYS: tuple[Way, ...] = ("token", "block")


class TreeProbs(Protocol):
    """Judge of a round's drafts. `depths_BW` says how many tokens lie between the pending one and
    each row's token. The second result says which rows have logits that are no numbers."""

    def judge(
        self, logits_BWV: Tensor, drafts: TreeDrafts, depths_BW: Tensor, rows: Rows
    ) -> tuple[TreeVerdicts, Tensor]: ...


class TorchTreeProbs:
    """The definition of `TreeProbs`, in tensor operators of any device."""

    def __init__(self, device: torch.device, way: Way, k: int) -> None:
        self._way = way
        self._decisions = Decisions.of_round(k, device)

    def judge(
        self, logits_BWV: Tensor, drafts: TreeDrafts, depths_BW: Tensor, rows: Rows
    ) -> tuple[TreeVerdicts, Tensor]:
        best_BW = torch_best(logits_BWV)
        if self._way == "greedy":
            return follow_trees(drafts, best_BW.clamp_min(0)), within(best_BW < 0, rows)
        greedy_B1 = rows.temperature_B[:, None] == 0
        finite_BW = logits_BWV.amax(-1).isfinite()
        broken_B = within(torch.where(greedy_B1, best_BW < 0, ~finite_BW), rows)
        soft_BWV = distributions(logits_BWV, rows)
        point_BWV = torch.zeros_like(soft_BWV).scatter_(-1, best_BW.clamp_min(0)[..., None], 1.0)
        p_BWV = torch.where(greedy_B1[..., None], point_BWV, soft_BWV)
        return self._verdicts(p_BWV, drafts, depths_BW, rows), broken_B

    def _verdicts(
        self, p_BWV: Tensor, drafts: TreeDrafts, depths_BW: Tensor, rows: Rows
    ) -> TreeVerdicts:
        size, keys, k = p_BWV.shape[-1], rows.keys, drafts.tokens_BK.shape[1]
        if self._way == "match":
            uniform_BW = _at_positions(keys, depths_BW)
            own_R = pick(p_BWV.flatten(0, 1), uniform_BW.flatten()).clamp_max(size - 1)
            return follow_trees(drafts, own_R.view_as(depths_BW))
        uniforms_BN = keyed_uniforms(keys, self._decisions)
        numbers = ChainNumbers(uniforms_BN[:, k : 2 * k], uniforms_BN[:, 2 * k :])
        if self._way == "block" and drafts.q_BKV is not None:
            chain = judge_blocks(drafts.tokens_BK, drafts.q_BKV, p_BWV, numbers, rows.depth_B)
            found = chain_path(chain.num_accepted_B, chain.next_B, k)
        else:
            found = judge_trees(drafts, p_BWV, numbers)
        return TreeVerdicts(found.path_BK, found.num_accepted_B, found.next_B.clamp_max(size - 1))


def _at_positions(keys: RoundKeys, depths_BW: Tensor) -> Tensor:
    """Return the uniforms_BW with which the match rule draws, by absolute position."""
    spread = spread_keys(keys, depths_BW)
    number = Decisions(*(depths_BW.new_full((1,), word) for word in (ROOT + 1, int(Role.POSITION))))
    return keyed_uniforms(spread, number).view(depths_BW.shape)


def spread_keys(keys: RoundKeys, depths_BW: Tensor) -> RoundKeys:
    """Return keys of every row of R, of rounds that start at the row's own position."""

    def spread(number_B: Tensor) -> Tensor:
        return number_B[:, None].expand_as(depths_BW)

    start_BW = spread(keys.start_B) + depths_BW
    return RoundKeys(
        spread(keys.seed_B).reshape(-1), spread(keys.sample_B).reshape(-1), start_BW.reshape(-1)
    )


def chain_path(num_accepted_B: Tensor, next_B: Tensor, k: int) -> TreeVerdicts:
    """Return verdicts on chains, whose nodes are accepted in order."""
    nodes_K = torch.arange(k, device=next_B.device)
    return TreeVerdicts(nodes_K.expand(next_B.shape[0], k), num_accepted_B, next_B)
