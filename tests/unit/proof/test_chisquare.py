"""p-values against known answers, pooling, and the false-alarm rate."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outrider.plugins.gpu.rounds.verdicts import ChainNumbers, judge_chains, pick
from outrider.plugins.proof.cases import PAIRS, START, VOCAB
from outrider_lab.proof.chisquare import FAMILY_LEVEL, p_value, p_values, threshold


def null_p_values(seeds: Sequence[int], num_draws: int) -> Tensor:
    """The six pairs' p-values for each seed, of shape SP."""
    distributions = [tuple(table_VV[START] for table_VV in pair.tables()) for pair in PAIRS]
    counts_PSV = torch.zeros(len(PAIRS), len(seeds), VOCAB, dtype=torch.int64)
    for run, seed in enumerate(seeds):
        generator = torch.Generator().manual_seed(seed)
        for place, (p_V, q_V) in enumerate(distributions):
            uniforms_4B = torch.rand(4, num_draws, generator=generator, dtype=torch.float64)
            first_B = _first_tokens(p_V, q_V, uniforms_4B)
            counts_PSV[place, run] = torch.bincount(first_B, minlength=VOCAB)
    tested = zip(counts_PSV, distributions, strict=True)
    return torch.stack([p_values(counts_SV, p_V) for counts_SV, (p_V, _) in tested], -1)


def _first_tokens(p_V: Tensor, q_V: Tensor, uniforms_4B: Tensor) -> Tensor:
    """What rounds of one draft emit first, by the token rule."""
    num_draws = uniforms_4B.shape[1]
    tokens_B1 = pick(q_V.expand(num_draws, -1), uniforms_4B[0])[:, None]
    numbers = ChainNumbers(uniforms_4B[1, :, None], uniforms_4B[2:].T)
    q_BKV = q_V.expand(num_draws, 1, -1)
    p_BWV = p_V.expand(num_draws, 2, -1)
    verdict = judge_chains(tokens_B1, q_BKV, p_BWV, numbers)
    return torch.where(verdict.num_accepted_B > 0, tokens_B1[:, 0], verdict.next_B)


@given(st.integers(10, 400), st.integers(10, 400), st.integers(10, 400))
def test_three_cells_have_an_exponential_tail(a: int, b: int, c: int) -> None:
    """With two degrees of freedom P(X > x) = exp(-x / 2)."""
    expected = (a + b + c) / 3
    statistic = sum((count - expected) ** 2 / expected for count in (a, b, c))
    assert p_value([a, b, c], [1 / 3] * 3) == pytest.approx(math.exp(-statistic / 2))


def test_two_cells_have_a_normal_tail() -> None:
    wanted = math.erfc(math.sqrt((60 - 50) ** 2 / 50 / 2 + (40 - 50) ** 2 / 50 / 2))
    assert p_value([60, 40], [0.5, 0.5]) == pytest.approx(wanted)


def test_what_cannot_be_and_what_must_be() -> None:
    assert p_value([50, 50, 1], [0.5, 0.5, 0.0]) == 0
    assert p_value([50, 50, 0], [0.5, 0.5, 0.0]) == 1
    assert p_value([100, 0], [1.0, 0.0]) == 1


def test_cells_that_expect_little_are_one_cell() -> None:
    probs = [0.5, 0.4, 0.04, 0.03, 0.02, 0.01]
    assert p_value([45, 42, 7, 1, 0, 5], probs) == p_value([45, 42, 13], [0.5, 0.4, 0.1])
    # Together they still expect fewer than five, so the smallest of the others joins them.
    few = [0.5, 0.46, 0.02, 0.02]
    assert p_value([55, 40, 4, 1], few) == p_value([55, 45], [0.5, 0.5])


def test_runs_are_tested_one_by_one() -> None:
    counts_SC = torch.tensor([[60, 40], [50, 50], [0, 100]])
    probs_C = torch.tensor([0.5, 0.5])
    together = [float(value) for value in p_values(counts_SC, probs_C)]
    assert together == [p_value([60, 40], [0.5, 0.5]), 1.0, p_value([0, 100], [0.5, 0.5])]
    assert together[2] < threshold(60) < FAMILY_LEVEL


@pytest.mark.slow
@pytest.mark.parametrize("num_seeds", [50, pytest.param(1_000, marks=pytest.mark.deep)])
def test_the_ensemble_raises_no_alarm(num_seeds: int) -> None:
    """First tokens of the six pairs by the token rule, with a generator of each seed."""
    values_SP = null_p_values(range(num_seeds), 10_000)
    assert float(values_SP.amin()) >= threshold(len(PAIRS))


def test_p_values_of_a_right_rule_are_uniform() -> None:
    """Otherwise the absence of alarms would mean nothing. Five pairs have something to test."""
    values_SP = null_p_values(range(100), 1_000)
    tested = [value for value in map(float, values_SP.flatten()) if value < 1]
    assert len(tested) >= 100 * (len(PAIRS) - 2)
    for share in (0.01, 0.1, 0.5):
        below = sum(value < share for value in tested)
        spread = math.sqrt(len(tested) * share * (1 - share))
        assert abs(below - len(tested) * share) < 4 * spread
