"""The rules on tensors against the walks, and what they do over very many chains.

Shapes:  B = chains, K = drafted tokens, W = K + 1, V = vocabulary, S = seeds, C = cells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from checks.distribution import Weights, walked
from doubles.every_branch import Tokens
from outrider.core.draft import Draft, Outcome
from outrider.core.philox import Words
from outrider.core.protocols import AcceptanceRule, VerifyRow
from outrider.core.rng import KeyedRng, Rng, Role
from outrider.core.sampling import Distributions
from outrider.plugins.gpu.rounds.verdicts import (
    ChainNumbers,
    ChainVerdicts,
    judge_blocks,
    judge_chains,
    pick,
)
from outrider.verify.exact import BlockRule, TokenRule
from outrider_lab.proof.chisquare import keyed_numbers, keyed_uniforms

VOCAB = 4
NUM_CHAINS = 800
START = 9
PART = 20_000  # chains whose arrays fit into a cache together
# Near-uniform, spiky, almost equal, with zeros on either side, sure of little, disjoint.
PAIRS: tuple[tuple[Weights, Weights], ...] = (
    ((17, 16, 18, 15), (16, 18, 15, 17)),
    ((90, 4, 5, 1), (50, 20, 10, 20)),
    ((400, 250, 150, 200), (375, 247, 156, 222)),
    ((3, 0, 1, 4), (0, 2, 2, 3)),
    ((1, 2, 0, 0), (2, 3, 1, 1)),
    ((3, 2, 0, 0), (0, 0, 2, 3)),
)


def chains(num_chains: int, *, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens_BK, q_BKV, p_BWV) with zeros, ties, point masses and equal distributions; in
    float32."""
    rng = np.random.default_rng(num_tokens)
    shape = (num_chains, 2 * num_tokens + 1, VOCAB)
    weights = rng.choice([0.0, 1.0, 1.0, 2.0, 3.0, 9.0], shape)
    weights[rng.random(shape[:2]) < 0.1] = [0, 0, 5, 0]
    weights[..., 0] += weights.sum(-1) == 0
    distributions = torch.as_tensor(weights / weights.sum(-1, keepdims=True)).float()
    q_BKV, p_BWV = distributions[:, :num_tokens], distributions[:, num_tokens:].clone()
    equal = torch.as_tensor(rng.random((num_chains, num_tokens)) < 0.1)
    p_BWV[:, :num_tokens][equal] = q_BKV[equal]
    if not num_tokens:
        return torch.empty(num_chains, 0, dtype=torch.int64), q_BKV, p_BWV
    samples = np.arange(num_chains, dtype=np.uint64)
    return keyed_drafts(5, samples, q_BKV), q_BKV, p_BWV


def keyed_drafts(seed: int, samples: Words, q_BKV: Tensor) -> Tensor:
    """Tokens of shape BK, drawn as a drafter draws them."""
    drawn = [
        pick(q_BKV[:, node], keyed_uniforms(seed, samples, START, node, Role.DRAFT))
        for node in range(q_BKV.shape[1])
    ]
    return torch.stack(drawn, -1)


def check_batched_token() -> None:
    """With the numbers of the same keys every chain ends as under `TokenRule`."""
    for num_tokens in (1, 3):
        tokens_BK, q_BKV, p_BWV = chains(NUM_CHAINS, num_tokens=num_tokens)
        _check_drafts(tokens_BK, q_BKV)
        numbers = keyed_numbers(5, np.arange(NUM_CHAINS, dtype=np.uint64), START, num_tokens)
        verdicts = judge_chains(tokens_BK, q_BKV, p_BWV, numbers)
        _check_same(TokenRule(), verdicts, tokens_BK, q_BKV, p_BWV)
        verdicts = judge_chains(tokens_BK, None, p_BWV, numbers)
        _check_same(TokenRule(), verdicts, tokens_BK, None, p_BWV)
        depth_B = _depths(num_tokens)
        verdicts = judge_chains(tokens_BK, q_BKV, p_BWV, numbers, depth_B)
        _check_same(TokenRule(), verdicts, tokens_BK, q_BKV, p_BWV, depth_B)


def check_batched_block() -> None:
    """With the numbers of the same keys every chain ends as under `BlockRule`."""
    for num_tokens in (1, 3):
        tokens_BK, q_BKV, p_BWV = chains(NUM_CHAINS, num_tokens=num_tokens)
        numbers = keyed_numbers(5, np.arange(NUM_CHAINS, dtype=np.uint64), START, num_tokens)
        verdicts = judge_blocks(tokens_BK, q_BKV, p_BWV, numbers)
        _check_same(BlockRule(), verdicts, tokens_BK, q_BKV, p_BWV)
        depth_B = _depths(num_tokens)
        verdicts = judge_blocks(tokens_BK, q_BKV, p_BWV, numbers, depth_B)
        _check_same(BlockRule(), verdicts, tokens_BK, q_BKV, p_BWV, depth_B)


def _depths(num_tokens: int) -> Tensor:
    """From nothing to whole chains."""
    return torch.arange(NUM_CHAINS) % (num_tokens + 1)


def _check_drafts(tokens_BK: Tensor, q_BKV: Tensor) -> None:
    for sample, (tokens_K, q_KV) in enumerate(zip(tokens_BK, q_BKV, strict=True)):
        rng = KeyedRng(5, sample, START)
        for node, (token, q_V) in enumerate(zip(tokens_K, q_KV, strict=True)):
            assert int(token) == rng.pick(q_V, node, Role.DRAFT)


def _check_same(
    rule: AcceptanceRule,
    verdicts: ChainVerdicts,
    tokens_BK: Tensor,
    q_BKV: Tensor | None,
    p_BWV: Tensor,
    depth_B: Tensor | None = None,
) -> None:
    """`verdicts` are those of `rule` on the chains, cut to `depth_B` tokens where that is given."""
    counts = [0] * (tokens_BK.shape[1] + 1)
    for sample, tokens_K in enumerate(tokens_BK):
        depth = len(tokens_K) if depth_B is None else int(depth_B[sample])
        tokens = [int(token) for token in tokens_K[:depth]]
        draft = Draft.chain(tokens, None if q_BKV is None or not depth else q_BKV[sample, :depth])
        distributions = Distributions(probs_NV=p_BWV[sample, : depth + 1])
        row = VerifyRow(draft, distributions, KeyedRng(5, sample, START))
        wanted = rule([row])[0]
        counts[len(wanted.path)] += 1
        assert len(wanted.path) == int(verdicts.num_accepted_B[sample])
        assert wanted.next_token == int(verdicts.next_B[sample])
    assert min(counts) > 10


Judge = Callable[[Tensor, Tensor, Tensor, ChainNumbers], ChainVerdicts]


def outcome_distribution(rule: AcceptanceRule, p_V: Tensor, q_V: Tensor) -> Tensor:
    """The distribution of what a round emits of a chain of two places that are alike, as `_cells`
    counts."""
    q_KV, distributions = q_V.repeat(2, 1), Distributions(probs_NV=p_V.repeat(3, 1))

    def emitted(rng: Rng) -> Tokens:
        tokens = [rng.pick(q_V, node, Role.DRAFT) for node in (0, 1)]
        draft = Draft.chain(tokens, q_KV)
        return Outcome(0, draft, rule([VerifyRow(draft, distributions, rng)])[0]).tokens

    probs_C = torch.zeros(VOCAB + VOCAB**2 + VOCAB**3, dtype=torch.float64)
    for text, share in walked(emitted).items():
        cell = 0
        for token in text:
            cell = cell * VOCAB + token + 1
        probs_C[cell - 1] += share
    return probs_C


def outcome_counts(
    judges: Sequence[Judge], p_V: Tensor, q_V: Tensor, *, seed: int, num_chains: int
) -> list[Tensor]:
    """How often a round emitted each text of one, two and three tokens, by each of `judges`, who
    judge the same drafts with the same numbers."""
    num_cells = VOCAB + VOCAB**2 + VOCAB**3
    counts = [torch.zeros(num_cells, dtype=torch.int64) for _ in judges]
    for first in range(0, num_chains, PART):
        samples = np.arange(first, first + PART, dtype=np.uint64)
        q_BKV, p_BWV = q_V.expand(PART, 2, -1), p_V.expand(PART, 3, -1)
        tokens_BK = keyed_drafts(seed, samples, q_BKV)
        numbers = keyed_numbers(seed, samples, START, 2)
        for place, judge in enumerate(judges):
            verdicts = judge(tokens_BK, q_BKV, p_BWV, numbers)
            counts[place] += torch.bincount(_cells(tokens_BK, verdicts), minlength=num_cells)
    return counts


def _cells(tokens_BK: Tensor, verdicts: ChainVerdicts) -> Tensor:
    cell_B = torch.zeros(len(tokens_BK), dtype=torch.int64)
    for node in (0, 1):
        longer_B = cell_B * VOCAB + tokens_BK[:, node] + 1
        cell_B = torch.where(verdicts.num_accepted_B > node, longer_B, cell_B)
    return cell_B * VOCAB + verdicts.next_B


def emitted_counts(seeds: Sequence[int], *, num_chains: int) -> list[Tensor]:
    """For each of PAIRS, of shape SV: which first token a round of one draft emitted, how often."""
    seed_B = np.repeat(np.array(seeds, dtype=np.uint64), num_chains)
    samples = np.tile(np.arange(num_chains, dtype=np.uint64), len(seeds))
    drafts_B = keyed_uniforms(seed_B, samples, START, 0, Role.DRAFT)
    numbers = keyed_numbers(seed_B, samples, START, 1)
    groups_B = torch.arange(len(seeds)).repeat_interleave(num_chains)
    counts: list[Tensor] = []
    for p, q in PAIRS:
        p_V, q_V = (torch.tensor(w, dtype=torch.float64) / sum(w) for w in (p, q))
        q_BKV, p_BWV = q_V.expand(len(samples), 1, -1), p_V.expand(len(samples), 2, -1)
        tokens_BK = pick(q_BKV[:, 0], drafts_B)[:, None]
        verdicts = judge_chains(tokens_BK, q_BKV, p_BWV, numbers)
        first_B = torch.where(verdicts.num_accepted_B > 0, tokens_BK[:, 0], verdicts.next_B)
        counted = torch.bincount(groups_B * VOCAB + first_B, minlength=len(seeds) * VOCAB)
        counts.append(counted.reshape(len(seeds), VOCAB))
    return counts
