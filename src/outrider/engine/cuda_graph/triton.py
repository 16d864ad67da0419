"""Sampling and acceptance of captured rounds by Triton kernels, a few launches a round.

The drafter's distributions are kept as logits; kernels make probabilities of them again where they
are needed, with the same bits.

Shapes:  B = rows, K = drafted tokens, W = K + 1, V = vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.core.rng import Role
from outrider.engine.cuda_graph.sampling import Judged, Keys, Rows
from outrider.kernels.triton.launchers import Chains, ProbRows, RoundKeys, TritonProbs, Verdicts
from outrider.verify.batched import kept_prefix


class TritonRoundLaws:
    """`logits_BKV` is room for the drafter's logits; `block` chooses between the two rules."""

    def __init__(self, laws: TritonProbs, logits_BKV: Tensor, *, block: bool) -> None:
        self._laws, self._logits_BKV, self._block = laws, logits_BKV, block

    def begin(self, rows: Rows) -> None:
        del rows

    def draft(self, logits_BV: Tensor, rows: Rows, node: int) -> tuple[Tensor, Tensor]:
        self._logits_BKV[:, node].copy_(logits_BV)
        token_B = torch.empty_like(rows.depth_B)
        law = ProbRows(logits_BV, rows.temperature_B)
        self._laws.draw(law, _keys(rows.keys), node, Role.DRAFT, token_B)
        return token_B.clamp_min(0), token_B < 0

    def judge(self, logits_BWV: Tensor, tokens_BK: Tensor, rows: Rows) -> Judged:
        found = Verdicts(torch.empty_like(rows.depth_B), torch.empty_like(rows.depth_B))
        q = ProbRows(self._logits_BKV, rows.temperature_B) if tokens_BK.shape[1] else None
        self._laws.judge(
            Chains(tokens_BK.contiguous(), rows.depth_B),
            ProbRows(logits_BWV, rows.temperature_B),
            q,
            _keys(rows.keys),
            found,
            block=self._block,
        )
        return Judged(found.num_accepted_B, found.next_B.clamp_min(0), found.next_B < 0)


class TritonGreedyLaws:
    """For batches without a sampled row: one argmax a draft token, one for the target."""

    def __init__(self, laws: TritonProbs) -> None:
        self._laws = laws

    def begin(self, rows: Rows) -> None:
        del rows

    def draft(self, logits_BV: Tensor, rows: Rows, node: int) -> tuple[Tensor, Tensor]:
        del node
        token_B = torch.empty_like(rows.depth_B)
        self._laws.argmax(logits_BV, token_B)
        return token_B.clamp_min(0), token_B < 0

    def judge(self, logits_BWV: Tensor, tokens_BK: Tensor, rows: Rows) -> Judged:
        num_rows, num_laws, vocab_size = logits_BWV.shape
        best_R = torch.empty(num_rows * num_laws, dtype=torch.int64, device=tokens_BK.device)
        self._laws.argmax(logits_BWV.view(-1, vocab_size), best_R)
        best_BW = best_R.view(num_rows, num_laws)
        kept_B = kept_prefix(best_BW[:, :-1] == tokens_BK, rows.depth_B)
        next_B = best_BW.gather(-1, kept_B[:, None])[:, 0]
        place_BW = torch.ones_like(best_BW).cumsum(-1) - 1
        broken_B = ((best_BW < 0) & (place_BW <= rows.depth_B[:, None])).any(-1)
        return Judged(kept_B, next_B.clamp_min(0), broken_B)


def _keys(keys: Keys) -> RoundKeys:
    return RoundKeys(keys.seed_B, keys.sample_B, keys.start_B)
