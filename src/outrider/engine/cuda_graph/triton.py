"""Sampling and acceptance of captured rounds by Triton kernels, a few launches a round.

The drafter's distributions are kept as logits; kernels make probabilities of them again where they
are needed, with the same bits.

Shapes:  B = rows, K = drafted tokens, W = K + 1, V = vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.core.rng import Role
from outrider.engine.cuda_graph.sampling import Judged, Rows
from outrider.kernels.triton.launchers import Chains, ProbRows, TritonProbs, Verdicts


class TritonRoundProbs:
    """`logits_BKV` is room for the drafter's logits; `block` chooses between the two rules."""

    def __init__(self, distributions: TritonProbs, logits_BKV: Tensor, *, block: bool) -> None:
        self._distributions, self._logits_BKV, self._block = distributions, logits_BKV, block

    def begin(self, rows: Rows) -> None:
        del rows

    def draft(self, logits_BV: Tensor, rows: Rows, node: int) -> tuple[Tensor, Tensor]:
        self._logits_BKV[:, node].copy_(logits_BV)
        token_B = torch.empty_like(rows.depth_B)
        distribution = ProbRows(logits_BV, rows.temperature_B)
        self._distributions.draw(distribution, rows.keys, node, Role.DRAFT, token_B)
        return token_B.clamp_min(0), token_B < 0

    def judge(self, logits_BWV: Tensor, tokens_BK: Tensor, rows: Rows) -> Judged:
        found = Verdicts(torch.empty_like(rows.depth_B), torch.empty_like(rows.depth_B))
        q = ProbRows(self._logits_BKV, rows.temperature_B) if tokens_BK.shape[1] else None
        self._distributions.judge(
            Chains(tokens_BK.contiguous(), rows.depth_B),
            ProbRows(logits_BWV, rows.temperature_B),
            q,
            rows.keys,
            found,
            block=self._block,
        )
        return Judged(found.num_accepted_B, found.next_B.clamp_min(0), found.next_B < 0)


def triton_best(distributions: TritonProbs, logits: Tensor) -> Tensor:
    """As `torch_best`."""
    best = torch.empty(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    distributions.argmax(logits.view(-1, logits.shape[-1]), best.view(-1))
    return best
