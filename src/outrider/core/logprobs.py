"""Log-probabilities of what was written, from the very law that decided and drew it.

Greedy decoding has no law but a point mass; there the logits are those that the choice was made
from, shaped but at temperature 1, so that the numbers still say how sure the model was.

Shapes:  N = laws of one sequence's round, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The natural logarithm of a token's probability, and the likeliest tokens at its place.

    `top` is ordered by probability, ties by id; tokens of no probability are left out.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def log_law(logits_NV: Tensor) -> Tensor:
    """Log-probabilities of `logits_NV` at temperature 1."""
    return torch.log_softmax(logits_NV, dim=-1)


def token_logprobs(
    log_NV: Tensor, laws: Sequence[int], tokens: Sequence[int], num_top: int
) -> tuple[TokenLogprobs, ...]:
    """Of `tokens`, the i-th of which came from row `laws[i]` of `log_NV`."""
    return tuple(
        TokenLogprobs(token, float(log_NV[law, token]), _top(log_NV[law], num_top))
        for law, token in zip(laws, tokens, strict=True)
    )


def _top(log_V: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    if count == 0:
        return ()
    values, ids = torch.sort(log_V, descending=True, stable=True)
    best = [(int(ids[place]), float(values[place])) for place in range(min(count, len(ids)))]
    return tuple((token, value) for token, value in best if value > float("-inf"))
