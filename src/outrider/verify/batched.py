"""Acceptance rules on tensors: many chains judged at once, each up to its own depth.

Each function makes the decisions of its rule in exact.py, chain by chain, given the same numbers.
This form serves captured rounds, and large samples in `outrider verify`. A pass over all
distributions of a batch costs more than the walk of one chain, which reads the vocabulary only
after a rejection, so rounds on a CPU walk. No function waits for the device.

Shapes:  B = chains, K = drafted tokens, W = K + 1 = distributions of a chain, V = vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from outrider.core.config import RULES
from outrider.core.draft import Verdict
from outrider.core.errors import ConfigError, ContractError
from outrider.core.philox import Word, philox_uniforms
from outrider.core.protocols import AcceptanceRule, VerifyRow
from outrider.core.rng import Role
from outrider.core.sampling import PLAIN, Sampling, draw
from outrider.core.tree import ROOT
from outrider.verify.exact import BlockRule, CoupledRule, MatchRule, TokenRule


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


def keyed_numbers(seed: Word, sample: Word, start: Word, num_tokens: int) -> ChainNumbers:
    """The numbers that `KeyedRng(seed, sample, start)` draws in a round.

    Each of the three is an int or a uint64 array of shape B; at least one is an array.
    """
    accept = [keyed_uniforms(seed, sample, start, node, Role.ACCEPT) for node in range(num_tokens)]
    nodes = range(ROOT, num_tokens)
    following = [keyed_uniforms(seed, sample, start, node, Role.NEXT) for node in nodes]
    accept_BK = torch.stack(accept, -1) if accept else following[0].new_empty(len(following[0]), 0)
    return ChainNumbers(accept_BK, torch.stack(following, -1))


def keyed_uniforms(seed: Word, sample: Word, start: Word, node: int, role: Role) -> Tensor:
    """Numbers of shape B that decide `role` of `node`; arguments as for `keyed_numbers`."""
    return torch.as_tensor(philox_uniforms(seed, (node + 1, start, sample, int(role))))


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


# Each takes the operators of its comparisons; the last two do not compare, they draw.
EXACT: Mapping[str, Callable[[Sampling], AcceptanceRule]] = {
    "block": BlockRule,
    "token": TokenRule,
    "match": lambda _: MatchRule(),
    "coupled": lambda _: CoupledRule(),
}


def exact_rules(sampling: Sampling = PLAIN) -> Mapping[str, AcceptanceRule]:
    """Rules that a request may choose, by name."""
    return {name: make(sampling) for name, make in EXACT.items()}


# Lossy acceptance rules, for study: accept draft tokens that the target finds likely.
#
# The walk descends from the root to the first child that passes the rule's test; if none passes,
# the target's own token is drawn from its distribution there. The test sees the target's
# distribution at the child's parent (at temperature 1 under greedy decoding). A token of
# probability 0 never passes, so bans and filters hold.
#
#     typical    p(x) > min(e, sqrt(e) exp(-H)), H the entropy of p       e = 0.09
#     p_min      x is the likeliest, or p(x) >= t                         t = 0.5
#     threshold  p(x) >= t                                                t = 0.5
#     top_k      fewer than k tokens are likelier                         k = 5
#     nucleus    x is in the smallest set of likeliest tokens of mass t   t = 0.9
#
# Typical acceptance is that of Medusa (Cai et al. 2024, arXiv 2401.10774), after the truncation of
# Hewitt, Manning, Liang 2022 (arXiv 2210.15191). p_min with t = 1 is strict argmax: at temperature
# 0 the text is the target's own.
#
# Shapes:  N = distributions, V = vocabulary.
@dataclass(frozen=True, slots=True)
class Candidate:
    """A drafted token and the target's distribution at its position: `distribution` decides,
    `soft_V` has the probabilities for thresholds."""

    token: int
    distribution: int | Tensor
    soft_V: Tensor

    @property
    def probability(self) -> float:
        return float(self.soft_V[self.token])

    @property
    def likeliest(self) -> bool:
        if isinstance(self.distribution, int):
            return self.token == self.distribution
        return self.token == int(self.distribution.argmax())

    def likelier(self) -> Tensor:
        """Booleans of shape V for the tokens that come before this one, likeliest first.

        Among equals the lower id comes first.
        """
        mine_V = self.soft_V[self.token]
        tied_V = self.soft_V == mine_V
        tied_V[self.token :] = False
        return (self.soft_V > mine_V) | tied_V


Test: TypeAlias = Callable[[Candidate, float], bool]


@dataclass(frozen=True, slots=True)
class LossyRule:
    """Accepts the tokens that `passes` at the threshold `leniency`."""

    name: str
    passes: Test
    leniency: float
    exact: bool = False

    def __call__(self, rows: Sequence[VerifyRow]) -> list[Verdict]:
        return [self._judge(row) for row in rows]

    def _judge(self, row: VerifyRow) -> Verdict:
        path: list[int] = []
        node = ROOT
        while True:
            child = self._first(row, node)
            if child is None:
                return Verdict(tuple(path), draw(row.distributions.at(node + 1), row.rng, node))
            node = child
            path.append(node)

    def _first(self, row: VerifyRow, node: int) -> int | None:
        """The first child of `node` that passes."""
        soft_NV = row.distributions.probs_NV if row.soft_NV is None else row.soft_NV
        if soft_NV is None:
            raise ContractError("a lossy rule needs soft distributions")
        for child in row.draft.children(node):
            offer = Candidate(
                row.draft.tokens[child], row.distributions.at(node + 1), soft_NV[node + 1]
            )
            if offer.probability > 0 and self.passes(offer, self.leniency):
                return child
        return None


def typical(offer: Candidate, epsilon: float) -> bool:
    """Likelier than `epsilon`, or than the typical token of a flat distribution."""
    soft_V = offer.soft_V.double()
    entropy = -float(torch.xlogy(soft_V, soft_V).sum())
    return offer.probability > min(epsilon, math.sqrt(epsilon) * math.exp(-entropy))


def likeliest_or_above(offer: Candidate, least: float) -> bool:
    return offer.likeliest or offer.probability >= least


def above(offer: Candidate, least: float) -> bool:
    return offer.probability >= least


def among_top(offer: Candidate, count: float) -> bool:
    return int(offer.likelier().sum()) < count


def in_nucleus(offer: Candidate, mass: float) -> bool:
    return float(offer.soft_V.double()[offer.likelier()].sum()) < mass


@dataclass(frozen=True, slots=True)
class _Lossy:
    """A test, its default threshold and its largest sensible one."""

    passes: Test
    usual: float
    largest: float = 1.0


LOSSY: Mapping[str, _Lossy] = {
    "typical": _Lossy(typical, 0.09),
    "p_min": _Lossy(likeliest_or_above, 0.5),
    "threshold": _Lossy(above, 0.5),
    "top_k": _Lossy(among_top, 5, largest=float("inf")),
    "nucleus": _Lossy(in_nucleus, 0.9),
}


def rule_for(sampler: str, leniency: float = 0.0, sampling: Sampling = PLAIN) -> AcceptanceRule:
    """The rule called `sampler`; `leniency` is a lossy rule's threshold, 0 its default.

    Raises ConfigError if the rule has no such threshold, or its package is broken.
    """
    if sampler not in LOSSY:
        if leniency:
            is_what = "is exact and" if sampler in EXACT else "is another package's and"
            raise ConfigError(
                f"sampler {sampler!r} {is_what} has no threshold, but leniency is {leniency:g}.",
                hint=f"leave leniency out, or choose a lossy sampler: {', '.join(LOSSY)}",
            )
        return EXACT[sampler](sampling) if sampler in EXACT else _of_package(sampler, sampling)
    kind = LOSSY[sampler]
    if leniency > kind.largest:
        raise ConfigError(
            f"leniency {leniency:g} is above {kind.largest:g}, the most that sampler {sampler!r} "
            "can use.",
            hint=f"lower --leniency; its usual value is {kind.usual:g}",
        )
    return LossyRule(sampler, kind.passes, leniency or kind.usual)


def _of_package(sampler: str, sampling: Sampling) -> AcceptanceRule:
    kind = RULES.load(sampler)
    rule: AcceptanceRule = RULES.build(kind, sampling)
    if rule.exact is not kind.exact:
        raise ConfigError(
            f"rule {sampler!r} says exact={rule.exact}, and its description exact={kind.exact}.",
            hint="make both say the same: exact where it keeps the target's distribution",
        )
    return rule
