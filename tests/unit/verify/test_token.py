"""The residual: the part of the target's distribution that a refused proposal did not cover."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from checks.distribution import Weights, normal
from outrider.verify.exact import residual

weights = st.tuples(*[st.integers(0, 8)] * 4).filter(any)


def values(distribution: int | Tensor) -> list[float]:
    assert isinstance(distribution, Tensor)
    return [float(value) for value in distribution]


@given(p=weights, q=weights)
def test_accepted_and_residual_mass_make_up_the_target(p: Weights, q: Weights) -> None:
    """min(p, q) + (1 - sum of min(p, q)) * residual = p, to the last bits of float64."""
    p_V, q_V = normal(p), normal(q)
    covered_V = torch.minimum(p_V, q_V)
    left = residual(p_V, q_V)
    assert isinstance(left, Tensor)
    rebuilt_V = covered_V + (1 - covered_V.sum()) * left
    assert float((rebuilt_V - p_V).abs().max()) <= 1e-12
    assert float(left.sum()) == pytest.approx(1)


@given(p=weights, token=st.integers(0, 3))
def test_a_certain_proposal_takes_its_token_out(p: Weights, token: int) -> None:
    p_V = normal(p)
    left = values(residual(p_V, token))
    if p[token] < sum(p):
        assert left[token] == 0
        rest = sum(p) - p[token]
        others = [w / rest if t != token else 0.0 for t, w in enumerate(p)]
        assert left == pytest.approx(others)
    else:
        assert left == values(p_V)


def test_a_point_mass_stays() -> None:
    assert residual(3, 2) == 3
    assert residual(3, torch.full((4,), 0.25)) == 3


def test_nothing_left_leaves_the_distribution() -> None:
    probs_V = normal((1, 2, 3, 0))
    assert values(residual(probs_V, probs_V)) == values(probs_V)


def test_the_inputs_are_not_written() -> None:
    p_V, q_V = normal((1, 2, 3, 4)), normal((4, 3, 2, 1))
    before = values(p_V), values(q_V)
    residual(p_V, q_V)
    residual(p_V, 2)
    assert (values(p_V), values(q_V)) == before
