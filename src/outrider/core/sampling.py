"""Sampling: logits to probabilities by temperature, top-k, top-p, min-p; draws and logprobs.

The processed distribution of a node is one and the same in the acceptance ratio, in the residual
and in the draw. A greedy distribution is a point mass, held as a token id, so greedy decoding
builds no probabilities. `Sampling` holds the operators: an engine passes those of its kernels
(kernels/registry.py), all other code uses the PyTorch definitions of this file.

Shapes:  N = nodes or distributions of one sequence's round, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from outrider.core.clock import host_floats, host_ints
from outrider.core.draft import TokenLogprobs
from outrider.core.errors import ContractError
from outrider.core.params import SamplingParams
from outrider.core.rng import Pick, Rng, Role, inverse_cdf
from outrider.core.tree_nodes import ChosenNodes, MakeNodes

# (logits_NV, temperature, out_NV): rows of softmax(logits / temperature); `out` may be `logits`.
Softmax: TypeAlias = Callable[[Tensor, float, Tensor], None]
# (logits_NV, k, out_NV): the rows with -inf below their k-th largest; `out` may be `logits`.
TopK: TypeAlias = Callable[[Tensor, int, Tensor], None]
# (probs_NV, top_p, min_p): each row without its unlikely tokens, in place, its sum one again.
KeepLikely: TypeAlias = Callable[[Tensor, float, float], None]
# (probs_NV, tokens): the probability of each token under the distribution of its position.
Masses: TypeAlias = Callable[[Tensor, Sequence[int]], list[float]]


class Leftover(Protocol):
    def __call__(
        self, p_V: Tensor, proposal: int | Tensor, share: float = 1.0
    ) -> tuple[Tensor, float]:
        """Weights of shape V and their sum: the rest of `share` times `p_V` without `proposal`.

        The proposal is a distribution q, which leaves max(share * p - q, 0), or a point mass, a
        token id, which leaves nothing of its token. The next call may overwrite the weights, and
        may get them as its `p_V`.
        """
        ...


def softmax(logits_NV: Tensor, temperature: float, out_NV: Tensor) -> None:
    """Softmax row by row; a row's bits depend on that row alone. Accepts inference tensors."""
    with torch.inference_mode():
        out_NV.copy_(torch.softmax(logits_NV / temperature, dim=-1))


def top_k(logits_NV: Tensor, k: int, out_NV: Tensor) -> None:
    """Top-k filter. Ties with the k-th largest are kept."""
    with torch.inference_mode():
        edge_N1 = torch.topk(logits_NV, k, dim=-1).values[:, -1:]
        out_NV.copy_(logits_NV.masked_fill(logits_NV < edge_N1, float("-inf")))


def keep_likely(probs_NV: Tensor, top_p: float, min_p: float) -> None:
    """Keep the smallest set of likeliest tokens whose mass reaches `top_p`, at least one and of
    equal ones the first; then drop tokens below `min_p` of the likeliest."""
    with torch.inference_mode():
        if top_p < 1:
            probs_NV.copy_(nucleus(probs_NV, top_p))
        if min_p > 0:
            floor_N1 = min_p * probs_NV.amax(-1, keepdim=True)
            probs_NV.copy_(renormalised(probs_NV.masked_fill(probs_NV < floor_N1, 0)))


def nucleus(probs_NV: Tensor, top_p: float | Tensor) -> Tensor:
    """Rows with the smallest set of likeliest tokens whose mass reaches `top_p`, renormalised.
    `top_p` has shape [N, 1] if rows have their own."""
    sorted_NV, order_NV = probs_NV.sort(dim=-1, descending=True, stable=True)
    before_NV = sorted_NV.double().cumsum(-1) - sorted_NV
    keep_NV = before_NV < top_p
    keep_NV[:, :1].fill_(True)
    mask_NV = torch.zeros_like(keep_NV).scatter(-1, order_NV, keep_NV)
    return renormalised(probs_NV.masked_fill(~mask_NV, 0))


def renormalised(probs_NV: Tensor) -> Tensor:
    """Rows divided by their sums."""
    # A running sum adds in one order; a plain sum of one long row is split among threads.
    total_N1 = probs_NV.cumsum(-1, dtype=torch.float64)[:, -1:]
    return probs_NV / total_N1.to(probs_NV.dtype)


def leftover(p_V: Tensor, proposal: int | Tensor, share: float = 1.0) -> tuple[Tensor, float]:
    """Plain version of `Leftover`; weights and sum are float64."""
    if isinstance(proposal, int):
        left_V = share * p_V.double()
        left_V[proposal] = 0
    else:
        left_V = (share * p_V.double() - proposal.double()).clamp_min(0)
    return left_V, float(left_V.sum())


def masses(probs_NV: Tensor, tokens: Sequence[int]) -> list[float]:
    """Plain version of `Masses`; waits for the device once."""
    return probs_at(probs_NV, range(len(tokens)), tokens)


def probs_at(probs_NV: Tensor, rows: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """Probability of `tokens[i]` in row `rows[i]`; waits for the device once."""
    vocab_size = probs_NV.shape[-1]
    indices = [row * vocab_size + token for row, token in zip(rows, tokens, strict=True)]
    where = torch.tensor(indices, dtype=torch.int64, device=probs_NV.device)
    return host_floats(probs_NV.take(where))


@dataclass(frozen=True, slots=True)
class Sampling:
    """The operators of one backend: all native, or all as defined here."""

    softmax: Softmax = softmax
    pick: Pick = inverse_cdf
    leftover: Leftover = leftover
    masses: Masses = masses
    top_k: TopK = top_k
    keep_likely: KeepLikely = keep_likely
    nodes: MakeNodes = ChosenNodes


PLAIN = Sampling()


# A quotient by less would overflow to infinity, and its distribution would not be numeric.
MIN_TEMPERATURE = 1e-20


@dataclass(frozen=True, slots=True)
class Distributions:
    """One distribution per node: exactly one of `tokens` (point masses) and `probs_NV` is given."""

    tokens: tuple[int, ...] | None = None
    probs_NV: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.probs_NV is None):
            raise ContractError("distributions are either tokens or probabilities")

    def at(self, index: int) -> int | Tensor:
        """A token id (all mass on it) or probabilities of shape V."""
        if self.tokens is not None:
            return self.tokens[index]
        if self.probs_NV is None:
            raise ContractError("there are no probabilities")
        return self.probs_NV[index]


def empty_probs(count: int, logits_V: Tensor) -> Tensor:
    """Uninitialised memory for `count` distributions of logits like these, in their dtype."""
    # MPS lacks float64, which sums and draws use.
    device = "cpu" if logits_V.device.type == "mps" else logits_V.device
    return logits_V.new_empty((count, logits_V.shape[-1]), device=device)


def processed_probs(
    logits_NV: Tensor,
    params: SamplingParams,
    sampling: Sampling = PLAIN,
    out_NV: Tensor | None = None,
) -> Tensor:
    """Probabilities under `params`, temperature > 0; the dtype of `logits_NV` is kept.

    Filters apply in the order temperature, top-k, top-p, min-p, each to the rest. Ties at a top-k
    edge are all kept, so the distribution does not depend on the order of a sort. The result is
    written to `out_NV`, if given: a tensor of `empty_probs`, or the logits themselves on a CPU.
    """
    if out_NV is None:
        out_NV = empty_probs(len(logits_NV), logits_NV)
    if 0 < params.top_k < logits_NV.shape[-1]:
        sampling.top_k(logits_NV, params.top_k, out_NV)
        logits_NV = out_NV
    sampling.softmax(logits_NV, max(params.temperature, MIN_TEMPERATURE), out_NV)
    if params.top_p < 1 or params.min_p > 0:
        sampling.keep_likely(out_NV, params.top_p, params.min_p)
    return out_NV


def mass(distribution: int | Tensor, token: int) -> float:
    """Probability of `token` under `distribution`, a point mass or probabilities of shape V."""
    if isinstance(distribution, int):
        return float(distribution == token)
    return float(distribution[token])


def draw(distribution: int | Tensor, rng: Rng, node: int) -> int:
    """The target's own token after draft node `node`."""
    return (
        distribution if isinstance(distribution, int) else rng.pick(distribution, node, Role.NEXT)
    )


def draw_at(distribution: int | Tensor, rng: Rng, depth: int) -> int:
    """The target's own token `depth` positions after the round's start, keyed by position."""
    return distribution if isinstance(distribution, int) else rng.pick_at(distribution, depth)


def log_probs(logits_NV: Tensor) -> Tensor:
    """Log-probabilities of `logits_NV` at temperature 1."""
    return torch.log_softmax(logits_NV, dim=-1)


def token_logprobs(
    log_NV: Tensor, distributions: Sequence[int], tokens: Sequence[int], num_top: int
) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of `tokens`, the i-th of which came from row `distributions[i]` of
    `log_NV`.

    Greedy decoding has only a point mass; its log-probabilities come from the processed logits at
    temperature 1, so that they still say how sure the model was.
    """
    return tuple(
        TokenLogprobs(
            token, float(log_NV[distribution, token]), _top(log_NV[distribution], num_top)
        )
        for distribution, token in zip(distributions, tokens, strict=True)
    )


def _top(log_V: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    if count == 0:
        return ()
    least = torch.topk(log_V, min(count, len(log_V))).values[-1]
    ids = (log_V >= least).nonzero()[:, 0]
    values, order = torch.sort(log_V[ids], descending=True, stable=True)
    best = zip(host_ints(ids[order]), host_floats(values), strict=True)
    return tuple(pair for pair in islice(best, count) if pair[1] > float("-inf"))
