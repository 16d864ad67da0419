"""Divergences over the top of a distribution: never negative, zero for equals, below those over all
ids."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from outrider_lab.train.losses import distillation, next_token, top_distributions

VOCAB = 12


def logits(seed: int, scale: float = 2.0) -> torch.Tensor:
    return scale * torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(seed))


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, VOCAB - 1))
def test_merged_outcomes_bound_the_whole_divergence_from_below(
    first: int, second: int, kept: int
) -> None:
    teacher_PV, student_PV = logits(first), logits(second)
    p_PV, q_PV = (functional.log_softmax(one, -1) for one in (teacher_PV, student_PV))
    forward = float((p_PV.exp() * (p_PV - q_PV)).sum(-1).mean())
    reverse = float((q_PV.exp() * (q_PV - p_PV)).sum(-1).mean())
    distributions = top_distributions(teacher_PV, kept)
    # One minus the kept probabilities is known to 1e-6 in float32: of a rest that small, little.
    p_rest_P, q_rest_P = (
        1 - one.exp().double().gather(-1, distributions.ids_PC).sum(-1).clamp_max(1 - 1e-6)
        for one in (p_PV, q_PV)
    )
    ratio_P = torch.maximum(p_rest_P / q_rest_P, q_rest_P / p_rest_P)
    slack = 1e-4 + 1e-6 * float(ratio_P.mean())
    assert -slack <= float(distillation(student_PV, distributions)) <= forward + slack
    assert -slack <= float(distillation(student_PV, distributions, reverse=1.0)) <= reverse + slack


@pytest.mark.parametrize("reverse", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("kept", [3, VOCAB])
def test_a_student_that_is_the_teacher_has_no_loss_and_no_gradient(
    reverse: float, kept: int
) -> None:
    student_PV = logits(7).requires_grad_()
    loss = distillation(student_PV, top_distributions(logits(7), kept), reverse=reverse)
    (gradient,) = torch.autograd.grad(loss, student_PV)
    assert abs(float(loss.detach())) < 1e-5
    assert float(gradient.abs().max()) < 1e-4


@pytest.mark.parametrize("reverse", [0.0, 0.5, 1.0])
def test_going_down_the_gradient_brings_the_distributions_together(reverse: float) -> None:
    teacher_PV = logits(1)
    distributions = top_distributions(teacher_PV, 6)
    student_PV = logits(2).requires_grad_()
    optimiser = torch.optim.Adam([student_PV], lr=0.1)
    for _ in range(200):
        optimiser.zero_grad()
        torch.autograd.backward(distillation(student_PV, distributions, reverse=reverse))
        optimiser.step()  # pyright: ignore[reportUnknownMemberType]
    likeliest = torch.softmax(teacher_PV, -1).max(-1)
    found_P = torch.softmax(student_PV.detach(), -1).gather(-1, likeliest.indices[:, None])[:, 0]
    torch.testing.assert_close(found_P, likeliest.values, atol=0.05, rtol=0)


def test_the_kept_logprobs_are_of_the_whole_distribution() -> None:
    distributions = top_distributions(logits(3), 4)
    whole_PV = functional.log_softmax(logits(3), -1)
    torch.testing.assert_close(distributions.logprobs_PC, whole_PV.gather(-1, distributions.ids_PC))


def test_the_next_token_counts_and_the_last_has_none() -> None:
    ids_BT = torch.tensor([[1, 2, 3]])
    logits_BTV = torch.full((1, 3, VOCAB), -50.0)
    logits_BTV[0, 0, 2] = logits_BTV[0, 1, 3] = 50.0
    assert float(next_token(logits_BTV, ids_BT)) < 1e-6
