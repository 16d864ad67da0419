"""Exact acceptance: rejection sampling (the token rule for trees, the block rule for chains), and
rules that draw from the target and accept the draft while it agrees (match, coupled).

Draws of the latter are keyed by absolute position, so the text depends on seed and target alone: it
is the same with any drafter and with none. They do not read the drafter's probabilities q; at
temperature > 0 both accept less than the token rule.

Shapes:  K = drafted tokens, N = K, W = K + 1, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from outrider.core.draft import Verdict
from outrider.core.protocols import VerifyRow
from outrider.core.rng import Rng, Role
from outrider.core.sampling import PLAIN, Leftover, Sampling, draw, draw_at, mass
from outrider.core.tree import ROOT


@dataclass(frozen=True, slots=True)
class TokenRule:
    """Preserves the target's distribution, greedy and sampled, for chains and trees.

    One walk covers greedy decoding, chains, look-ups and sampled trees: descend from the root,
    offer each child min(1, p/q), and after a refusal go on with the part of p that q did not cover.

    Leviathan, Kalman, Matias 2023 (arXiv 2211.17192) for chains; siblings by recursive rejection
    (SpecInfer, arXiv 2305.09781). Cost: one look at p and q a draft node, one residual a rejection.
    """

    sampling: Sampling = PLAIN
    name = "token"
    exact = True

    def __call__(self, rows: Sequence[VerifyRow]) -> list[Verdict]:
        return [walk(row, self.sampling.leftover) for row in rows]


def walk(row: VerifyRow, leftover: Leftover = PLAIN.leftover) -> Verdict:
    """The verdict on one row of any shape."""
    draft, rng = row.draft, row.rng
    path: list[int] = []
    node = ROOT
    while True:
        distribution = row.distributions.at(node + 1)
        for child in draft.children(node):
            token = draft.tokens[child]
            proposal = token if draft.probs_NV is None else draft.probs_NV[child]
            # A token without mass in its own distribution cannot have been drawn; refuse it.
            drawn = mass(proposal, token)
            ratio = mass(distribution, token) / drawn if drawn > 0 else 0.0
            if rng.coin(ratio, child, Role.ACCEPT):
                path.append(child)
                node = child
                break
            distribution = residual(distribution, proposal, leftover)
        else:
            return Verdict(tuple(path), draw(distribution, rng, node))


def residual(
    distribution: int | Tensor, proposal: int | Tensor, leftover: Leftover = PLAIN.leftover
) -> int | Tensor:
    """The renormalised mass of `distribution` without `proposal`, or itself if none is left."""
    if isinstance(distribution, int):
        return distribution
    left_V, total = leftover(distribution, proposal)
    return left_V.div_(total) if total > 0 else distribution


@dataclass(frozen=True, slots=True)
class BlockRule:
    """Preserves the target's distribution; accepts more tokens of sampled chains than the token
    rule.

    Other drafts (trees, greedy distributions, drafts chosen deterministically) go to the token
    rule: at temperature 0 there is nothing to win, and for a chain of point masses both rules
    accept each number of tokens with the same probability.

    The token rule stops at the first rejection. The block rule lets a token that the target likes
    more than the drafter make up for an earlier one that the target likes less, so it never accepts
    fewer tokens in expectation, and it preserves the target's distribution all the same.

    With P_i, Q_i the distributions of target and drafter at the i-th token x_i of a chain of K:

        p_0 = 1,  p_i = min(1, p_{i-1} P_i(x_i) / Q_i(x_i))         share of x_1..x_i to accept
        s_i = sum over x of max(0, p_i P_{i+1}(x) - Q_{i+1}(x))     mass the draft does not cover
        h_i = s_i / (s_i + 1 - p_i) for i < K,  h_K = p_K,  h_0 = 1,  0/0 = 1

    Accept the longest beginning i whose coin of probability h_i falls heads. The next token is
    drawn from P_{K+1} if i = K, else in proportion to max(0, p_i P_{i+1} - Q_{i+1}).

    Sun, Mendlovic, Leviathan, Aharoni, Ro, Beirami, Suresh 2024 (arXiv 2403.10444). Cost: one look
    at P and Q a token; one pass over the vocabulary for each beginning that is tested, but none for
    the whole chain, which is tested first.
    """

    sampling: Sampling = PLAIN
    name = "block"
    exact = True

    def __call__(self, rows: Sequence[VerifyRow]) -> list[Verdict]:
        return [_judge(row, self.sampling) for row in rows]


def _judge(row: VerifyRow, sampling: Sampling) -> Verdict:
    draft, p_WV = row.draft, row.distributions.probs_NV
    if p_WV is None or draft.probs_NV is None or draft.max_depth < len(draft):
        return walk(row, sampling.leftover)
    return _judge_chain(draft.tokens, draft.probs_NV, p_WV, row.rng, sampling)


def _judge_chain(
    tokens: Sequence[int], q_NV: Tensor, p_WV: Tensor, rng: Rng, sampling: Sampling
) -> Verdict:
    shares = _shares(sampling.masses(p_WV, tokens), sampling.masses(q_NV, tokens))
    probs_V, chance = p_WV[len(tokens)], shares[-1]
    for length in range(len(tokens), 0, -1):
        if rng.coin(chance, length - 1, Role.ACCEPT):
            return Verdict(tuple(range(length)), draw(probs_V, rng, length - 1))
        p_V, q_V = p_WV[length - 1], q_NV[length - 1]
        probs_V, chance = _refused(shares[length - 1], p_V, q_V, sampling.leftover)
    return Verdict((), draw(probs_V, rng, ROOT))


def _shares(p: Sequence[float], q: Sequence[float]) -> list[float]:
    """The shares p_0 to p_K, from the probabilities of the drafted tokens."""
    shares = [1.0]
    for wanted, drawn in zip(p, q, strict=True):
        # A token without mass in its own distribution cannot have been drawn; accept nothing of it.
        ratio = wanted / drawn if drawn > 0 else 0.0
        shares.append(min(1.0, shares[-1] * ratio))
    return shares


def _refused(share: float, p_V: Tensor, q_V: Tensor, leftover: Leftover) -> tuple[Tensor, float]:
    """The rest of `share` times `p_V` without `q_V` (`p_V` if nothing is left), and the coin h."""
    left_V, left = leftover(p_V, q_V, share)
    if left == 0:
        return p_V, float(share == 1)
    return left_V, left / (left + 1 - share)


class MatchRule:
    """Preserves the target's distribution, and the seed's text."""

    name = "match"
    exact = True

    def __call__(self, rows: Sequence[VerifyRow]) -> list[Verdict]:
        return [follow(row, draw_at) for row in rows]


def follow(row: VerifyRow, own: Callable[[int | Tensor, Rng, int], int]) -> Verdict:
    """Walk down the tree along the target's `own` tokens: `own(distribution, rng, depth)` is drawn
    once at each visited position."""
    path: list[int] = []
    node = ROOT
    while True:
        token = own(row.distributions.at(node + 1), row.rng, len(path))
        agreeing = (c for c in row.draft.children(node) if row.draft.tokens[c] == token)
        child = next(agreeing, None)
        if child is None:
            return Verdict(tuple(path), token)
        node = child
        path.append(node)


class CoupledRule:
    """Preserves the target's distribution, and the seed's text. Use it with a drafter that draws by
    races.

    At each absolute position every token id has an exponential number of its own (`race_at` in
    core/rng.py). The target's token is the winner of the race under p, a coupled drafter's is the
    winner of the same race under q, and the draft is accepted as long as the two agree.

    Both races have the same winner i with probability 1 / sum over j of max(p_j / p_i, q_j / q_i),
    in all at least (1 - TV) / (1 + TV), TV the distance of p and q.

    Daliri, Musco, Suresh 2024, "Coupling without Communication and Drafter-Invariant Speculative
    Decoding" (arXiv 2408.07978). Cost: an exponential number for every id of non-zero weight, for
    each token emitted.
    """

    name = "coupled"
    exact = True

    def __call__(self, rows: Sequence[VerifyRow]) -> list[Verdict]:
        return [follow(row, race) for row in rows]


def race(distribution: int | Tensor, rng: Rng, depth: int) -> int:
    """The target's own token `depth` positions after the round's start."""
    return distribution if isinstance(distribution, int) else rng.race_at(distribution, depth)
