"""Sampling and acceptance inside a captured round: logits in, tokens out, without the host.

`RoundLaws` is the interface; `TorchRoundLaws` is the definition, in tensor operators of any device,
and `TritonRoundLaws` (triton.py) has fused kernels. Decisions are those of verify/exact.py with the
same numbers, row by row up to its own depth. Greedy rows are judged beside sampled ones.

Shapes:  B = rows, K = drafted tokens, W = K + 1, V = vocabulary, N = numbers of a round or numbers
         of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from outrider.core.rng import Role
from outrider.core.sampling import MIN_TEMPERATURE
from outrider.core.tree import ROOT
from outrider.verify.batched import leftover, pick, ratios


@dataclass(frozen=True, slots=True)
class Keys:
    """What the numbers of a round are keyed by, but for node and role. All int64, of shape B."""

    seed_B: Tensor
    sample_B: Tensor
    start_B: Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a round. `temperature_B` is float32, 0 for greedy rows; `depth_B` (int64) is how
    many of the K tokens count: near the limit of a text rounds draft less."""

    temperature_B: Tensor
    depth_B: Tensor
    keys: Keys


@dataclass(frozen=True, slots=True)
class Judged:
    """How many tokens each row keeps, the target's own token after them, both int64, and whether
    its logits were no numbers: then the token is any."""

    kept_B: Tensor
    next_B: Tensor
    broken_B: Tensor


class RoundLaws(Protocol):
    """Draws drafts, node by node, and judges them. Remembers the laws of a round's drafts."""

    def begin(self, rows: Rows) -> None:
        """A round of `rows` begins."""
        ...

    def draft(self, logits_BV: Tensor, rows: Rows, node: int) -> tuple[Tensor, Tensor]:
        """A token a row (int64), and whether its logits were no numbers."""
        ...

    def judge(self, logits_BWV: Tensor, tokens_BK: Tensor, rows: Rows) -> Judged: ...


_MASK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Decisions:
    """Node and role of each number that a row may ask for, int64: made once, read every round."""

    nodes_N: Tensor
    roles_N: Tensor

    @classmethod
    def of_round(cls, k: int, device: torch.device) -> Decisions:
        """Of k draws, k coins and k + 1 tokens of the target's own, in this order."""
        named = [(node, Role.DRAFT) for node in range(k)]
        named += [(node, Role.ACCEPT) for node in range(k)]
        named += [(node, Role.NEXT) for node in range(ROOT, k)]
        pairs_N2 = torch.tensor([(node + 1, int(role)) for node, role in named], device=device)
        return cls(pairs_N2[:, 0].contiguous(), pairs_N2[:, 1].contiguous())


def keyed_uniforms(keys: Keys, decisions: Decisions) -> Tensor:
    """uniforms_BN in [0, 1), float64, bit for bit those of `KeyedRng`.

    A captured round cannot ask the host for a number, so it runs the Philox4x32-10 of core/rng.py
    over the same key (seed, sample, start, node, role): the text of a seed is the same. A product
    of two words of 32 bits may pass the sign of int64; it wraps, and its halves are right.
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


@dataclass(frozen=True, slots=True)
class ChainBatch:
    """Chains and their laws. `coins_BK` and `next_BW` are uniform float64 numbers."""

    tokens_BK: Tensor
    depth_B: Tensor
    p_BWV: Tensor
    q_BKV: Tensor
    coins_BK: Tensor
    next_BW: Tensor


# How many tokens each row keeps, and the share of its residual (None: one).
Rule: TypeAlias = Callable[[ChainBatch], tuple[Tensor, Tensor | None]]


class GreedyLaws:
    """For batches without a sampled row: no law is made."""

    def begin(self, rows: Rows) -> None:
        del rows

    def draft(self, logits_BV: Tensor, rows: Rows, node: int) -> tuple[Tensor, Tensor]:
        del rows, node
        most_B, best_B = logits_BV.max(-1)
        return best_B, most_B.isnan()

    def judge(self, logits_BWV: Tensor, tokens_BK: Tensor, rows: Rows) -> Judged:
        return judge_greedy(logits_BWV, tokens_BK, rows)


class TorchRoundLaws:
    """`laws_BKV` is room for the laws that drafts are drawn from."""

    def __init__(self, rule: Rule, decisions: Decisions, laws_BKV: Tensor) -> None:
        self._rule, self._decisions, self._laws_BKV = rule, decisions, laws_BKV
        self._uniforms_BN = torch.zeros(
            laws_BKV.shape[0],
            decisions.nodes_N.shape[0],
            dtype=torch.float64,
            device=laws_BKV.device,
        )

    def begin(self, rows: Rows) -> None:
        self._uniforms_BN.copy_(keyed_uniforms(rows.keys, self._decisions))

    def draft(self, logits_BV: Tensor, rows: Rows, node: int) -> tuple[Tensor, Tensor]:
        most_B, best_B = logits_BV.max(-1)
        law_BV = self._laws_BKV[:, node]
        law_BV.copy_(laws(logits_BV[:, None], rows.temperature_B)[:, 0])
        drawn_B = pick(law_BV, self._uniforms_BN[:, node]).clamp_max(logits_BV.shape[1] - 1)
        greedy_B = rows.temperature_B == 0
        return torch.where(greedy_B, best_B, drawn_B), _broken(most_B, greedy_B)

    def judge(self, logits_BWV: Tensor, tokens_BK: Tensor, rows: Rows) -> Judged:
        k = tokens_BK.shape[1]
        offer = ChainBatch(
            tokens_BK,
            rows.depth_B,
            laws(logits_BWV, rows.temperature_B),
            self._laws_BKV,
            self._uniforms_BN[:, k : 2 * k],
            self._uniforms_BN[:, 2 * k :],
        )
        kept_B, share_B = self._rule(offer)
        drawn_B = _own_token(offer, kept_B, share_B)
        greedy, is_greedy_B = judge_greedy(logits_BWV, tokens_BK, rows), rows.temperature_B == 0
        return Judged(
            torch.where(is_greedy_B, greedy.kept_B, kept_B),
            torch.where(is_greedy_B, greedy.next_B, drawn_B),
            greedy.broken_B,
        )


def laws(logits_BXV: Tensor, temperature_B: Tensor) -> Tensor:
    """Probabilities at each row's temperature; those of greedy rows mean nothing."""
    safe_B = torch.where(temperature_B > 0, temperature_B.clamp_min(MIN_TEMPERATURE), 1.0)
    return torch.softmax(logits_BXV / safe_B[:, None, None], dim=-1)


def judge_greedy(logits_BWV: Tensor, tokens_BK: Tensor, rows: Rows) -> Judged:
    """How far each chain follows the first largest logits."""
    most_BW, best_BW = logits_BWV.max(-1)
    kept_B = kept_prefix(best_BW[:, :-1] == tokens_BK, rows.depth_B)
    next_B = best_BW.gather(-1, kept_B[:, None])[:, 0]
    return Judged(kept_B, next_B, _any_broken(most_BW, rows))


def token_rule(offer: ChainBatch) -> tuple[Tensor, Tensor | None]:
    """As verify/exact.py."""
    chance_BK = ratios(offer.tokens_BK, offer.q_BKV, offer.p_BWV)
    return kept_prefix((chance_BK >= 1) | (offer.coins_BK < chance_BK), offer.depth_B), None


def block_rule(offer: ChainBatch) -> tuple[Tensor, Tensor | None]:
    """As verify/exact.py."""
    p_BWV, q_BKV, depth_B = offer.p_BWV, offer.q_BKV, offer.depth_B
    shares = [torch.ones_like(offer.next_BW[:, 0])]
    for ratio_B in ratios(offer.tokens_BK, q_BKV, p_BWV).unbind(-1):
        shares.append((shares[-1] * ratio_B).clamp_max(1))
    kept_B = torch.zeros_like(depth_B)
    for length in range(1, len(shares)):
        chance_B = shares[length]
        if length + 1 < len(shares):
            left_B = _uncovered(p_BWV[:, length], q_BKV[:, length], chance_B)
            odds_B = torch.where(left_B > 0, left_B / (left_B + 1 - chance_B), chance_B == 1)
            chance_B = torch.where(depth_B > length, odds_B, chance_B)
        heads_B = (chance_B >= 1) | (offer.coins_BK[:, length - 1] < chance_B)
        kept_B = torch.where(heads_B & (depth_B >= length), length, kept_B)
    return kept_B, torch.stack(shares, -1).gather(-1, kept_B[:, None])[:, 0]


RULES: dict[str, Rule] = {"token": token_rule, "block": block_rule}


def kept_prefix(heads_BK: Tensor, depth_B: Tensor) -> Tensor:
    """The longest beginning of heads within each row's depth."""
    place_BK = torch.ones_like(heads_BK, dtype=torch.int64).cumsum(-1)
    return (heads_BK & (place_BK <= depth_B[:, None])).cumprod(-1).sum(-1)


def _uncovered(p_BV: Tensor, q_BV: Tensor, share_B: Tensor) -> Tensor:
    return (share_B[:, None] * p_BV.double() - q_BV.double()).clamp_min(0).sum(-1)


def _own_token(offer: ChainBatch, kept_B: Tensor, share_B: Tensor | None) -> Tensor:
    """The residual's token, or the bonus where a row kept all of its chain."""
    p_BV = _at(offer.p_BWV, kept_B)
    weights_BV, k = p_BV, offer.tokens_BK.shape[1]
    if k:
        q_BV = _at(offer.q_BKV, kept_B.clamp_max(k - 1))
        left_BV = leftover(p_BV, q_BV, share_B)
        refused_B1 = (kept_B < offer.depth_B)[:, None]
        weights_BV = torch.where(refused_B1, left_BV, p_BV.to(left_BV.dtype))
    uniform_B = offer.next_BW.gather(-1, kept_B[:, None])[:, 0]
    return pick(weights_BV, uniform_B).clamp_max(p_BV.shape[1] - 1)


def _at(laws_BXV: Tensor, place_B: Tensor) -> Tensor:
    index_B1V = place_B[:, None, None].expand(-1, 1, laws_BXV.shape[2])
    return laws_BXV.gather(1, index_B1V)[:, 0]


def _broken(most: Tensor, greedy: Tensor) -> Tensor:
    """An infinite logit still has a place in an order, but no law."""
    return torch.where(greedy, most.isnan(), ~most.isfinite())


def _any_broken(most_BW: Tensor, rows: Rows) -> Tensor:
    """Rows behind a chain's end are nobody's."""
    place_BW = torch.ones_like(most_BW, dtype=torch.int64).cumsum(-1) - 1
    broken_BW = _broken(most_BW, (rows.temperature_B == 0)[:, None])
    return (broken_BW & (place_BW <= rows.depth_B[:, None])).any(-1)
