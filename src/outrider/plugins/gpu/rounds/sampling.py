"""Sampling and acceptance inside a captured round: logits in, tokens out, without the host.

`RoundProbs` is the interface; `TorchRoundProbs` is the definition, in tensor operators of any
device, and `TritonRoundProbs` (triton.py) has fused kernels. Decisions are those of verify/exact.py
with the same numbers, row by row up to its own depth. Greedy and sampled rows are judged together.

Shapes:  B = rows, K = drafted tokens, W = K + 1, V = vocabulary, N = numbers of a round or numbers
         of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from outrider.core.rng import Role, RoundKeys
from outrider.core.sampling import MIN_TEMPERATURE, nucleus, renormalised
from outrider.core.tree import ROOT
from outrider.engine.round import LiveSequence
from outrider.plugins.gpu.rounds.verdicts import (
    ChainNumbers,
    ChainVerdicts,
    judge_blocks,
    judge_chains,
    kept_prefix,
    pick,
)


def request_refusal(seq: LiveSequence) -> str | None:
    """Return why no captured round can decide for a request; None if one can."""
    params = seq.params
    obstacles = (
        (params.logprobs or seq.is_unscored, "a request asks for log-probabilities"),
        (params.round_events, "a request asks for round events"),
    )
    return next((reason for applies, reason in obstacles if applies), None)


@dataclass(frozen=True, slots=True)
class Filters:
    """Filters of each row: top-k (int64, 0 keeps all tokens), top-p (float64, 1 keeps all) and
    min-p (float32, 0 keeps all)."""

    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a round. `temperature_B` is float32, 0 for greedy rows; `depth_B` (int64) is how
    many of the K tokens count: near the limit of a text rounds draft less. Without `filters` all
    rows keep all tokens."""

    temperature_B: Tensor
    depth_B: Tensor
    keys: RoundKeys
    filters: Filters | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """Decisions of a round: the number of accepted tokens of each row and the target's own token
    after them, both int64, and whether its logits were no numbers: then the token is arbitrary."""

    kept_B: Tensor
    next_B: Tensor
    broken_B: Tensor


class RoundProbs(Protocol):
    """Distributions of a round: draws drafts node by node and judges them."""

    def begin(self, rows: Rows) -> None:
        """Begin a round of `rows`."""
        ...

    def draft(self, logits_BV: Tensor, rows: Rows, node: int) -> tuple[Tensor, Tensor]:
        """Return a token of each row (int64), and whether its logits were no numbers."""
        ...

    def judge(self, logits_BWV: Tensor, tokens_BK: Tensor, rows: Rows) -> Judged: ...


_MASK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Decisions:
    """Node and role of each random number that a row may need, int64, read every round."""

    nodes_N: Tensor
    roles_N: Tensor

    @classmethod
    def of_round(cls, k: int, device: torch.device) -> Decisions:
        """Return the keys of k draws, k coins and k + 1 target tokens, in this order."""
        named = [(node, Role.DRAFT) for node in range(k)]
        named += [(node, Role.ACCEPT) for node in range(k)]
        named += [(node, Role.NEXT) for node in range(ROOT, k)]
        pairs_N2 = torch.tensor([(node + 1, int(role)) for node, role in named], device=device)
        return cls(pairs_N2[:, 0].contiguous(), pairs_N2[:, 1].contiguous())


def keyed_uniforms(keys: RoundKeys, decisions: Decisions) -> Tensor:
    """Return uniforms_BN in [0, 1), float64, bit for bit those of `KeyedRng`.

    A captured round cannot ask the host for a number, so it runs the Philox4x32-10 of core/rng.py
    over the same key (seed, sample, start, node, role): the text of a seed is the same. A product
    of two 32-bit words may overflow int64; it wraps, and its halves are right.
    """
    k0_B1, k1_B1 = (keys.seed_B & _MASK)[:, None], ((keys.seed_B >> 32) & _MASK)[:, None]
    c0, c1 = decisions.nodes_N[None], keys.start_B[:, None]
    c2, c3 = keys.sample_B[:, None], decisions.roles_N[None]
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1 = ((p1 >> 32) & _MASK) ^ c1 ^ k0_B1, p1 & _MASK
        c2, c3 = ((p0 >> 32) & _MASK) ^ c3 ^ k1_B1, p0 & _MASK
        k0_B1, k1_B1 = (k0_B1 + 0x9E3779B9) & _MASK, (k1_B1 + 0xBB67AE85) & _MASK
    return ((c0 << 21) | (c1 >> 11)).double() * 2.0**-53


Rule: TypeAlias = Callable[[Tensor, Tensor, Tensor, ChainNumbers, Tensor], ChainVerdicts]
# Rules of captured rounds, by the names of their samplers.
RULES: Mapping[str, Rule] = {"token": judge_chains, "block": judge_blocks}


# The first largest of each row of logits, -1 for a row with a NaN.
Best: TypeAlias = Callable[[Tensor], Tensor]


def torch_best(logits: Tensor) -> Tensor:
    most, best = logits.max(-1)
    return torch.where(most.isnan(), -1, best)


class GreedyProbs:
    """Decisions of batches without a sampled row: no distribution is made."""

    def __init__(self, best: Best = torch_best) -> None:
        self._best = best

    def begin(self, rows: Rows) -> None:
        del rows

    def draft(self, logits_BV: Tensor, rows: Rows, node: int) -> tuple[Tensor, Tensor]:
        del rows, node
        token_B = self._best(logits_BV)
        return token_B.clamp_min(0), token_B < 0

    def judge(self, logits_BWV: Tensor, tokens_BK: Tensor, rows: Rows) -> Judged:
        """Return how far each chain follows the first largest logits."""
        best_BW = self._best(logits_BWV)
        kept_B = kept_prefix(best_BW[:, :-1] == tokens_BK, rows.depth_B)
        next_B = best_BW.gather(-1, kept_B[:, None])[:, 0]
        return Judged(kept_B, next_B.clamp_min(0), within(best_BW < 0, rows))


class TorchRoundProbs:
    """Decisions in tensor operators of any device. `probs_BKV` is space for draft distributions."""

    def __init__(self, rule: Rule, decisions: Decisions, probs_BKV: Tensor) -> None:
        self._rule, self._decisions, self._probs_BKV = rule, decisions, probs_BKV
        self._greedy = GreedyProbs()
        self._uniforms_BN = torch.zeros(
            probs_BKV.shape[0],
            decisions.nodes_N.shape[0],
            dtype=torch.float64,
            device=probs_BKV.device,
        )

    def begin(self, rows: Rows) -> None:
        self._uniforms_BN.copy_(keyed_uniforms(rows.keys, self._decisions))

    def draft(self, logits_BV: Tensor, rows: Rows, node: int) -> tuple[Tensor, Tensor]:
        probs_BV = self._probs_BKV[:, node]
        probs_BV.copy_(distributions(logits_BV[:, None], rows)[:, 0])
        drawn_B = pick(probs_BV, self._uniforms_BN[:, node]).clamp_max(logits_BV.shape[1] - 1)
        chosen_B, broken_B = self._greedy.draft(logits_BV, rows, node)
        greedy_B = rows.temperature_B == 0
        # An infinite logit can still be the largest, but it makes no distribution.
        infinite_B = ~logits_BV.amax(-1).isfinite()
        return torch.where(greedy_B, chosen_B, drawn_B), torch.where(greedy_B, broken_B, infinite_B)

    def judge(self, logits_BWV: Tensor, tokens_BK: Tensor, rows: Rows) -> Judged:
        k = tokens_BK.shape[1]
        coins_BK, next_BW = self._uniforms_BN[:, k : 2 * k], self._uniforms_BN[:, 2 * k :]
        drawn = self._rule(
            tokens_BK,
            self._probs_BKV,
            distributions(logits_BWV, rows),
            ChainNumbers(coins_BK, next_BW),
            rows.depth_B,
        )
        next_B = drawn.next_B.clamp_max(logits_BWV.shape[2] - 1)
        greedy = self._greedy.judge(logits_BWV, tokens_BK, rows)
        infinite_B = within(~logits_BWV.amax(-1).isfinite(), rows)
        greedy_B = rows.temperature_B == 0
        return Judged(
            torch.where(greedy_B, greedy.kept_B, drawn.num_accepted_B),
            torch.where(greedy_B, greedy.next_B, next_B),
            torch.where(greedy_B, greedy.broken_B, infinite_B),
        )


def distributions(logits_BXV: Tensor, rows: Rows) -> Tensor:
    """Return filtered probabilities at each row's temperature; greedy rows mean nothing."""
    temperature_B, filters = rows.temperature_B, rows.filters
    safe_B = torch.where(temperature_B > 0, temperature_B.clamp_min(MIN_TEMPERATURE), 1.0)
    if filters is not None:
        logits_BXV = _top_k(logits_BXV, filters.top_k_B[:, None, None])
    probs_BXV = torch.softmax(logits_BXV / safe_B[:, None, None], dim=-1)
    return probs_BXV if filters is None else _likely(probs_BXV, filters)


def _top_k(logits_BXV: Tensor, k_B11: Tensor) -> Tensor:
    """Apply `top_k` of core/sampling.py, with a k for each row."""
    rank_BX1 = (k_B11 - 1).clamp(0, logits_BXV.shape[-1] - 1).expand(*logits_BXV.shape[:2], 1)
    edge_BX1 = logits_BXV.sort(dim=-1, descending=True).values.gather(-1, rank_BX1)
    return logits_BXV.masked_fill((logits_BXV < edge_BX1) & (k_B11 > 0), float("-inf"))


def _likely(probs_BXV: Tensor, filters: Filters) -> Tensor:
    """Apply `keep_likely` of core/sampling.py, with limits for each row."""
    top_p_N1, min_p_N1 = (
        limit_B.repeat_interleave(probs_BXV.shape[1])[:, None]
        for limit_B in (filters.top_p_B, filters.min_p_B)
    )
    probs_NV = probs_BXV.flatten(0, 1)
    probs_NV = torch.where(top_p_N1 < 1, nucleus(probs_NV, top_p_N1), probs_NV)
    floor_N1 = min_p_N1 * probs_NV.amax(-1, keepdim=True)
    kept_NV = renormalised(probs_NV.masked_fill(probs_NV < floor_N1, 0))
    return torch.where(min_p_N1 > 0, kept_NV, probs_NV).view_as(probs_BXV)


def within(broken_BW: Tensor, rows: Rows) -> Tensor:
    """Return which rows are broken within their chains, up to each chain's end."""
    position_BW = torch.ones_like(broken_BW, dtype=torch.int64).cumsum(-1) - 1
    return (broken_BW & (position_BW <= rows.depth_B[:, None])).any(-1)
