"""A quantised matrix as codes and scales, the record that all published layouts are unpacked to.

Numbers are made from the record. Kernels that run on blocks (csrc/groups.h) use the codes
themselves, as blocks of 32 inputs: of GGUF's type MXFP4 or Q8_0, or of types of our own, 128 to
130, with a zero for each block or with scales that are bfloat16.

Shapes:  O = outputs, I = inputs, R = outputs / rows, G = groups of inputs, N = outputs of a piece,
         U = blocks of an output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.plan import BlockRows

_BLOCK = 32
# Numbers of the types of blocks, by the dtype of their scales.
_MXFP4 = 39
_FOUR_BITS = {torch.float16: 128, torch.bfloat16: 129}
_EIGHT_BITS = {torch.float16: 8, torch.bfloat16: 130}
# Numbers decoded at once, in float32.
_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """A matrix with a byte (code) for each number, and the parts of the formula for the numbers:

        x[o, i] = scales[o // rows, g] * (codes[o, i] - zeros[o // rows, g])       g = group of i

    The group of input i is i // group_size or, if inputs were quantised in another order (act
    order), groups_I[i]. Zeros of None mean 0. With a `table`, codes are indices of its values;
    float8 codes are values themselves. The matrix may be `count` matrices one below the other.
    """

    codes_OI: Tensor
    scales_RG: Tensor
    group_size: int
    zeros_RG: Tensor | None = None
    rows: int = 1
    groups_I: Tensor | None = None
    table: Tensor | None = None
    count: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor in an unquantised checkpoint. Stacks of experts are stored there
        as inputs by outputs, and `numbers` returns them so."""
        num_out, num_in = self.codes_OI.shape
        if self.count == 1 and self.table is None:
            return num_out, num_in
        return self.count, num_in, num_out // self.count

    @property
    def order(self) -> Tensor | None:
        """order_I: the inputs group by group; None if they are in that order already."""
        return None if self.groups_I is None else torch.argsort(self.groups_I, stable=True)

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """Decode the matrix, some outputs at a time. Numbers are rounded once, from float32."""
        num_out, num_in = self.codes_OI.shape
        out_OI = torch.empty(num_out, num_in, dtype=dtype)
        step = max(1, _AT_ONCE // max(num_in, 1))
        for first in range(0, num_out, step):
            out_OI[first : first + step] = self._piece(first, min(first + step, num_out))
        if len(self.shape) == 2:
            return out_OI
        return out_OI.view(self.count, -1, num_in).transpose(1, 2)

    def blocks(self) -> Sequence[BlockRows]:
        """The matrices as blocks with the same values. Empty if no type of block can hold them: for
        float8, for inputs in another order, and for groups that are no multiple of 32 inputs."""
        num_in = self.codes_OI.shape[1]
        size = num_in if self.scales_RG.shape[1] == 1 else self.group_size
        if self.groups_I is not None or num_in % _BLOCK or size % _BLOCK:
            return ()
        found = self._as_mxfp4() if self.table is not None else self._as_integers()
        if found is None:
            return ()
        kind, raw_OUB = found
        each = raw_OUB.numpy().reshape(self.count, -1)
        num_out = len(raw_OUB) // self.count
        return [BlockRows(raw, kind, num_out, num_in) for raw in each]

    def _as_mxfp4(self) -> tuple[int, Tensor] | None:
        # 2^(e - 127); the largest e has no float32 and stands for NaN.
        if not bool(self.scales_RG.isfinite().all()):
            return None
        exponents = torch.frexp(self._by_block(self.scales_RG)).exponent + 126
        return _MXFP4, torch.cat([exponents[..., None].byte(), self._halves()], dim=2)

    def _as_integers(self) -> tuple[int, Tensor] | None:
        codes_OI, zeros_RG = self.codes_OI, self.zeros_RG
        if codes_OI.is_floating_point():
            return None
        kept = scales_in(self.scales_RG)
        if kept is None:
            return None
        scales_OU2 = self._by_block(self.scales_RG.to(kept)[..., None].view(torch.uint8))
        if codes_OI.dtype == torch.uint8 and zeros_RG is not None and int(codes_OI.max()) < 16:
            zeros_OU1 = self._by_block(zeros_RG)[..., None].byte()
            return _FOUR_BITS[kept], torch.cat([scales_OU2, zeros_OU1, self._halves()], dim=2)
        if codes_OI.dtype == torch.uint8 and zeros_RG is not None:
            if not bool((zeros_RG == 128).all()):
                return None
            codes_OI = codes_OI ^ 128
        elif zeros_RG is not None and bool(zeros_RG.any()):
            return None
        codes_OUB = codes_OI.view(torch.uint8).reshape(len(codes_OI), -1, _BLOCK)
        return _EIGHT_BITS[kept], torch.cat([scales_OU2, codes_OUB], dim=2)

    def _halves(self) -> Tensor:
        """16 bytes for each block, whose first 16 codes are the low halves of the bytes."""
        codes = self.codes_OI.reshape(len(self.codes_OI), -1, 2, _BLOCK // 2)
        return codes[:, :, 0] | codes[:, :, 1] << 4

    def _by_block(self, by_group_RG: Tensor) -> Tensor:
        num_out, num_in = self.codes_OI.shape
        groups_U = torch.arange(num_in // _BLOCK) * _BLOCK // self.group_size
        rows_O = torch.arange(num_out) // self.rows
        return by_group_RG[rows_O[:, None], groups_U[None, :]]

    def _piece(self, first: int, last: int) -> Tensor:
        codes_NI = self.codes_OI[first:last]
        table = self.table
        x_NI = codes_NI.to(torch.float32) if table is None else table[codes_NI.int()]
        at_N = torch.arange(first, last) // self.rows
        if self.zeros_RG is not None:
            x_NI -= self._spread(self.zeros_RG[at_N].float(), x_NI.shape[1])
        return x_NI.mul_(self._spread(self.scales_RG[at_N].float(), x_NI.shape[1]))

    def _spread(self, by_group_NG: Tensor, num_in: int) -> Tensor:
        """Expand values by group to values by input."""
        if self.groups_I is not None:
            return by_group_NG[:, self.groups_I]
        if by_group_NG.shape[1] == 1:
            return by_group_NG
        return by_group_NG.repeat_interleave(self.group_size, dim=1)[:, :num_in]


def scales_in(scales: Tensor) -> torch.dtype | None:
    """The dtype in which blocks can hold these scales exactly; None if neither can."""
    whole = scales.float()
    return next((d for d in _FOUR_BITS if torch.equal(whole.to(d).float(), whole)), None)
