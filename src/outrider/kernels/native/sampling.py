"""Native sampling operators (softmax, filters, draws) of csrc/sampling.cpp and csrc/filters.cpp.

The operators take contiguous float32 on the CPU, which native kernels produce. Other tensors, such
as the float64 distributions of some drafters, go to the definitions in core/sampling.py.

Shapes:  N = nodes, V = vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float

import torch
from torch import Tensor

from outrider.core.errors import ContractError, NumericsError
from outrider.core.sampling import PLAIN, Sampling
from outrider.kernels.native.ops import function
from outrider.kernels.native.trees import NativeTrees, is_plain


def native_sampling(library: ctypes.CDLL, team: int) -> Sampling:
    """The operators of `library` on the team at this address (`kernels/native/ops.py`)."""
    ops = _NativeSampling(library, team)
    return Sampling(
        ops.softmax,
        ops.pick,
        ops.leftover,
        masses,
        ops.top_k,
        ops.keep_likely,
        NativeTrees(library, team).nodes,
    )


class _NativeSampling:
    """Native operators. Not thread-safe: every call of `leftover` reuses one buffer."""

    def __init__(self, library: ctypes.CDLL, team: int) -> None:
        self._team = team
        self._softmax, self._pick = function(library, "softmax"), function(library, "pick")
        self._leftover, self._top_k = function(library, "leftover"), function(library, "top_k")
        self._keep_likely = function(library, "keep_likely")
        self._leftover_V = torch.empty(0)

    def softmax(self, logits_NV: Tensor, temperature: float, out_NV: Tensor) -> None:
        if not (is_plain(logits_NV) and is_plain(out_NV)):
            return PLAIN.softmax(logits_NV, temperature, out_NV)
        num_rows, size = logits_NV.shape
        logits, out = logits_NV.data_ptr(), out_NV.data_ptr()
        return self._softmax(self._team, logits, temperature, out, num_rows, size)

    def top_k(self, logits_NV: Tensor, k: int, out_NV: Tensor) -> None:
        if not (is_plain(logits_NV) and is_plain(out_NV)):
            return PLAIN.top_k(logits_NV, k, out_NV)
        num_rows, size = logits_NV.shape
        logits, out = logits_NV.data_ptr(), out_NV.data_ptr()
        return self._top_k(self._team, logits, k, out, num_rows, size)

    def keep_likely(self, probs_NV: Tensor, top_p: float, min_p: float) -> None:
        if not is_plain(probs_NV):
            return PLAIN.keep_likely(probs_NV, top_p, min_p)
        num_rows, size = probs_NV.shape
        return self._keep_likely(self._team, probs_NV.data_ptr(), top_p, min_p, num_rows, size)

    def pick(self, weights_V: Tensor, uniform: float) -> int:
        if not is_plain(weights_V):
            return PLAIN.pick(weights_V, uniform)
        index = self._pick(self._team, weights_V.data_ptr(), uniform, weights_V.shape[0])
        if index < 0:
            raise NumericsError("the model")
        return index

    def leftover(
        self, p_V: Tensor, proposal: int | Tensor, share: float = 1.0
    ) -> tuple[Tensor, float]:
        certain = isinstance(proposal, int)
        if not (is_plain(p_V) and (certain or is_plain(proposal))):
            return PLAIN.leftover(p_V, proposal, share)
        size = p_V.shape[0]
        if self._leftover_V.shape[0] != size:
            self._leftover_V = torch.empty(size)
        q, token = (None, proposal) if certain else (proposal.data_ptr(), -1)
        out = self._leftover_V.data_ptr()
        left = self._leftover(self._team, p_V.data_ptr(), q, token, share, out, size)
        return self._leftover_V, left


def masses(probs_NV: Tensor, tokens: Sequence[int]) -> list[float]:
    """The probability of each token in its row, read by address, without PyTorch's overhead."""
    if not is_plain(probs_NV):
        return PLAIN.masses(probs_NV, tokens)
    start, row = probs_NV.data_ptr(), probs_NV.shape[-1]
    if len(tokens) > probs_NV.shape[0]:
        raise ContractError("more tokens than rows")
    if tokens and not 0 <= min(tokens) <= max(tokens) < row:
        raise ContractError("a token lies outside its row")
    addresses = [start + 4 * (node * row + token) for node, token in enumerate(tokens)]
    return [c_float.from_address(address).value for address in addresses]
