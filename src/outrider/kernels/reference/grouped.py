"""Linears of groups in PyTorch, the definition: weights of 4 bits, and output heads of 8.

quantise.py defines the format of weights. Every GROUP inputs of a row of activations become
integers of -127 to 127 and one scale, their largest magnitude over 127. Sums of integers are exact
in any order, so a row's bits do not depend on other rows. Group after group, with one rounding in
each step,

    sum = fma(sum of code * integer, scale * row's scale, sum)
    sum = fma(minimum, row's scale * sum of integers, sum)

A row or a matrix's output that holds NaN or infinity gives NaN.

Shapes:  N = rows, I = inputs, O = outputs, G = groups, C = the inputs of a group, F = factors of a
         group, V = vocabulary, D = hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from outrider.core.errors import ContractError
from outrider.kernels.plan import PackedLinear, PackedTable
from outrider.kernels.reference.linear import GROUP, TorchInt8, quantise_rows
from outrider.kernels.reference.quantise import quantise

SCHEMES = ("int8", "int4")
# Bits of matrices and of the output head.
BITS, HEAD_BITS = 4, 8
# Groups whose sums are computed at once.
_AT_ONCE = 16


class TorchGrouped:
    """The definition, with a byte for each code. Without float64, a step rounds twice."""

    scheme = "int4"

    def pack(self, weight_OI: Tensor) -> PackedLinear:
        return _packed(weight_OI, BITS)

    def pack_head(self, weight_OI: Tensor) -> PackedLinear:
        return _packed(weight_OI, HEAD_BITS)

    def linear(
        self, x_NI: Tensor, packed: PackedLinear, out_NO: Tensor, accumulate: bool = False
    ) -> None:
        factors_FOG = _factors(packed)
        x_NI, num_groups = in_whole_groups(x_NI), factors_FOG.shape[2]
        values_MC, scale_M = quantise_rows(x_NI.reshape(-1, GROUP))
        values_GNC = values_MC.view(-1, num_groups, GROUP).transpose(0, 1)
        scale_GN1 = scale_M.view(-1, num_groups).T[:, :, None]
        total_GN1 = scale_GN1 * values_GNC.sum(dim=2, keepdim=True)
        codes_GCO = packed.data.view(-1, num_groups, GROUP).permute(1, 2, 0)
        sum_NO = x_NI.new_zeros(len(x_NI), packed.num_out, dtype=torch.float32)
        for first in range(0, num_groups, _AT_ONCE):
            some = slice(first, first + _AT_ONCE)
            dots_GNO = torch.bmm(values_GNC[some], codes_GCO[some].float())
            for group, dots_NO in enumerate(dots_GNO, start=first):
                scale_O, *rest = factors_FOG[:, :, group]
                sum_NO = _fused(dots_NO, scale_O * scale_GN1[group], sum_NO)
                for min_O in rest:
                    sum_NO = _fused(min_O, total_GN1[group], sum_NO)
        if accumulate:
            out_NO.add_(sum_NO)
        else:
            out_NO.copy_(sum_NO)

    def table(self, packed: PackedLinear, dtype: torch.dtype) -> PackedTable:
        """The outputs of a packed matrix as the rows of a table of tokens."""
        factors_FVG = _factors(packed)

        def read(rows_N: Tensor, out_ND: Tensor) -> None:
            codes_NGC = packed.data[rows_N].view(len(rows_N), -1, GROUP)
            scale_NG1, *rest = factors_FVG[:, rows_N][..., None]
            numbers_NGC = codes_NGC * scale_NG1
            for min_NG1 in rest:
                numbers_NGC += min_NG1
            out_ND.copy_(numbers_NGC.flatten(1)[:, : packed.num_in])

        return PackedTable(packed, read, 0, dtype)


def definition(scheme: str) -> TorchInt8 | TorchGrouped:
    """The reference implementation of one of SCHEMES."""
    return TorchInt8() if scheme == "int8" else TorchGrouped()


def in_whole_groups(x_NI: Tensor) -> Tensor:
    """`x_NI` padded with zeros to whole groups of inputs."""
    return functional.pad(x_NI, (0, -x_NI.shape[1] % GROUP))


def _packed(weight_OI: Tensor, bits: int) -> PackedLinear:
    num_out, num_in = weight_OI.shape
    made = quantise(weight_OI, bits)
    data_OI, factors_FOG = (one.to(weight_OI.device) for one in (made.codes_OI, made.factors_FOG))
    return PackedLinear(num_out, num_in, data_OI, scales=factors_FOG)


def _factors(packed: PackedLinear) -> Tensor:
    if packed.scales is None:
        raise ContractError("a quantised weight has no scales")
    return packed.scales


def _fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c, rounded once. The product is exact in float64: one factor has at most 20 bits. If
    the sum is not exact, its last bit is made odd, so it rounds to float32 as the exact sum would.
    """
    if a.device.type == "mps":
        return a * b + c
    product, c = a.double() * b.double(), c.double()
    rounded = product + c
    part = rounded - product
    lost = (product - (rounded - part)) + (c - part)
    is_even = rounded.view(torch.int64) & 1 == 0
    far = torch.copysign(torch.full_like(lost, torch.inf), lost)
    return torch.where((lost.abs() > 0) & is_even, torch.nextafter(rounded, far), rounded).float()
