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

# (logits_NV, temperature, out_NV): rows of softmax(logits / temperature); `out` may be `logits`.
Softmax: TypeAlias = Callable[[Tensor, float, Tensor], None]
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


PLAIN = Sampling()
