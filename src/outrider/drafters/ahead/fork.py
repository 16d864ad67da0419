"""From the laws along a draft to the verdicts worth drafting for.

A verdict is n accepted tokens and one of the target's own. Where the token after them was refused,
the target's own token is another: the residual max(p - q, 0) has no mass where q was larger, and a
greedy target said something else. So the refused token is left out of the list; only after a draft
that was accepted whole may anything follow. Leaving it out changes no law that is drawn from, just
what is prepared.

Shapes:  N = places of a draft, the root first, V = vocabulary, M = listed ids.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from outrider.core.clock import host_rows
from outrider.drafters.ahead.forecast import NUM_RANKS, Forecast


@dataclass(frozen=True, slots=True)
class Branch:
    """A verdict: `accepted` tokens of the draft, then `token`."""

    accepted: int
    token: int


@dataclass(frozen=True, slots=True)
class Ranking:
    """For n = 0..d accepted tokens: ids by falling share, and the share of each."""

    ids: Sequence[Sequence[int]]
    shares: Sequence[Sequence[float]]


def rank(logits_NV: Tensor, draft: Sequence[int], temperature: float) -> Ranking:
    """What may follow each place of `draft`, by the draft model's logits after it. Shares are at
    `temperature`, or at 1 where that is 0, and sum to one with what is not listed.

    Writes over the logits of refused tokens.
    """
    places = masked_places(draft)
    with torch.inference_mode():
        logits_NV[places, [draft[place] for place in places]] = float("-inf")
        scaled_NV = logits_NV / (temperature or 1.0)
        count = min(NUM_RANKS, logits_NV.shape[-1])
        top_NM, ids_NM = torch.topk(scaled_NV, count, dim=-1)
        shares_NM = (top_NM - scaled_NV.logsumexp(-1, keepdim=True)).exp()
        shares = cast("list[list[float]]", cast("object", host_rows(shares_NM)))
    # The refused token, and what a mask of the model itself forbids, comes last with no share.
    kept = [sum(share > 0 for share in row) for row in shares]
    ids = [row[:n] for row, n in zip(host_rows(ids_NM), kept, strict=True)]
    return Ranking(ids, [row[:n] for row, n in zip(shares, kept, strict=True)])


def masked_places(draft: Sequence[int]) -> list[int]:
    """Those after which the token that was drafted there cannot follow: all but the last."""
    return list(range(len(draft)))


def fork(ranking: Ranking, forecast: Forecast, budget: int, *, hit: bool) -> list[Branch]:
    """At most `budget` branches, by the forecast's policy, for a draft that was foreseen or not."""
    depth = len(ranking.ids) - 1
    if forecast.policy == "top":
        return _top(ranking, forecast.chances(depth, hit=hit), budget)
    counts = forecast.counts(budget, depth, hit=hit)
    return [
        Branch(n, token)
        for n, (ids, count) in enumerate(zip(ranking.ids, counts, strict=True))
        for token in ids[:count]
    ]


def _top(ranking: Ranking, likely: Sequence[float], budget: int) -> list[Branch]:
    """The likeliest of all: P(n) times the share of the token there."""
    scored = [
        (p * share, Branch(n, token))
        for n, p in enumerate(likely)
        for token, share in zip(ranking.ids[n], ranking.shares[n], strict=True)
    ]
    return [branch for _, branch in heapq.nlargest(budget, scored, key=lambda pair: pair[0])]
