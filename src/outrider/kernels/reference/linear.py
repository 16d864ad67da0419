"""Linears in PyTorch, the definition: float weights and those of 8 bits, row-invariant.

A row of activations becomes integers of -127 to 127 and one scale, its largest magnitude over 127;
int8 weights are such a row for each output. Sums of integers are exact in any order, so a row's
bits do not depend on other rows:

    out = sum * (row's scale * output's scale)

A row or a matrix's output that holds NaN or infinity gives NaN. grouped.py has weights of 4 bits.

Shapes:  N = rows, I = inputs, O = outputs, C = the inputs of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from outrider.core.errors import ContractError
from outrider.kernels.plan import PackedLinear

# Inputs are padded to a multiple of this.
GROUP = 32
# Beyond this an int32 sum could overflow.
MAX_INPUTS = 131_072
# The magnitude of a sum of this many products stays below 2^24, hence exact in float32.
_CHUNK = 1024
# A row whose largest magnitude is below this is all zeros: 127 over it would be infinite.
_TINY = 1e-30
# Weights are quantised some at a time, since quantising needs several float32 copies.
_WEIGHTS_AT_ONCE = 1 << 23


def quantise_rows(x_NI: Tensor) -> tuple[Tensor, Tensor]:
    """values_NI, integers in float32, and scale_N. Ties round to even."""
    x_NI = x_NI.float()
    largest_N = x_NI.abs().amax(dim=1)
    # Divided by a tensor: by a number, some devices multiply with its rounded inverse.
    most_N = torch.full_like(largest_N, 127.0)
    usable_N = largest_N.isfinite() & (largest_N >= _TINY)
    inverse_N = torch.where(usable_N, most_N / largest_N, 0.0)
    values_NI = torch.where(usable_N[:, None], x_NI * inverse_N[:, None], 0.0).round_()
    return values_NI, torch.where(largest_N.isfinite(), largest_N / most_N, torch.nan)


def num_groups(num_in: int) -> int:
    return -(-num_in // GROUP)


def in_parts(weight_OI: Tensor, multiple: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(first output, values_OI as int8, scale_O) of some outputs at a time, padded to groups."""
    num_out, num_in = weight_OI.shape
    if not 0 < num_in <= MAX_INPUTS:
        raise ContractError("too many inputs for sums of 32 bits")
    padded_in = num_groups(num_in) * GROUP
    step = max(1, _WEIGHTS_AT_ONCE // (padded_in * multiple)) * multiple
    for first in range(0, num_out, step):
        part_OI = weight_OI[first : first + step].detach().float()
        rows = -(-part_OI.shape[0] // multiple) * multiple
        padded_OI = part_OI.new_zeros(rows, padded_in)
        padded_OI[: part_OI.shape[0], :num_in] = part_OI
        values_OI, scale_O = quantise_rows(padded_OI)
        yield first, values_OI.to(torch.int8), scale_O


class TorchInt8:
    """The definition, on any device."""

    scheme = "int8"

    def pack(self, weight_OI: Tensor) -> PackedLinear:
        num_out, num_in = weight_OI.shape
        parts = list(in_parts(weight_OI, 1))
        data_OI = torch.cat([values_OI for _, values_OI, _ in parts])
        scale_O = torch.cat([scale_O for _, _, scale_O in parts])
        return PackedLinear(num_out, num_in, data_OI, scales=scale_O)

    def linear(
        self, x_NI: Tensor, packed: PackedLinear, out_NO: Tensor, accumulate: bool = False
    ) -> None:
        if packed.scales is None:
            raise ContractError("a quantised weight has no scales")
        num_rows, num_in = x_NI.shape
        values_NI = x_NI.new_zeros(num_rows, packed.data.shape[1])
        values_NI[:, :num_in], row_scale_N = quantise_rows(x_NI)
        result_NO = _sums(values_NI, packed.data) * (row_scale_N[:, None] * packed.scales)
        if accumulate:
            out_NO.add_(result_NO)
        else:
            out_NO.copy_(result_NO)


def _sums(values_NI: Tensor, weight_OI: Tensor) -> Tensor:
    sum_NO = values_NI.new_zeros(values_NI.shape[0], weight_OI.shape[0], dtype=torch.int32)
    chunks = zip(_split(values_NI, _CHUNK), _split(weight_OI, _CHUNK), strict=True)
    for values_NC, weight_OC in chunks:
        sum_NO += (values_NC @ weight_OC.float().T).to(torch.int32)
    return sum_NO.float()


def _split(tensor: Tensor, num_columns: int) -> tuple[Tensor, ...]:
    return torch.split(tensor, num_columns, 1)


TILE = 8


def pack_tiled(weight_OI: Tensor) -> PackedLinear:
    """Pack a weight for CPUs: values of its dtype, stored as float32, for which BLAS is fastest."""
    num_out, num_in = weight_OI.shape
    data_OI = weight_OI.detach().to(torch.float32, copy=True).contiguous()
    tile = TILE if _rows_alike(data_OI) else 1
    return PackedLinear(num_out, num_in, data_OI, tile=tile)


def _rows_alike(weight_OI: Tensor) -> bool:
    probe_I = torch.linspace(-1.0, 1.0, weight_OI.shape[1]).sin_()
    out_TO = functional.linear(probe_I.repeat(TILE, 1), weight_OI)
    return bool((out_TO == out_TO[0]).all())


def pack_plain(weight_OI: Tensor) -> PackedLinear:
    num_out, num_in = weight_OI.shape
    return PackedLinear(num_out, num_in, weight_OI.detach().contiguous())


class TorchLinear:
    """out_NO (+)= round(x_NI) W_OI^T, accumulated in float32.

    Activations are rounded to `dtype`, the dtype of the weights before packing. BLAS picks its
    loops by the number of rows, so on a CPU every call gets exactly TILE rows, short tiles padded
    with zeros. `pack` checks on the real weight that all rows of a tile have the same bits, and
    falls back to calls of one row if they have not. Other devices take one ordinary call.
    """

    __slots__ = ("_dtype",)

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(
        self, x_NI: Tensor, packed: PackedLinear, out_NO: Tensor, accumulate: bool = False
    ) -> None:
        x_NI = x_NI.to(self._dtype).to(packed.data.dtype)
        if packed.tile is None:
            result_NO = functional.linear(x_NI, packed.data).float()
        else:
            result_NO = _linear_tiled(x_NI, packed.data, packed.tile)
        if accumulate:
            out_NO.add_(result_NO)
        else:
            out_NO.copy_(result_NO)


def _linear_tiled(x_NI: Tensor, weight_OI: Tensor, tile: int) -> Tensor:
    num_rows, num_in = x_NI.shape
    num_tiles = -(-num_rows // tile)
    padded_NI = x_NI.new_zeros(num_tiles * tile, num_in)
    padded_NI[:num_rows] = x_NI
    results = [functional.linear(x_TI, weight_OI) for x_TI in torch.split(padded_NI, tile)]
    return torch.cat(results)[:num_rows]
