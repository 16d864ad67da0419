"""The loss in slices is the loss at once: its value, its gradients, and what the head says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from outrider_lab.train.losses import TopProbs, distillation, head_loss, top_distributions


def drawn(num_places: int) -> tuple[Tensor, Tensor, TopProbs]:
    rng = torch.Generator().manual_seed(num_places)
    x_PD, head_VD, taught_PV = (
        torch.randn(*shape, generator=rng) for shape in ((num_places, 6), (30, 6), (num_places, 30))
    )
    return x_PD, head_VD, top_distributions(taught_PV, 5)


@pytest.mark.parametrize("num_places", [1, 64, 150])
@pytest.mark.parametrize("learns_head", [True, False])
def test_slices_are_the_whole(num_places: int, learns_head: bool) -> None:
    x_PD, head_VD, distributions = drawn(num_places)
    x_PD.requires_grad_()
    head_VD.requires_grad_(learns_head)
    learned = [x_PD, head_VD] if learns_head else [x_PD]
    logits_PV = functional.linear(x_PD, head_VD)
    wanted = distillation(logits_PV, distributions)
    found, own = head_loss(x_PD, head_VD, distributions, num_own=4)
    torch.testing.assert_close(found, wanted)
    said = top_distributions(logits_PV.detach(), 4)
    assert torch.equal(own.ids_PC, said.ids_PC)
    torch.testing.assert_close(own.logprobs_PC, said.logprobs_PC)
    assert not own.logprobs_PC.requires_grad
    # As where it is a part of a sum.
    pairs = zip(
        torch.autograd.grad(0.3 * found, learned),
        torch.autograd.grad(0.3 * wanted, learned),
        strict=True,
    )
    for sliced, whole in pairs:
        torch.testing.assert_close(sliced, whole, atol=1e-7, rtol=1e-5)


def test_a_distribution_of_one_token_is_the_cross_entropy() -> None:
    x_PD, head_VD, _ = drawn(9)
    next_P = torch.arange(9)
    distributions = TopProbs(next_P[:, None], torch.zeros(9, 1))
    wanted = functional.cross_entropy(functional.linear(x_PD, head_VD), next_P)
    torch.testing.assert_close(
        head_loss(x_PD, head_VD, distributions)[0], wanted, atol=1e-4, rtol=0
    )
