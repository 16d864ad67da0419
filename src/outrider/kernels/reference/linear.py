"""Linears in PyTorch, the definition: float weights and those of 8 bits, row-invariant.

A row of activations becomes integers of -127 to 127 and one scale, its largest magnitude over 127;
int8 weights are such a row for each output. Sums of integers are exact in any order, so a row's
bits do not depend on other rows:

    out = sum * (row's scale * output's scale)

A row or a matrix's output that holds NaN or infinity gives NaN. Groups and 4 bits are below.

Shapes:  N = rows, I = inputs, O = outputs, C = the inputs of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from outrider.core.errors import ContractError
from outrider.kernels.plan import PackedLinear, PackedTable

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


# Chooses codes of 4 and 8 bits for weights, in NumPy on the CPU: every machine makes the same
# choice. The native kernels have the same bits (csrc/quantise.cpp).
#
# Every GROUP inputs of an output have a scale and, with 4 bits, a minimum, both float16:
#
#     4 bits    weight = scale * code + minimum     codes of 0 to 15, GGUF's Q4_1
#     8 bits    weight = scale * code               codes of -127 to 127, GGUF's Q8_0
#
# For 4 bits, scale and minimum are searched for the least squared error, in which large numbers
# weigh more: for some widths of a group's range, the search takes the nearest codes, then the best
# scale and minimum for these codes. A group with a NaN, an infinity or numbers that float16 cannot
# scale gets the scale NaN.
#
# Shapes:  N = rows, O = outputs, I = inputs, G = groups, C = the inputs of a group, M = groups at
#          once, F = factors of a group, V = vocabulary, D = hidden size.
Floats = NDArray[np.float32]
Codes = NDArray[np.int8]
Bytes = NDArray[np.uint8]
# Codes of some groups, [M, C], and their factors, [F, M].
Part = tuple[Codes, Floats]

MOST_CODE, MOST_SIGNED = 15, 127
# A group's range in steps between codes; beyond 15.5 there would be a code too many.
_TRIED_STEPS = (14.2, 14.6, 15.0, 15.4)
# Groups at once, so few that intermediate results stay in the cache.
_AT_ONCE = 1 << 13


@dataclass(frozen=True, slots=True)
class Groups:
    """A matrix as codes, one in a byte, and factors (scales, minimums), padded to whole groups."""

    codes_OI: Tensor
    factors_FOG: Tensor

    def blocks(self) -> Bytes:
        """The matrix as blocks of GGUF's types, row by row."""
        num_factors, num_out, num_groups = self.factors_FOG.shape
        halves_OGF = self.factors_FOG.numpy().astype(np.float16).transpose(1, 2, 0)
        codes_OGC: Bytes = self.codes_OI.numpy().view(np.uint8)
        codes_OGC = codes_OGC.reshape(num_out, num_groups, GROUP)
        if num_factors == 2:
            low_OGH, high_OGH = np.split(codes_OGC, 2, axis=2)
            codes_OGC = np.bitwise_or(low_OGH, np.left_shift(high_OGH, 4), dtype=np.uint8)
        bytes_OGF = np.ascontiguousarray(halves_OGF).view(np.uint8)
        blocks: Bytes = np.concatenate([bytes_OGF, codes_OGC], axis=2).reshape(-1)
        return blocks


def quantise(weight_OI: Tensor, bits: int) -> Groups:
    """`weight_OI` in groups of 4 or 8 bits, on the CPU."""
    num_out, num_in = weight_OI.shape
    num_groups = -(-num_in // GROUP)
    choose: Callable[[Floats], Part] = _four if bits == 4 else _eight
    codes_OGC = np.empty((num_out, num_groups, GROUP), np.int8)
    factors_FOG = np.empty((2 if bits == 4 else 1, num_out, num_groups), np.float32)
    step = max(1, _AT_ONCE // num_groups)

    def fill(first: int) -> None:
        some_OI = weight_OI[first : first + step].detach().float().cpu()
        padded_OI = functional.pad(some_OI, (0, num_groups * GROUP - num_in))
        # A damaged weight may be infinite or NaN: the model's run reports that.
        with np.errstate(all="ignore"):
            codes_MC, factors_FM = choose(padded_OI.contiguous().numpy().reshape(-1, GROUP))
        rows = len(some_OI)
        codes_OGC[first : first + rows] = codes_MC.reshape(rows, num_groups, GROUP)
        factors_FOG[:, first : first + rows] = factors_FM.reshape(-1, rows, num_groups)

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(fill, range(0, num_out, step)))
    codes_OI = codes_OGC.reshape(num_out, num_groups * GROUP)
    return Groups(_tensor(codes_OI), _tensor(factors_FOG))


def _tensor(numbers: Codes | Floats) -> Tensor:
    found: Tensor = torch.from_numpy(numbers)  # pyright: ignore[reportUnknownMemberType]
    return found


def _eight(x_MC: Floats) -> Part:
    largest_M = np.abs(x_MC).max(axis=1)
    scale_M = _half(largest_M / np.float32(MOST_SIGNED))
    codes_MC = np.rint(x_MC * _inverse(scale_M)[:, None])
    # A scale that float16 rounds down leaves a code too many.
    codes_MC = np.nan_to_num(codes_MC).clip(-MOST_SIGNED, MOST_SIGNED)
    return codes_MC.astype(np.int8), scale_M[None]


def _four(x_MC: Floats) -> Part:
    x_CM = np.ascontiguousarray(x_MC.T)
    low_M, high_M = x_CM.min(axis=0), x_CM.max(axis=0)
    is_bad_M = ~np.isfinite(high_M - low_M)
    if is_bad_M.any():
        for numbers in (x_CM, low_M, high_M):
            numbers[..., is_bad_M] = 0
    scale_M, min_M = _searched(x_CM, low_M, high_M)
    scale_M, min_M = _half(scale_M), _half(min_M)
    scale_M[is_bad_M | np.isnan(min_M)] = np.nan
    x_CM -= np.where(np.isnan(min_M), np.float32(0), min_M)
    x_CM *= _inverse(scale_M)
    codes_CM = np.rint(x_CM, out=x_CM).clip(0, MOST_CODE, out=x_CM).astype(np.int8)
    return codes_CM.T, np.stack([scale_M, min_M])


def _searched(x_CM: Floats, low_M: Floats, high_M: Floats) -> tuple[Floats, Floats]:
    """Scale and minimum of each group."""
    range_M: Floats = high_M - low_M
    weight_CM = np.abs(x_CM)
    weight_CM *= _inverse(np.maximum(np.abs(low_M), np.abs(high_M)))
    weight_CM += weight_CM.sum(axis=0) / np.float32(GROUP)
    # From 0 to 1, so that no sum is large compared with the differences that matter.
    unit_CM = x_CM - low_M
    unit_CM *= _inverse(range_M)
    weighted_CM = weight_CM * unit_CM
    weights_M, first_M = weight_CM.sum(axis=0), weighted_CM.sum(axis=0)
    best_M = np.full_like(low_M, -np.inf)
    scale_M: Floats = np.zeros_like(low_M)
    min_M: Floats = np.zeros_like(low_M)
    codes_CM, product_CM = np.empty_like(x_CM), np.empty_like(x_CM)
    for steps in _TRIED_STEPS:
        np.multiply(unit_CM, np.float32(steps), out=codes_CM)
        np.rint(codes_CM, out=codes_CM)
        mixed_M = np.multiply(weighted_CM, codes_CM, out=product_CM).sum(axis=0)
        sum_M = np.multiply(weight_CM, codes_CM, out=product_CM).sum(axis=0)
        squares_M = np.multiply(product_CM, codes_CM, out=product_CM).sum(axis=0)
        own_M = weights_M * mixed_M - first_M * sum_M
        own_M /= weights_M * squares_M - sum_M * sum_M
        own_min_M = (first_M - own_M * sum_M) / weights_M
        # The difference of the sum of squares and the squared error.
        gain_M = own_M * mixed_M + own_min_M * first_M
        better_M = gain_M > best_M
        for best, own in ((best_M, gain_M), (scale_M, own_M), (min_M, own_min_M)):
            np.copyto(best, own, where=better_M)
    np.multiply(scale_M, range_M, out=scale_M)
    np.multiply(min_M, range_M, out=min_M)
    return scale_M, np.add(min_M, low_M, out=min_M)


def _half(factor: Floats) -> Floats:
    """`factor` rounded to float16; NaN if that is not finite."""
    factor = factor.astype(np.float16).astype(np.float32)
    return np.where(np.isfinite(factor), factor, np.float32(np.nan))


def _inverse(scale: Floats) -> Floats:
    """1 / scale; 0 for a scale of 0 or NaN."""
    return np.where(np.abs(scale) > 0, np.float32(1) / scale, np.float32(0))


SCHEMES = ("int8", "int4")
# Bits of matrices and of the output head.
BITS, HEAD_BITS = 4, 8
# Groups whose sums are computed at once.
_ROWS_AT_ONCE = 16


class TorchGrouped:
    """Linears of groups, with a byte for each code: the definition. Every group of a row becomes
    integers and a scale as in `quantise_rows`; then, group after group, with one rounding in each
    step (two on devices without float64),

        sum = fma(sum of code * integer, scale * row's scale, sum)
        sum = fma(minimum, row's scale * sum of integers, sum)
    """

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
        for first in range(0, num_groups, _ROWS_AT_ONCE):
            some = slice(first, first + _ROWS_AT_ONCE)
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
