"""Chooses codes of 4 and 8 bits for weights, in NumPy on the CPU: every machine makes the same
choice. The native kernels have the same bits (csrc/quantise.cpp).

Every GROUP inputs of an output have a scale and, with 4 bits, a minimum, both float16:

    4 bits    weight = scale * code + minimum     codes of 0 to 15, GGUF's Q4_1
    8 bits    weight = scale * code               codes of -127 to 127, GGUF's Q8_0

For 4 bits, scale and minimum are searched for the least squared error, in which large numbers weigh
more: for some widths of a group's range, the search takes the nearest codes, then the best scale
and minimum for these codes. A group with a NaN, an infinity or numbers that float16 cannot scale
gets the scale NaN.

Shapes:  O = outputs, I = inputs, G = groups, C = the inputs of a group, M = groups at once,
         B = bytes of a block, F = factors of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from outrider.kernels.reference.linear import GROUP

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
