"""Sampling against the definitions in core/.

Shapes:  B = sequences, K = drafted tokens, M, R = rows, V = vocabulary.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.core.clock import host_ints
from outrider.core.rng import KeyedRng, Role, RoundKeys, inverse_cdf
from outrider.core.sampling import leftover
from outrider.plugins.gpu.kernels import launchers as triton_launchers
from outrider.plugins.gpu.kernels.launchers import ProbRows
from unit.kernels.implementations import randn
from unit.kernels.triton.interpreted import triton_distributions

VOCAB = 11
# The interpreter works with numpy, which warns of NaN.
pytestmark = [pytest.mark.wide, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launchers, "MOST_OF_A_PIECE", 8)


def probabilities(logits_RV: Tensor, temperature_R: Tensor) -> Tensor:
    out_RV = torch.full_like(logits_RV, torch.nan)
    triton_distributions().softmax(logits_RV.contiguous(), temperature_R, out_RV)
    return out_RV


def test_a_distribution_that_is_not_numbers_draws_minus_one() -> None:
    logits_BV = randn(4, VOCAB)
    logits_BV[1, 9] = torch.nan
    logits_BV[2] = -torch.inf
    place_B, out_B = torch.arange(4), torch.zeros(4, dtype=torch.int64)
    keys = RoundKeys(place_B, place_B, place_B)
    for temperature, bad in ((0.8, [1, 2]), (0.0, [1])):
        distributions = ProbRows(logits_BV, torch.full((4,), temperature))
        triton_distributions().draw(distributions, keys, 0, Role.NEXT, out_B)
        assert [row for row in range(4) if out_B[row] < 0] == bad


@settings(max_examples=3)
@given(seed=st.integers(-(2**63), 2**63 - 1), start=st.integers(0, 2**31 - 1))
def test_draws_are_those_of_keyed_noise(seed: int, start: int) -> None:
    distribution_1V, out_1 = probabilities(randn(1, VOCAB), torch.ones(1)), torch.zeros(1).long()
    keys = RoundKeys(torch.tensor([seed]), torch.tensor([2]), torch.tensor([start]))
    rng = KeyedRng(seed % 2**64, 2, start)
    for node, role in ((-1, Role.NEXT), (4, Role.DRAFT)):
        triton_distributions().draw(ProbRows(distribution_1V, None), keys, node, role, out_1)
        assert host_ints(out_1) == [rng.pick(distribution_1V[0], node, role)]


@settings(max_examples=4)
@given(weights=st.lists(st.floats(0, 1, width=32), min_size=1, max_size=20))
def test_picks_are_those_of_the_inverse_cdf(weights: list[float]) -> None:
    weights_V = torch.tensor([*weights, 0.5])
    uniforms = [0.0, 0.3, float(np.nextafter(1, 0))]
    rows_BV, out_B = weights_V.repeat(3, 1), torch.zeros(3, dtype=torch.int64)
    triton_distributions().pick(
        ProbRows(rows_BV, None), torch.tensor(uniforms, dtype=torch.float64), out_B
    )
    assert host_ints(out_B) == [inverse_cdf(weights_V, uniform) for uniform in uniforms]


def test_softmax_is_that_of_pytorch_and_zero_is_a_point() -> None:
    logits_RV, temperature_R = randn(4, 19), torch.tensor([1.0, 0.3, 4.0, 0.0])
    out_RV = probabilities(logits_RV, temperature_R)
    expected_RV = torch.softmax(logits_RV[:3].double() / temperature_R[:3, None], -1)
    torch.testing.assert_close(out_RV[:3].double(), expected_RV, rtol=1e-6, atol=1e-9)
    assert torch.equal(out_RV[3].nonzero()[:, 0], logits_RV[3].argmax()[None])


def test_the_first_largest_wins_and_nan_is_told() -> None:
    logits_MV = torch.zeros(5, 20)
    logits_MV[1, [3, 12]] = 2
    logits_MV[2, 19] = torch.nan
    logits_MV[3] = -torch.inf
    logits_MV[4, 17] = torch.inf
    out_M = torch.empty(5, dtype=torch.int64)
    triton_distributions().argmax(logits_MV, out_M)
    assert host_ints(out_M) == [0, 3, -1, 0, 17]


def test_the_leftover_is_that_of_the_definition() -> None:
    p_V, q_V = torch.softmax(randn(2, 19), -1)
    share_1, left_V = torch.tensor([0.8], dtype=torch.float64), torch.empty(19)
    sums_C = torch.empty(triton_launchers.num_pieces(19), dtype=torch.float64)
    for proposal in (q_V, 4):
        triton_distributions().leftover(p_V, proposal, share_1, left_V, sums_C)
        expected_V, total = leftover(p_V, proposal, 0.8)
        assert torch.equal(left_V, expected_V.float())
        assert float(sums_C.sum()) == pytest.approx(total, rel=1e-14)
