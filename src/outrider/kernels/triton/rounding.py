# pyright: basic, reportGeneralTypeIssues=false
"""Rounding and dot products that mean the same to a GPU and to Triton's interpreter.

The interpreter cuts numbers off where a GPU rounds to the nearest bfloat16, ties to even, and has
no dot product of bfloat16. There, and only there, rounding is done on the bits and products in
float32, which is exact for products of bfloat16.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """`x`, float32, to the nearest of `dtype`, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, nearest.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def dot(a, b, acc):
    """acc + a b in float32, of a and b of one dtype."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def dot_whole(a, b, acc):
    """acc + a b with all bits of the float32 `a`: where b is bfloat16, a is a sum of three of
    them, and each product is exact."""
    if INTERPRETED or b.dtype == tl.float32 or b.dtype == tl.float16:
        acc = tl.dot(a, b.to(tl.float32), acc, input_precision="ieee")
    else:
        high = a.to(tl.bfloat16)
        rest = a - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        acc = tl.dot(low, b, acc)
        acc = tl.dot(middle, b, acc)
        acc = tl.dot(high, b, acc)
    return acc
