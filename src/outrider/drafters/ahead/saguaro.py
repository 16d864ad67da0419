"""Saguaro sampling: draft with fewer of the tokens that a refusal would most likely bring.

The law q that a draft token is drawn from gives its F likeliest tokens only the share C of what
they had: q'(t) ~ C q(t) among them, q'(t) ~ q(t) elsewhere. After a refusal the target draws from
max(p - q', 0), which then has its mass on exactly those F tokens; and F is how many the drafter
foresees there. More verdicts are foreseen, fewer drafts are kept. C = 1 changes nothing, C = 0
never drafts a likely token. q' is the law that is reported, so the output keeps its law whatever C.
(Kumar, Dao, May, "Speculative speculative decoding", Definition 14.)

Shapes:  N = laws, V = vocabulary, F = likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core.clock import host_ints
from outrider.core.errors import ContractError
from outrider.drafters.ahead.forecast import PRIOR_ALPHA
from outrider.estimate.theory import Misses, chances, optimal


class Saguaro:
    """Changes the laws of draft node `node` in place. `fan_out[node]` is its F; a node behind them
    has the last one's."""

    def __init__(self, weight: float, fan_out: Sequence[int]) -> None:
        if not 0 <= weight < 1:
            raise ContractError("a weight lies between 0 and 1")
        if not fan_out:
            raise ContractError("there is no fan-out")
        self._weight = weight
        self._fan_out = tuple(fan_out)

    @classmethod
    def planned(cls, weight: float, *, budget: int, depth: int) -> Saguaro:
        """With the counts that are best before anything is known. They stay as they are, so that a
        token's law does not depend on what was foreseen before."""
        likely = chances(PRIOR_ALPHA, depth)
        return cls(weight, optimal(budget, likely, Misses())[:depth])

    def __call__(self, laws_NV: Tensor, node: int) -> None:
        """A law with no mass outside of its likeliest tokens stays as it is where C = 0."""
        count = self._fan_out[min(node, len(self._fan_out) - 1)]
        if not count:
            return
        with torch.inference_mode():
            for law_V in laws_NV:
                self._soften(law_V, count)

    def _soften(self, law_V: Tensor, count: int) -> None:
        changed_V = law_V.clone()
        changed_V[likeliest(law_V, count)] *= self._weight
        # A running sum adds in one order, whatever the number of threads.
        total = changed_V.cumsum(0, dtype=torch.float64)[-1]
        if float(total) > 0:
            law_V.copy_(changed_V / total)


def likeliest(scores_V: Tensor, count: int) -> list[int]:
    """Exactly `count` ids of the largest scores, the largest first; of equal ones the first."""
    count = min(count, scores_V.shape[0])
    edge = torch.topk(scores_V, count).values[-1]
    ids = (scores_V >= edge).nonzero()[:, 0]
    order = torch.sort(scores_V[ids], descending=True, stable=True).indices
    return host_ints(ids[order[:count]])
