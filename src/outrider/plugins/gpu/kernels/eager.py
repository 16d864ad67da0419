"""Triton sampling and acceptance for rounds that are not captured: results are read by the host.

These operators allocate results and wait for the device, which a captured round must not do.

Shapes:  M = logits rows, B = sequences, K = drafted tokens, V = vocabulary, N = nodes.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from outrider.core.clock import host_floats, host_ints
from outrider.core.errors import NumericsError
from outrider.core.sampling import PLAIN, Sampling
from outrider.plugins.gpu.kernels.filters import TritonFilters
from outrider.plugins.gpu.kernels.launchers import ProbRows, TritonProbs, num_pieces
from outrider.plugins.gpu.kernels.scratch import Workspace


class EagerProbs:
    """argmax, softmax, filters, pick and leftover, on contiguous float32 of its device; other
    tensors go to the definitions. Every call of `leftover` reuses one buffer.

    A captured round must not do what happens here: results that the host reads are allocated, and
    the host waits for them.
    """

    def __init__(self, workspace: Workspace, device: torch.device) -> None:
        self._distributions, self._filters = TritonProbs(workspace), TritonFilters(workspace)
        self._device = device
        self._temperature_1 = torch.ones(1, device=device)
        self._min_p_1 = torch.zeros(1, device=device)
        self._k_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self._number_1 = torch.zeros(1, dtype=torch.float64, device=device)
        self._token_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self._left_V = torch.empty(0, device=device)
        self._sums_C = torch.empty(0, dtype=torch.float64, device=device)

    @property
    def sampling(self) -> Sampling:
        """The operators of a round: these, but not argmax."""
        return replace(
            PLAIN,
            softmax=self.softmax,
            top_k=self.top_k,
            keep_likely=self.keep_likely,
            pick=self.pick,
            leftover=self.leftover,
        )

    def argmax(self, logits_MV: Tensor) -> list[int]:
        """The first largest of each row. Waits for the device."""
        chosen_M = torch.empty(logits_MV.shape[0], dtype=torch.int64, device=self._device)
        self._distributions.argmax(logits_MV.contiguous(), chosen_M)
        return host_ints(chosen_M)

    def softmax(self, logits_NV: Tensor, temperature: float, out_NV: Tensor) -> None:
        if not (self._plain(logits_NV) and self._plain(out_NV)):
            PLAIN.softmax(logits_NV, temperature, out_NV)
            return
        self._temperature_1.fill_(temperature)
        self._distributions.softmax(logits_NV, self._temperature_1, out_NV)

    def top_k(self, logits_NV: Tensor, k: int, out_NV: Tensor) -> None:
        if not (self._plain(logits_NV) and self._plain(out_NV)):
            PLAIN.top_k(logits_NV, k, out_NV)
            return
        if out_NV is not logits_NV:
            out_NV.copy_(logits_NV)
        self._filters.top_k(out_NV, self._k_1.fill_(k))

    def keep_likely(self, probs_NV: Tensor, top_p: float, min_p: float) -> None:
        if not self._plain(probs_NV):
            PLAIN.keep_likely(probs_NV, top_p, min_p)
            return
        limits = self._number_1.fill_(top_p), self._min_p_1.fill_(min_p)
        self._filters.keep_likely(probs_NV, *limits)

    def pick(self, weights_V: Tensor, uniform: float) -> int:
        """The operator `pick` of core/sampling.py. Waits for the device."""
        if not self._plain(weights_V):
            return PLAIN.pick(weights_V, uniform)
        self._number_1.fill_(uniform)
        self._distributions.pick(ProbRows(weights_V[None], None), self._number_1, self._token_1)
        (token,) = host_ints(self._token_1)
        if token < 0:
            raise NumericsError("the model")
        return token

    def leftover(
        self, p_V: Tensor, proposal: int | Tensor, share: float = 1.0
    ) -> tuple[Tensor, float]:
        """The operator `leftover` of core/sampling.py. Waits for the device."""
        if not (self._plain(p_V) and (isinstance(proposal, int) or self._plain(proposal))):
            return PLAIN.leftover(p_V, proposal, share)
        size = p_V.shape[0]
        if self._left_V.shape[0] != size:
            self._left_V = torch.empty(size, device=self._device)
            self._sums_C = self._sums_C.new_empty(num_pieces(size))
        self._number_1.fill_(share)
        self._distributions.leftover(p_V, proposal, self._number_1, self._left_V, self._sums_C)
        return self._left_V, sum(host_floats(self._sums_C))

    def rehearse(self, size: int) -> None:
        """Call all operators, for rows of `size` that begin at multiples of 16 bytes and not."""
        rows_2V = torch.zeros(2, size, device=self._device)
        self.argmax(rows_2V)
        for one, other in product((0, 1), (0, 1)):
            out_1V = rows_2V[other : other + 1]
            self.top_k(rows_2V[one : one + 1], 1, out_1V)
            self.softmax(rows_2V[one : one + 1], 1.0, out_1V)
            self.keep_likely(out_1V, 0.5, 0.5)
            self.pick(out_1V[0], 0.5)
            for proposal in (0, out_1V[0]):
                self.leftover(rows_2V[one], proposal)

    def _plain(self, tensor: Tensor) -> bool:
        same = tensor.dtype is torch.float32 and tensor.device.type == self._device.type
        return same and tensor.is_contiguous()
