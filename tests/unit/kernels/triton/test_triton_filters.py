"""Top-k, top-p and min-p against the definitions in core/sampling.py.

Shapes:  R = rows, V = vocabulary.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.core.sampling import PLAIN
from outrider.plugins.gpu.kernels import launchers
from outrider.plugins.gpu.kernels.eager import EagerProbs
from outrider.plugins.gpu.kernels.filters import TritonFilters
from outrider.plugins.gpu.kernels.scratch import Workspace
from unit.kernels.implementations import randn

VOCAB = 21
CPU = torch.device("cpu")
pytestmark = [pytest.mark.wide, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def some_rows() -> Tensor:
    """Logits: any, of few values, all alike, both zeros, far apart."""
    some_V, few_V, zeros_V, far_V = randn(4, VOCAB)
    zeros_V = torch.where(zeros_V > 0.4, zeros_V, zeros_V.sign() * 0.0)
    return torch.stack([some_V, (2 * few_V).round(), torch.zeros(VOCAB), zeros_V, far_V * 30])


@pytest.mark.parametrize("limits", [(6, 6, 2, 3, 1), (0, 1, 0, 1, VOCAB)])
def test_the_k_likeliest_are_kept_with_all_that_equal_them(
    limits: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launchers, "MOST_OF_A_PIECE", 16 if limits[0] else 32)
    logits_RV = some_rows()
    got_RV = logits_RV.clone()
    TritonFilters(Workspace(CPU)).top_k(got_RV, torch.tensor(limits))
    for got_V, logits_V, k in zip(got_RV, logits_RV, limits, strict=True):
        wanted_1V = logits_V[None].clone()
        if k:
            PLAIN.top_k(wanted_1V, k, wanted_1V)
        assert torch.equal(got_V, wanted_1V[0])


# (top_p, min_p) of each row.
LIMITS = (
    ((0.9, 0.0), (0.5, 0.0), (0.3, 0.0), (0.75, 0.0), (0.999999, 0.0)),
    ((1.0, 0.0), (0.9, 0.3), (1.0, 1.0), (0.99, 0.05), (0.0, 0.0)),
    # Of both, on what top-p has scaled up.
    ((0.5, 0.7), (0.6, 0.5), (0.3, 0.9), (0.6, 0.4), (0.9, 0.01)),
)


@pytest.mark.parametrize("limits", LIMITS)
def test_likely_tokens_are_kept_by_the_definition(
    limits: tuple[tuple[float, float], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launchers, "MOST_OF_A_PIECE", 16 if limits is LIMITS[1] else 32)
    probs_RV = torch.softmax(some_rows(), -1)
    got_RV = probs_RV.clone()
    top_p_R, min_p_R = torch.tensor(limits, dtype=torch.float64).unbind(1)
    TritonFilters(Workspace(CPU)).keep_likely(got_RV, top_p_R.contiguous(), min_p_R.float())
    for got_V, probs_V, limit in zip(got_RV, probs_RV, limits, strict=True):
        wanted_1V = probs_V[None].clone()
        PLAIN.keep_likely(wanted_1V, *limit)
        assert torch.equal(got_V > 0, wanted_1V[0] > 0)
        torch.testing.assert_close(got_V, wanted_1V[0], rtol=1e-6, atol=0)


def test_a_nucleus_ends_where_its_mass_is_reached_exactly() -> None:
    """Powers of two, so that every sum is exact; equal numbers are kept from the first on."""
    probs_RV = torch.tensor([[0.0625, 0.5, 0.0625, 0.125, 0.25]] * 4)
    wanted_RV = probs_RV.clone()
    limits = [1 - 2.0**-kept for kept in range(1, 5)]
    for wanted_V, top_p in zip(wanted_RV, limits, strict=True):
        PLAIN.keep_likely(wanted_V[None], top_p, 0.0)
    top_p_R = torch.tensor(limits, dtype=torch.float64)
    TritonFilters(Workspace(CPU)).keep_likely(probs_RV, top_p_R, torch.zeros(4))
    assert torch.equal(probs_RV, wanted_RV)
    assert [int((probs_V > 0).sum()) for probs_V in probs_RV] == [1, 2, 3, 4]


def test_what_is_no_number_stays_and_limits_serve_several_rows() -> None:
    logits_RV = some_rows()[:2]
    logits_RV[1, 3] = torch.nan
    filters, limit_1 = TritonFilters(Workspace(CPU)), torch.tensor([0.5], dtype=torch.float64)
    filters.top_k(logits_RV, torch.tensor([5]))
    assert logits_RV[1].isnan().any()
    probs_RV = torch.softmax(logits_RV, -1)
    filters.keep_likely(probs_RV, limit_1, torch.tensor([0.1]))
    assert torch.equal(probs_RV.isnan().any(-1), torch.tensor([False, True]))


def test_stages_filter_with_the_same_kernels() -> None:
    """A seed's text is then the same, however its rounds are run."""
    eager, logits_RV = EagerProbs(Workspace(CPU), CPU), some_rows()[1:2]
    got_RV = torch.empty_like(logits_RV)
    eager.top_k(logits_RV, 4, got_RV)
    wanted_RV = torch.empty_like(logits_RV)
    PLAIN.top_k(logits_RV, 4, wanted_RV)
    assert torch.equal(got_RV, wanted_RV)
    probs_RV = torch.softmax(logits_RV, -1)
    wanted_RV = probs_RV.clone()
    eager.keep_likely(probs_RV, 0.7, 0.1)
    PLAIN.keep_likely(wanted_RV, 0.7, 0.1)
    torch.testing.assert_close(probs_RV, wanted_RV, rtol=1e-6, atol=0)
