"""The one processed distribution against a slow and obvious float64 oracle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from checks.distribution import check_filter_cases, check_filters, floats, near_an_edge
from checks.effort import examples
from outrider.core.errors import ContractError
from outrider.core.params import SamplingParams
from outrider.core.sampling import Distributions, processed_probs
from outrider.plugins.proof.distributions import filtered

logits = st.lists(st.integers(-6, 6).map(lambda x: x / 2), min_size=1, max_size=9)
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.05, 0.3, 0.7, 1.0, 1.9, 100.0]),
    top_k=st.integers(0, 10),
    top_p=st.sampled_from([0.0, 0.1, 0.31, 0.5, 0.77, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.13, 0.3, 0.7, 1.0]),
)


@examples(200)
@given(logits=logits, params=params)
def test_matches_the_oracle(logits: list[float], params: SamplingParams) -> None:
    assume(not near_an_edge(logits, params))
    check_filters(logits, params)


def test_fixed_edges() -> None:
    check_filter_cases()


@given(rows=st.lists(st.lists(st.integers(-4, 4), min_size=5, max_size=5), max_size=4))
def test_rows_do_not_see_each_other(rows: list[list[int]]) -> None:
    chosen = SamplingParams(temperature=0.8, top_k=3, top_p=0.9, min_p=0.05)
    logits_NV = torch.tensor(rows, dtype=torch.float64).reshape(-1, 5)
    together = processed_probs(logits_NV, chosen)
    for index, row in enumerate(together):
        assert torch.equal(row, processed_probs(logits_NV[index : index + 1], chosen)[0])


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_vanishing_temperature_is_greedy(temperature: float, dtype: torch.dtype) -> None:
    """Dividing by it must not overflow into distributions that are not numbers."""
    logits_NV = torch.tensor([[1.0, 30.0, 2.0], [-5.0, -5.0, -40.0]], dtype=dtype)
    got = processed_probs(logits_NV, SamplingParams(temperature=temperature))
    assert [floats(row) for row in got] == [[0, 1, 0], [0.5, 0.5, 0]]


def test_float32_stays_float32_and_sums_to_one() -> None:
    generator = torch.Generator().manual_seed(3)
    logits_NV = torch.randn(4, 1000, generator=generator) * 3
    chosen = SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01)
    got = processed_probs(logits_NV, chosen)
    assert got.dtype is torch.float32
    assert torch.allclose(got.sum(-1), torch.ones(4), atol=1e-5)
    for row, wanted in zip(got, logits_NV, strict=True):
        oracle = torch.tensor(filtered(floats(wanted), chosen)).double()
        assert torch.allclose(row.double(), oracle, atol=1e-5)


def test_masked_tokens_get_nothing() -> None:
    logits_NV = torch.tensor([[0.0, float("-inf"), 1.0]], dtype=torch.float64)
    got = processed_probs(logits_NV, SamplingParams(temperature=0.5, top_p=0.99, min_p=0.01))
    assert got[0, 1] == 0
    assert got.sum() == pytest.approx(1)


def test_a_distribution_is_tokens_or_probabilities() -> None:
    with pytest.raises(ContractError):
        Distributions()
    with pytest.raises(ContractError):
        Distributions((1,), torch.ones(1, 1))


@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"min_p": 0.01}, {"top_k": 50, "top_p": 0.8}])
def test_a_row_s_distribution_does_not_depend_on_the_rows_beside_it(
    params: dict[str, float],
) -> None:
    """At the size of a large vocabulary, where PyTorch splits one long row among threads."""
    generator = torch.Generator().manual_seed(0)
    how = SamplingParams(temperature=0.8, **params)  # pyright: ignore[reportArgumentType]
    for _ in range(4):
        logits_NV = torch.randn(9, 128_256, generator=generator) * 3
        together_NV = processed_probs(logits_NV, how)
        for row in (0, 8):
            assert torch.equal(processed_probs(logits_NV[row : row + 1], how)[0], together_NV[row])
