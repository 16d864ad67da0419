"""The rules on tensors: decision for decision those of the walks, and exact by the million.

Shapes:  B = chains, K = drafted tokens, W = K + 1, V = vocabulary, S = seeds, C = cells.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from checks.batched import (
    PAIRS,
    chains,
    check_batched_block,
    check_batched_token,
    emitted_counts,
    outcome_counts,
    outcome_distribution,
)
from checks.distribution import normal
from outrider.core.clock import host_ints
from outrider.core.draft import Draft
from outrider.core.protocols import AcceptanceRule, VerifyRow
from outrider.core.rng import KeyedRng
from outrider.core.sampling import Distributions
from outrider.kernels.reference.pointwise import verify_prefix
from outrider.plugins.gpu.rounds.verdicts import (
    ChainNumbers,
    ChainVerdicts,
    judge_blocks,
    judge_chains,
    leftover,
    ratios,
)
from outrider.verify.exact import BlockRule, TokenRule
from outrider_lab.proof.chisquare import FAMILY_LEVEL, keyed_numbers, p_values

Judge = Callable[[Tensor, Tensor, Tensor, ChainNumbers], ChainVerdicts]


def test_the_token_rule_on_tensors_decides_as_its_walk() -> None:
    check_batched_token()


def test_the_block_rule_on_tensors_decides_as_its_walk() -> None:
    check_batched_block()


def test_empty_drafts_are_plain_sampling() -> None:
    _, _, p_BWV = chains(9, num_tokens=0)
    numbers = keyed_numbers(3, np.arange(9, dtype=np.uint64), 4, 0)
    tokens_BK, q_BKV = torch.empty(9, 0, dtype=torch.int64), torch.empty(9, 0, 4)
    for verdicts in (
        judge_chains(tokens_BK, q_BKV, p_BWV, numbers),
        judge_blocks(tokens_BK, q_BKV, p_BWV, numbers),
    ):
        assert verdicts.num_accepted_B.sum() == 0
        for sample in range(9):
            row = VerifyRow(
                Draft.empty(), Distributions(probs_NV=p_BWV[sample]), KeyedRng(3, sample, 4)
            )
            assert verdicts.next_B[sample] == TokenRule()([row])[0].next_token


def test_prefixes_are_greedy_acceptance() -> None:
    generator = torch.Generator().manual_seed(2)
    logits_BKV = torch.randint(0, 3, (200, 4, 3), generator=generator).float()
    ids_BK = torch.randint(0, 3, (200, 4), generator=generator)
    ids_BK = torch.where(
        torch.rand(200, 4, generator=generator) < 0.6, logits_BKV.argmax(-1), ids_BK
    )
    accept_len_B, mask_BK = verify_prefix(logits_BKV, ids_BK)
    assert set(host_ints(accept_len_B)) == {0, 1, 2, 3, 4}
    for row in range(200):
        best = tuple(int(token) for token in logits_BKV[row].argmax(-1))
        draft = Draft.chain([int(token) for token in ids_BK[row]])
        verdict = TokenRule()(
            [VerifyRow(draft, Distributions(tokens=(*best, 0)), KeyedRng(0, 0, 0))]
        )[0]
        assert int(accept_len_B[row]) == len(verdict.path)
        assert [bool(kept) for kept in mask_BK[row]] == [node in verdict.path for node in range(4)]


def test_a_prefix_of_nothing_is_empty() -> None:
    accept_len_B, mask_BK = verify_prefix(
        torch.empty(2, 0, 5), torch.empty(2, 0, dtype=torch.int64)
    )
    assert host_ints(accept_len_B) == [0, 0]
    assert mask_BK.shape == (2, 0)


def test_accepted_and_residual_mass_make_up_the_target() -> None:
    """For five thousand pairs over seven tokens: q accept + residual = p, TV at most 1e-12."""
    rng = np.random.default_rng(6)
    weights = rng.choice([0.0, 0.0, 1.0, 1.0, 2.0, 3.0, 9.0], (2, 5000, 7))
    weights[:, :500] = np.eye(7)[rng.integers(0, 7, (2, 500))]  # point masses
    weights[1, 500:600] = weights[0, 500:600]  # equal distributions
    weights[1, 600:700] *= weights[0, 600:700] == 0  # disjoint supports
    weights[:, :, 0] += weights.sum(-1) == 0
    p_BV, q_BV = (torch.as_tensor(w / w.sum(-1, keepdims=True)) for w in weights)
    everything_BV = torch.arange(7).expand(5000, 7)
    # Each token in turn is the draft: a chain of seven whose distributions are all the same.
    same = [probs_BV[:, None].expand(-1, 7, -1) for probs_BV in (q_BV, p_BV)]
    accept_BV = ratios(everything_BV, *same).clamp_max(1)
    kept_BV = q_BV * accept_BV
    residual_BV = leftover(p_BV, q_BV)
    residual_BV /= residual_BV.sum(-1, keepdim=True)
    total_BV = kept_BV + (1 - kept_BV.sum(-1, keepdim=True)) * residual_BV
    assert float((total_BV - p_BV).abs().sum(-1).max()) / 2 <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("num_chains", [200_000, pytest.param(1_000_000, marks=pytest.mark.deep)])
@pytest.mark.parametrize("place", range(len(PAIRS)))
def test_many_chains_of_two(place: int, num_chains: int) -> None:
    """Everything a round may do, by chi-square against the enumerated distribution of the walk."""
    rules: list[AcceptanceRule] = [TokenRule(), BlockRule()]
    judges: list[Judge] = [judge_chains, judge_blocks]
    p_V, q_V = map(normal, PAIRS[place])
    counts = outcome_counts(judges, p_V, q_V, seed=place, num_chains=num_chains)
    for rule, counts_C in zip(rules, counts, strict=True):
        value = float(p_values(counts_C[None], outcome_distribution(rule, p_V, q_V))[0])
        assert value > FAMILY_LEVEL / len(PAIRS), f"{rule}: p = {value:.3g}"


@pytest.mark.slow
@pytest.mark.parametrize("num_seeds", [100, pytest.param(1000, marks=pytest.mark.deep)])
def test_no_false_alarm(num_seeds: int) -> None:
    """The check at N = 10^4 and family level 1e-6 never fires on the true rule; its p-values are
    spread evenly, so its silence is not deafness."""
    values: list[Tensor] = []
    for first in range(0, num_seeds, 4):
        counts = emitted_counts(range(first, first + 4), num_chains=10_000)
        distributions = [normal(p) for p, _ in PAIRS]
        tested = zip(counts, distributions, strict=True)
        values.append(
            torch.stack([p_values(counts_SC, probs_C) for counts_SC, probs_C in tested], -1)
        )
    values_S6 = torch.cat(values)
    assert values_S6.shape == (num_seeds, len(PAIRS))
    assert float(values_S6.min()) > FAMILY_LEVEL / len(PAIRS)
    for values_S in values_S6[:, :4].unbind(-1):
        deciles = torch.histc(values_S, 10, 0, 1)
        assert float(p_values(deciles[None], torch.full((10,), 0.1))[0]) > 1e-4
