"""The loss behind an output head, a few places at a time, forward and backward together.

Logits of a batch are the largest tensors of a small model's training, many times the caches; to
write them, their exponentials and their gradients and to read them again costs more than the
products. So each slice of places goes all the way, from logits to gradients, before the next.

Shapes:  P = places of a batch, D = hidden size, V = vocabulary, C = ids that are kept of a law,
         S = places of a slice.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from outrider.train.losses import TopLaws, distillation, top_laws

# Logits of a slice are 2 MB at a vocabulary of 8,192.
_SLICE = 64


def head_loss(
    x_PD: Tensor, head_VD: Tensor, laws: TopLaws, *, num_own: int = 0
) -> tuple[Tensor, TopLaws]:
    """The mean divergence from `laws` of what a head says of `x_PD`, and the `num_own` likeliest
    ids of what it says, without gradients."""
    function = cast("Any", _HeadLoss)
    loss, ids_PC, logprobs_PC = function.apply(
        x_PD, head_VD, laws.ids_PC, laws.logprobs_PC, num_own
    )
    return loss, TopLaws(ids_PC, logprobs_PC)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_PD: Tensor, head_VD: Tensor, ids_PC: Tensor, logprobs_PC: Tensor, num_own: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_places, learns_head = len(x_PD), ctx.needs_input_grad[1]
        total, dx_PD = x_PD.new_zeros((), dtype=torch.float32), torch.empty_like(x_PD)
        dhead_VD = torch.zeros_like(head_VD) if learns_head else None
        own: list[TopLaws] = []
        for first in range(0, num_places, _SLICE):
            places = slice(first, first + _SLICE)
            x_SD, laws = x_PD[places], TopLaws(ids_PC[places], logprobs_PC[places])
            logits_SV = functional.linear(x_SD, head_VD)
            own.append(top_laws(logits_SV, num_own))
            with torch.enable_grad():
                logits_SV.requires_grad_()
                loss = distillation(logits_SV, laws) * (len(x_SD) / num_places)
            (dlogits_SV,) = torch.autograd.grad(loss, logits_SV)
            total += loss.detach()
            dx_PD[places] = dlogits_SV @ head_VD
            if dhead_VD is not None:
                dhead_VD += dlogits_SV.T @ x_SD
        ctx.save_for_backward(dx_PD, dhead_VD)
        found_PC, said_PC = (
            torch.cat(parts)
            for parts in zip(*((one.ids_PC, one.logprobs_PC) for one in own), strict=True)
        )
        ctx.mark_non_differentiable(found_PC, said_PC)
        return total, found_PC, said_PC

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx_PD, dhead_VD = ctx.saved_tensors
        own_head = None if dhead_VD is None else dhead_VD * grads[0]
        return dx_PD * grads[0], own_head, None, None, None
