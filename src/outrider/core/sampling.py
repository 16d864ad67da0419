"""What sampling computes over a vocabulary: its operators, and their definitions in PyTorch.

An engine passes the operators that its kernels brought (`kernels/registry.py`) to whatever makes a
law, draws from one or refuses a draft. Who is given none uses the definitions here, in the dtype of
the numbers that it has; the law tests enumerate rules and drafters with these.

Shapes:  N = nodes, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from outrider.core.host import host_floats
from outrider.core.noise import Pick, inverse_cdf
from outrider.core.tree_nodes import ChosenNodes, MakeNodes

# (logits_NV, temperature, out_NV): rows of softmax(logits / temperature); `out` may be `logits`.
Softmax: TypeAlias = Callable[[Tensor, float, Tensor], None]
# (logits_NV, k, out_NV): the rows with -inf below their k-th largest; `out` may be `logits`.
TopK: TypeAlias = Callable[[Tensor, int, Tensor], None]
# (probs_NV, top_p, min_p): each row without its unlikely tokens, in place, its sum one again.
KeepLikely: TypeAlias = Callable[[Tensor, float, float], None]
# (probs_NV, tokens): the probability that each token has under the law of its place.
Masses: TypeAlias = Callable[[Tensor, Sequence[int]], list[float]]


class Leftover(Protocol):
    def __call__(
        self, p_V: Tensor, proposal: int | Tensor, share: float = 1.0
    ) -> tuple[Tensor, float]:
        """Weights of shape V and their sum: what `proposal` leaves of `share` times `p_V`.

        The proposal is a law q, which leaves max(share * p - q, 0), or a point mass, a token id,
        which leaves nothing of its token. The next call may write over the weights, and may be
        given them as its `p_V`.
        """
        ...


def softmax(logits_NV: Tensor, temperature: float, out_NV: Tensor) -> None:
    """Row by row; a row's bits depend on that row alone. Logits may be of an inference mode."""
    with torch.inference_mode():
        out_NV.copy_(torch.softmax(logits_NV / temperature, dim=-1))


def top_k(logits_NV: Tensor, k: int, out_NV: Tensor) -> None:
    """Ties with the k-th largest are kept."""
    with torch.inference_mode():
        edge_N1 = torch.topk(logits_NV, k, dim=-1).values[:, -1:]
        out_NV.copy_(logits_NV.masked_fill(logits_NV < edge_N1, float("-inf")))


def keep_likely(probs_NV: Tensor, top_p: float, min_p: float) -> None:
    """The smallest set of likeliest tokens whose mass reaches `top_p`, at least one and of equal
    ones the first; then, of what is left, what is at least `min_p` of the likeliest."""
    with torch.inference_mode():
        if top_p < 1:
            probs_NV.copy_(_nucleus(probs_NV, top_p))
        if min_p > 0:
            floor_N1 = min_p * probs_NV.amax(-1, keepdim=True)
            probs_NV.copy_(_renormalised(probs_NV.masked_fill(probs_NV < floor_N1, 0)))


def _nucleus(probs_NV: Tensor, top_p: float) -> Tensor:
    sorted_NV, order_NV = probs_NV.sort(dim=-1, descending=True, stable=True)
    before_NV = sorted_NV.double().cumsum(-1) - sorted_NV
    keep_NV = before_NV < top_p
    keep_NV[:, 0] = True
    mask_NV = torch.zeros_like(keep_NV).scatter(-1, order_NV, keep_NV)
    return _renormalised(probs_NV.masked_fill(~mask_NV, 0))


def _renormalised(probs_NV: Tensor) -> Tensor:
    # A running sum adds in one order; a plain sum of one long row is split among threads.
    total_N1 = probs_NV.cumsum(-1, dtype=torch.float64)[:, -1:]
    return probs_NV / total_N1.to(probs_NV.dtype)


def leftover(p_V: Tensor, proposal: int | Tensor, share: float = 1.0) -> tuple[Tensor, float]:
    """As `Leftover` says; weights and sum are float64."""
    if isinstance(proposal, int):
        left_V = share * p_V.double()
        left_V[proposal] = 0
    else:
        left_V = (share * p_V.double() - proposal.double()).clamp_min(0)
    return left_V, float(left_V.sum())


def masses(probs_NV: Tensor, tokens: Sequence[int]) -> list[float]:
    """As `Masses` says; waits for the device once."""
    vocab_size = probs_NV.shape[-1]
    places = [node * vocab_size + token for node, token in enumerate(tokens)]
    where = torch.tensor(places, dtype=torch.int64, device=probs_NV.device)
    return host_floats(probs_NV.take(where))


@dataclass(frozen=True, slots=True)
class Sampling:
    """The operators of one side: all native, or all as defined here."""

    softmax: Softmax = softmax
    pick: Pick = inverse_cdf
    leftover: Leftover = leftover
    masses: Masses = masses
    top_k: TopK = top_k
    keep_likely: KeepLikely = keep_likely
    nodes: MakeNodes = ChosenNodes


PLAIN = Sampling()
