"""Triton kernels of linears, out (+)= round(x) W^T: float weights, int8, and groups of 4 or 8 bits.

One program takes 16 rows and some outputs, over all inputs in order. Neighbouring programs have the
same outputs and other rows, so they find the weights in the cache. Quantised products have the bits
of kernels/reference: sums of integers are exact in any order, so only the floating point operations
follow the definition one by one.

Shapes:  as flat pointers; x is [rows, inputs], the weight [outputs, inputs], out [rows, outputs];
         quantised values are [rows, padded inputs], weights as tiles.py packs them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.plugins.gpu.kernels.tiles import dot, fused, rounded

# pyright: basic, reportGeneralTypeIssues=false


# One binary whatever the number of rows: Triton would compile another for 1 or for multiples of 16.
@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x_ptr, weight_ptr, out_ptr,
    num_rows, num_in, num_out, x_stride, out_stride,
    ACCUMULATE: tl.constexpr, WHOLE: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    step = tl.arange(0, INPUTS)
    dtype = weight_ptr.dtype.element_ty
    x_ptrs = x_ptr + row[:, None].to(tl.int64) * x_stride + step[None, :]
    weight_ptrs = weight_ptr + output[:, None].to(tl.int64) * num_in + step[None, :]
    acc = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, num_in, INPUTS):
        x_mask = row[:, None] < num_rows
        weight_mask = output[:, None] < num_out
        if not WHOLE:
            x_mask = x_mask & (start + step[None, :] < num_in)
            weight_mask = weight_mask & (start + step[None, :] < num_in)
        x = tl.load(x_ptrs + start, mask=x_mask, other=0.0)
        weight = tl.load(
            weight_ptrs + start, mask=weight_mask, other=0.0, eviction_policy="evict_first"
        )
        acc = dot(rounded(x.to(tl.float32), dtype), tl.trans(weight), acc)
    out_ptrs = out_ptr + row[:, None].to(tl.int64) * out_stride + output[None, :]
    mask = (row[:, None] < num_rows) & (output[None, :] < num_out)
    if ACCUMULATE:
        acc = tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32) + acc
    tl.store(out_ptrs, rounded(acc, out_ptr.dtype.element_ty), mask=mask)


# pyright: basic, reportGeneralTypeIssues=false


# As kernels/reference/linear.py has them: a row below TINY is all zeros.
_TINY = tl.constexpr(1e-30)
_GROUP = tl.constexpr(32)
# Added and taken away, it leaves a float32 below 2^22 rounded to an integer, ties to even.
_TO_INTEGER = tl.constexpr(12582912.0)


@triton.jit
def quantise_kernel(x_ptr, values_ptr, scale_ptr, num_in, padded_in, x_stride, BLOCK: tl.constexpr):
    """One row a program: integers of -127 to 127, zeros behind the inputs, and the row's scale."""
    row = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    spoilt = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_in, BLOCK):
        mask = start + step < num_in
        size = tl.abs(tl.load(x_ptr + row * x_stride + start + step, mask=mask, other=0.0))
        size = size.to(tl.float32)
        # Comparisons with NaN are false, so this is true for NaN and for infinity.
        spoilt = spoilt | tl.where(size < float("inf"), 0, 1)
        largest = tl.where(size > largest, size, largest)
    most = tl.max(largest, 0)
    usable = (tl.max(spoilt, 0) == 0) & (most >= _TINY)
    inverse = tl.where(usable, tl.div_rn(127.0, tl.where(usable, most, 1.0)), 0.0)
    scale = tl.where(tl.max(spoilt, 0) == 0, tl.div_rn(most, 127.0), float("nan"))
    tl.store(scale_ptr + row, scale)
    for start in range(0, padded_in, BLOCK):
        x = tl.load(x_ptr + row * x_stride + start + step, mask=start + step < num_in, other=0.0)
        value = tl.where(usable, x.to(tl.float32), 0.0) * inverse
        value = (value + _TO_INTEGER) - _TO_INTEGER
        tl.store(
            values_ptr + row * padded_in + start + step,
            value.to(tl.int8),
            mask=start + step < padded_in,
        )


@triton.jit(do_not_specialize=["num_rows"])
def int8_kernel(
    values_ptr, row_scale_ptr, weight_ptr, scale_ptr, out_ptr,
    num_rows, padded_in, num_out, out_stride,
    ACCUMULATE: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr
):  # fmt: skip
    """out (+)= sum * (row's scale * output's scale)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    step = tl.arange(0, INPUTS)
    value_ptrs = values_ptr + row[:, None].to(tl.int64) * padded_in + step[None, :]
    weight_ptrs = weight_ptr + output[:, None].to(tl.int64) * padded_in + step[None, :]
    total = tl.zeros((ROWS, OUTPUTS), tl.int32)
    for start in range(0, padded_in, INPUTS):
        value = tl.load(value_ptrs + start, mask=row[:, None] < num_rows, other=0)
        weight = tl.load(
            weight_ptrs + start,
            mask=output[:, None] < num_out,
            other=0,
            eviction_policy="evict_first",
        )
        total = tl.dot(value, tl.trans(weight), total, out_dtype=tl.int32)
    row_scale = tl.load(row_scale_ptr + row, mask=row < num_rows, other=0.0)
    scale = tl.load(scale_ptr + output, mask=output < num_out, other=0.0)
    result = total.to(tl.float32) * (row_scale[:, None] * scale[None, :])
    _store(out_ptr, result, row, output, num_rows, num_out, out_stride, ACCUMULATE)


@triton.jit(do_not_specialize=["num_rows"])
def quantise_groups_kernel(
    x_ptr, values_ptr, factor_ptr, num_rows, num_in, padded_in, x_stride, GROUPS: tl.constexpr
):  # fmt: skip
    """GROUPS groups of a row a program: the same of each group. Behind the scales of all rows lie
    these times the sums of the groups' integers."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    step = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    x = tl.load(x_ptr + row * x_stride + step, mask=step < num_in, other=0.0).to(tl.float32)
    size = tl.abs(x)
    is_number = tl.min(tl.where(size < float("inf"), 1, 0), 1) == 1
    most = tl.max(tl.where(size < float("inf"), size, 0.0), 1)
    usable = is_number & (most >= _TINY)
    inverse = tl.where(usable, tl.div_rn(127.0, tl.where(usable, most, 1.0)), 0.0)
    scale = tl.where(is_number, tl.div_rn(most, 127.0), float("nan"))
    value = tl.where(usable[:, None], x, 0.0) * inverse[:, None]
    value = (value + _TO_INTEGER) - _TO_INTEGER
    inside = group < padded_in // _GROUP
    at = row * (padded_in // _GROUP) + group
    totals = num_rows.to(tl.int64) * (padded_in // _GROUP)
    tl.store(factor_ptr + at, scale, mask=inside)
    tl.store(factor_ptr + totals + at, scale * tl.sum(value, 1), mask=inside)
    tl.store(values_ptr + row * padded_in + step, value.to(tl.int8), mask=inside[:, None])


@triton.jit
def _add_group(
    acc, codes, value_ptrs, row_factor_ptrs, factor_ptrs, row_mask, output_mask, last,
    HAS_MIN: tl.constexpr
):  # fmt: skip
    """One group of inputs; `last` is the distance from scales to minimums, and of rows' scales to
    their totals, in factors."""
    row_last, weight_last = last
    value = tl.load(value_ptrs, mask=row_mask[:, None], other=0)
    total = tl.dot(value, tl.trans(codes), out_dtype=tl.int32).to(tl.float32)
    row_scale = tl.load(row_factor_ptrs, mask=row_mask, other=0.0)
    scale = tl.load(factor_ptrs, mask=output_mask, other=0.0).to(tl.float32)
    acc = fused(total, row_scale[:, None] * scale[None, :], acc)
    if HAS_MIN:
        row_total = tl.load(row_factor_ptrs + row_last, mask=row_mask, other=0.0)
        least = tl.load(factor_ptrs + weight_last, mask=output_mask, other=0.0).to(tl.float32)
        acc = fused(row_total[:, None], least[None, :], acc)
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def groups_kernel(
    values_ptr, row_factor_ptr, weight_ptr, factor_ptr, out_ptr,
    num_rows, padded_in, num_out, out_stride,
    ACCUMULATE: tl.constexpr, HAS_MIN: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr
):  # fmt: skip
    """Group after group: sum = fma(integers, scale * row's scale, sum), and of 4 bits, which have
    minimums, sum = fma(minimum, row's total, sum). Rows' factors are scales, then totals."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    place = tl.arange(0, _GROUP)
    row_mask, output_mask = row < num_rows, output < num_out
    num_groups = padded_in // _GROUP
    value_ptrs = values_ptr + row[:, None].to(tl.int64) * padded_in + place[None, :]
    row_factor_ptrs = row_factor_ptr + row.to(tl.int64) * num_groups
    factor_ptrs = factor_ptr + output
    last = (num_rows.to(tl.int64) * num_groups, num_groups.to(tl.int64) * num_out)
    acc = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, padded_in, INPUTS):
        for pair in tl.static_range(INPUTS // (2 * _GROUP)):
            first = start + pair * 2 * _GROUP
            half = (first // (2 * _GROUP)).to(tl.int64)
            group = 2 * half
            at = (half if HAS_MIN else group) * num_out
            places = (at + output[:, None]) * _GROUP + place[None, :]
            codes = tl.load(
                weight_ptr + places,
                mask=output_mask[:, None],
                other=0,
                eviction_policy="evict_first",
            )
            if HAS_MIN:
                low, high = (codes & 15).to(tl.int8), (codes >> 4).to(tl.int8)
            else:
                low = codes
                high = tl.load(
                    weight_ptr + places + num_out * _GROUP,
                    mask=output_mask[:, None],
                    other=0,
                    eviction_policy="evict_first",
                )
            acc = _add_group(
                acc, low, value_ptrs + group * _GROUP, row_factor_ptrs + group,
                factor_ptrs + group * num_out, row_mask, output_mask, last, HAS_MIN
            )  # fmt: skip
            acc = _add_group(
                acc, high, value_ptrs + (group + 1) * _GROUP, row_factor_ptrs + group + 1,
                factor_ptrs + (group + 1) * num_out, row_mask, output_mask, last, HAS_MIN
            )  # fmt: skip
    _store(out_ptr, acc, row, output, num_rows, num_out, out_stride, ACCUMULATE)


@triton.jit
def _store(out_ptr, result, row, output, num_rows, num_out, out_stride, ACCUMULATE: tl.constexpr):
    out_ptrs = out_ptr + row[:, None].to(tl.int64) * out_stride + output[None, :]
    mask = (row[:, None] < num_rows) & (output[None, :] < num_out)
    if ACCUMULATE:
        result = tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32) + result
    tl.store(out_ptrs, rounded(result, out_ptr.dtype.element_ty), mask=mask)
