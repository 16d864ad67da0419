"""Linears in PyTorch, the definition: float and quantised weights (8 or 4 bits), row-invariant.

A row of activations becomes integers of -127 to 127 and one scale, its largest magnitude over 127.

    int8    alike: integers of -127 to 127 and one scale an output;
    int4    integers of -8 to 7 and, for every GROUP inputs of an output, a scale that bfloat16
            holds: the value farthest from zero over -8.

Sums of integers are exact in any order, so a row's bits do not depend on the rows beside it:

    int8    out = sum * (row's scale * output's scale)
    int4    out = (((sum_0 * scale_0) + sum_1 * scale_1) + ...) * row's scale

Products by a scale of int4 are exact in float32, with 15 bits by 8, so it does not matter whether a
machine fuses the addition. A row or a matrix's output that holds NaN or infinity gives NaN.

Shapes:  N = rows, I = inputs, O = outputs, G = groups, C = the inputs of a chunk or a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from outrider.core.errors import ContractError
from outrider.kernels.plan import PackedLinear

SCHEMES = ("int8", "int4")
GROUP = 32
# Beyond this an int32 sum could overflow.
MAX_INPUTS = 131_072
# The magnitude of a sum of this many products stays below 2^24, hence exact in float32.
_CHUNK = 1024
# A row whose largest magnitude is below this is all zeros: 127 over it would be infinite.
_TINY = 1e-30
# Weights are quantised some at a time, since the way there needs several float32 copies.
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


def quantise_groups(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """values_OI, integers in float32, and scale_OG; the inputs are whole groups."""
    num_out, num_in = weight_OI.shape
    weight_OGC = weight_OI.float().reshape(num_out, num_in // GROUP, GROUP)
    high_OG, low_OG = weight_OGC.amax(dim=2), weight_OGC.amin(dim=2)
    farthest_OG = torch.where(high_OG > -low_OG, high_OG, low_OG)
    scale_OG = (farthest_OG * -0.125).to(torch.bfloat16).float()
    usable_OG1 = (scale_OG.isfinite() & (scale_OG != 0))[:, :, None]
    values_OGC = torch.where(usable_OG1, weight_OGC / scale_OG[:, :, None], 0.0)
    values_OGC = values_OGC.round_().clamp_(-8, 7)
    scale_OG = torch.where(scale_OG.isfinite(), scale_OG, torch.nan)
    return values_OGC.flatten(1), scale_OG


QUANTISE: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "int8": quantise_rows,
    "int4": quantise_groups,
}


def num_groups(num_in: int) -> int:
    return -(-num_in // GROUP)


def in_parts(weight_OI: Tensor, scheme: str, multiple: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(first output, values_OI as int8, scales) of so many outputs at a time; the inputs are padded
    to whole groups, the outputs to a multiple of `multiple`."""
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
        values_OI, scales = QUANTISE[scheme](padded_OI)
        yield first, values_OI.to(torch.int8), scales


@dataclass(frozen=True, slots=True)
class TorchQuantised:
    """The definition, on any device. Values are held as int8, one to a byte, for both schemes."""

    scheme: str

    def pack(self, weight_OI: Tensor) -> PackedLinear:
        num_out, num_in = weight_OI.shape
        parts = list(in_parts(weight_OI, self.scheme, 1))
        data_OI = torch.cat([values_OI for _, values_OI, _ in parts])
        scales = torch.cat([scales for _, _, scales in parts])
        return PackedLinear(num_out, num_in, data_OI, scales=scales)

    def linear(
        self, x_NI: Tensor, packed: PackedLinear, out_NO: Tensor, accumulate: bool = False
    ) -> None:
        if packed.scales is None:
            raise ContractError("a quantised weight has no scales")
        num_rows, num_in = x_NI.shape
        values_NI = x_NI.new_zeros(num_rows, packed.data.shape[1])
        values_NI[:, :num_in], row_scale_N = quantise_rows(x_NI)
        if self.scheme == "int8":
            sum_NO = _sums(values_NI, packed.data)
            result_NO = sum_NO * (row_scale_N[:, None] * packed.scales)
        else:
            sum_NO = _sums_of_groups(values_NI, packed.data, packed.scales)
            result_NO = sum_NO * row_scale_N[:, None]
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


def _sums_of_groups(values_NI: Tensor, weight_OI: Tensor, scale_OG: Tensor) -> Tensor:
    sum_NO = values_NI.new_zeros(values_NI.shape[0], weight_OI.shape[0])
    groups = zip(_split(values_NI, GROUP), _split(weight_OI, GROUP), scale_OG.T, strict=True)
    for values_NC, weight_OC, scale_O in groups:
        sum_NO += (values_NC @ weight_OC.float().T) * scale_O
    return sum_NO


def _split(tensor: Tensor, num_columns: int) -> tuple[Tensor, ...]:
    return torch.split(tensor, num_columns, 1)


TILE = 8


def pack_tiled(weight_OI: Tensor) -> PackedLinear:
    """For CPUs: values of the weight's dtype, held as float32 since BLAS is fastest there."""
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
    """`dtype` is what activations are rounded to: the dtype of the weights before packing.

    out_NO (+)= round(x_NI) W_OI^T, accumulated in float32; activations are rounded to the weight's
    dtype. BLAS picks its loops by the number of rows, so on a CPU every call gets exactly TILE
    rows, short tiles padded with zeros. `pack` checks on the real weight that all rows of a tile
    are computed alike, and falls back to one row a call where they are not. Other devices take one
    ordinary call.
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
