"""Sampling and acceptance of captured rounds by Triton kernels, a few launches a round.

The drafter's distributions are kept as logits; kernels make probabilities of them again where they
are needed, with the same bits. Filtered ones are kept as probabilities.

Shapes:  B = rows, K = drafted tokens, W = K + 1, V = vocabulary, R = B times W.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import get_args

import torch
from torch import Tensor

from outrider.core.rng import Role, RoundKeys
from outrider.core.tree import ROOT
from outrider.plugins.gpu.kernels.filters import TritonFilters
from outrider.plugins.gpu.kernels.launchers import Chains, ProbRows, TritonProbs, Verdicts
from outrider.plugins.gpu.kernels.scratch import Workspace
from outrider.plugins.gpu.kernels.trees import TritonTrees
from outrider.plugins.gpu.kernels.trial import compile_launches
from outrider.plugins.gpu.rounds.sampling import (
    Filters,
    GreedyProbs,
    Judged,
    RoundProbs,
    Rows,
    within,
)
from outrider.plugins.gpu.rounds.trees import Way, chain_path, spread_keys
from outrider.plugins.gpu.rounds.verdicts import TreeDrafts, TreeVerdicts


class RoundKernels:
    """Kernels of one stream, over scratch memory of their own."""

    def __init__(self, device: torch.device) -> None:
        workspace, self._device = Workspace(device), device
        self.probs, self.filters = TritonProbs(workspace), TritonFilters(workspace)
        self.trees = TritonTrees(workspace)

    def make_probs(self, sampler: str, logits_BKV: Tensor | None) -> RoundProbs:
        """Return the decisions for device drafts; for greedy ones without space for logits."""
        if logits_BKV is None:
            return GreedyProbs(self.best)
        return TritonRoundProbs(self, logits_BKV, block=sampler == "block")

    def make_trees(self, way: Way, k: int) -> TritonTreeProbs:
        """Return the decisions for drafts of the host."""
        del k
        return TritonTreeProbs(self, way)

    def compile_ahead(self, vocab_size: int) -> None:
        """Compile all kernels that rounds may launch, so that no request waits for it."""
        compile_launches(self._device, partial(self._rehearse, vocab_size))

    def _rehearse(self, vocab_size: int) -> None:
        """Run one row with one drafted token and with none, in every way."""
        logits_12V = torch.zeros(1, 2, vocab_size, device=self._device)
        token_11 = torch.zeros(1, 1, dtype=torch.int64, device=self._device)
        q_11V, zero_1 = torch.zeros_like(logits_12V[:, 1:]), token_11[0]
        keys, limits = RoundKeys(zero_1, zero_1, zero_1), (zero_1.double(), zero_1.float())
        self.best(logits_12V)
        for filters in (None, Filters(zero_1, *limits)):
            rows = Rows(zero_1.float(), zero_1, keys, filters)
            for block in (True, False):
                probs = TritonRoundProbs(self, q_11V, block=block)
                probs.draft(logits_12V[:, 0], rows, 0)
                probs.judge(logits_12V, token_11, rows)
                probs.judge(logits_12V[:, :1], token_11[:, :0], rows)
            for way, q_BKV in product(get_args(Way), (None, q_11V)):
                drafts = TreeDrafts(token_11, token_11, zero_1 > 0, q_BKV)
                depths_12 = token_11.expand(1, 2).contiguous()
                TritonTreeProbs(self, way).judge(logits_12V, drafts, depths_12, rows)

    def best(self, logits: Tensor) -> Tensor:
        """Return the first largest of each row, as `torch_best` of sampling.py does."""
        best = torch.empty(logits.shape[:-1], dtype=torch.int64, device=logits.device)
        self.probs.argmax(logits.view(-1, logits.shape[-1]), best.view(-1))
        return best

    def rows(self, logits: Tensor, rows: Rows, *, ready: bool = False) -> ProbRows:
        """Return rows of logits of shape BV or BWV for the kernels. For filtered rows, or if they
        have to be `ready`, probabilities are written over the logits: a point mass for a greedy
        row, NaN for a row without numbers."""
        filters = rows.filters
        if filters is None and not ready:
            return ProbRows(logits, rows.temperature_B)
        flat_RV = logits.view(-1, logits.shape[-1])
        if filters is not None:
            self.filters.top_k(flat_RV, filters.top_k_B)
        self.probs.softmax(flat_RV, rows.temperature_B, flat_RV)
        if filters is not None:
            self.filters.keep_likely(flat_RV, filters.top_p_B, filters.min_p_B)
        return ProbRows(logits, None)

    def judge(
        self, tokens_BK: Tensor, p: ProbRows, q: ProbRows | None, rows: Rows, *, block: bool
    ) -> Judged:
        """Judge chains by one of the two rules."""
        found = Verdicts(torch.empty_like(rows.depth_B), torch.empty_like(rows.depth_B))
        chains = Chains(tokens_BK.contiguous(), rows.depth_B)
        self.probs.judge(chains, p, q, rows.keys, found, block=block)
        return Judged(found.num_accepted_B, found.next_B.clamp_min(0), found.next_B < 0)


class TritonRoundProbs:
    """Decisions by fused kernels. `logits_BKV` holds draft logits; `block` chooses the rule."""

    def __init__(self, kernels: RoundKernels, logits_BKV: Tensor, *, block: bool) -> None:
        self._kernels, self._logits_BKV, self._block = kernels, logits_BKV, block

    def begin(self, rows: Rows) -> None:
        del rows

    def draft(self, logits_BV: Tensor, rows: Rows, node: int) -> tuple[Tensor, Tensor]:
        distribution = self._kernels.rows(logits_BV, rows)
        self._logits_BKV[:, node].copy_(logits_BV)
        token_B = torch.empty_like(rows.depth_B)
        self._kernels.probs.draw(distribution, rows.keys, node, Role.DRAFT, token_B)
        return token_B.clamp_min(0), token_B < 0

    def judge(self, logits_BWV: Tensor, tokens_BK: Tensor, rows: Rows) -> Judged:
        p = self._kernels.rows(logits_BWV, rows)
        # Filtered rows are probabilities, in both models.
        q = ProbRows(self._logits_BKV, p.temperature_B) if tokens_BK.shape[1] else None
        return self._kernels.judge(tokens_BK, p, q, rows, block=self._block)


class TritonTreeProbs:
    """Judge of drafts that the host made, in one way (trees.py), by fused kernels."""

    def __init__(self, kernels: RoundKernels, way: Way) -> None:
        self._kernels, self._way = kernels, way

    def judge(
        self, logits_BWV: Tensor, drafts: TreeDrafts, depths_BW: Tensor, rows: Rows
    ) -> tuple[TreeVerdicts, Tensor]:
        kernels, way, k = self._kernels, self._way, drafts.tokens_BK.shape[1]
        if way == "block" and drafts.q_BKV is not None:
            p, q = kernels.rows(logits_BWV, rows), ProbRows(drafts.q_BKV, None)
            found = kernels.judge(drafts.tokens_BK, p, q, rows, block=True)
            return chain_path(found.kept_B, found.next_B, k), found.broken_B
        tree = (drafts.tokens_BK, drafts.parents_BK)
        path_BK, next_B = torch.empty_like(drafts.tokens_BK), torch.empty_like(rows.depth_B)
        out = (path_BK, torch.empty_like(next_B), next_B)
        if way in ("greedy", "match"):
            own = self._own if way == "match" else self._best
            own_BW = own(logits_BWV, depths_BW, rows)
            kernels.trees.follow(tree, own_BW, out)
            broken_B = within(own_BW < 0, rows)
        else:
            p = kernels.rows(logits_BWV, rows, ready=True)
            drawn = (drafts.drawn_B, drafts.q_BKV)
            kernels.trees.walk(tree, drawn, p.rows_RV, rows.keys, out)
            broken_B = next_B < 0
        return TreeVerdicts(path_BK, out[1], next_B.clamp_min(0)), broken_B

    def _best(self, logits_BWV: Tensor, depths_BW: Tensor, rows: Rows) -> Tensor:
        del depths_BW, rows
        return self._kernels.best(logits_BWV)

    def _own(self, logits_BWV: Tensor, depths_BW: Tensor, rows: Rows) -> Tensor:
        """Return the target's own token after each row's token, drawn by its position."""
        p, own_BW = self._kernels.rows(logits_BWV, rows, ready=True), torch.empty_like(depths_BW)
        flat = ProbRows(p.rows_RV.view(-1, logits_BWV.shape[-1]), None)
        keys = spread_keys(rows.keys, depths_BW)
        self._kernels.probs.draw(flat, keys, ROOT, Role.POSITION, own_BW.view(-1))
        return own_BW
