# pyright: basic, reportGeneralTypeIssues=false
"""out (+)= round(x) W^T, one program for 16 rows and some outputs, over all inputs in order.

Neighbouring programs have the same outputs and other rows, so they find the weights in the cache.

Shapes:  as flat pointers; x is [rows, inputs], the weight [outputs, inputs], out [rows, outputs].
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.kernels.triton.rounding import dot, rounded


# One binary whatever the number of rows: Triton would compile another for 1 or for multiples of 16.
@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x_ptr, weight_ptr, out_ptr,
    num_rows, num_in, num_out, x_stride, out_stride,
    ACCUMULATE: tl.constexpr, WHOLE: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
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
