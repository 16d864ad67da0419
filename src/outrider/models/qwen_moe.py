"""A mixture of experts: each token goes through the few feed-forward nets that a router chooses.

Tokens are taken expert by expert, so that an expert's weights are read once a pass. What a token
gets is summed in the order of the experts' numbers, whoever its neighbours are, so its bits depend
on the token alone.

Shapes:  N = packed tokens, n = tokens of one expert, D = hidden size, X = experts, Q = experts of a
         token, F = an expert's FFN size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.clock import host_rows
from outrider.kernels.plan import PackedLinear
from outrider.kernels.reference.delta import by_row
from outrider.kernels.registry import Kernels
from outrider.models.qwen_hybrid_config import Experts


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """One feed-forward net: down(silu(gate) * up)."""

    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True)
class MixtureWeights:
    """`router` scores all experts and, in its last output, the shared one."""

    sizes: Experts
    router: PackedLinear
    experts: Sequence[DenseWeights]
    shared: DenseWeights


def feed(kernels: Kernels, net: DenseWeights, x_ND: Tensor) -> Tensor:
    """What one net gives for all of `x_ND`, in new memory."""
    up_N2F = x_ND.new_empty(x_ND.shape[0], net.gate_up.num_out)
    kernels.linear(x_ND, net.gate_up, up_N2F)
    activated_NF = x_ND.new_empty(x_ND.shape[0], net.down.num_in)
    kernels.silu_mul(up_N2F, activated_NF)
    out_ND = torch.empty_like(x_ND)
    kernels.linear(activated_NF, net.down, out_ND)
    return out_ND


def mix(kernels: Kernels, weights: MixtureWeights, x_ND: Tensor) -> Tensor:
    """What the mixture gives for the normed residual `x_ND`. A host sync: reads who was chosen."""
    sizes = weights.sizes
    scores_NX1 = x_ND.new_empty(x_ND.shape[0], sizes.num_experts + 1)
    kernels.linear(x_ND, weights.router, scores_NX1)
    laws_NX = by_row(lambda row_X: torch.softmax(row_X, 0), scores_NX1[:, :-1])
    parts_NQ, chosen_NQ = laws_NX.topk(sizes.num_chosen)
    if sizes.normalise:
        parts_NQ = by_row(lambda row_Q: row_Q / row_Q.sum(), parts_NQ)
    out_ND = torch.zeros_like(x_ND)
    for expert, places in _by_expert(host_rows(chosen_NQ)):
        rows_n = torch.tensor([row for row, _ in places], device=x_ND.device)
        ranks_n = torch.tensor([rank for _, rank in places], device=x_ND.device)
        given_nD = feed(kernels, weights.experts[expert], x_ND[rows_n])
        out_ND.index_add_(0, rows_n, given_nD.mul_(parts_NQ[rows_n, ranks_n, None]))
    shared_ND = feed(kernels, weights.shared, x_ND)
    return out_ND.add_(shared_ND.mul_(by_row(torch.sigmoid, scores_NX1[:, -1:])))


def _by_expert(chosen: Sequence[Sequence[int]]) -> list[tuple[int, list[tuple[int, int]]]]:
    """Experts by number, with the rows that chose them and as which of their choices."""
    places: dict[int, list[tuple[int, int]]] = {}
    for row, experts in enumerate(chosen):
        for rank, expert in enumerate(experts):
            places.setdefault(expert, []).append((row, rank))
    return sorted(places.items())
