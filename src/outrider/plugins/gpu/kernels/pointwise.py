# pyright: basic, reportGeneralTypeIssues=false
"""Triton kernels of norms, rotary positions and gated activations.

One program computes one row, one head or one piece of a row, so rows cannot touch. Sums are
float32, divisions and square roots are rounded as IEEE 754 says, and results are rounded to the
dtype of `out`.

Shapes:  as flat pointers; rows may lie apart (`stride`), the numbers of a row lie together.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.plugins.gpu.kernels.tiles import rounded

BLOCK = 1024


@triton.jit
def _scaled(x, size, weight, eps):
    """x / sqrt(mean(x^2) + eps) * weight; x is zero where it is padding."""
    mean = tl.div_rn(tl.sum(x * x, 0), size.to(tl.float32))
    return tl.div_rn(x, tl.sqrt_rn(mean + eps)) * weight


@triton.jit
def norm_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, size, x_stride, out_stride, eps,
    CENTRED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    mask = place < size
    x = tl.load(x_ptr + row * x_stride + place, mask=mask, other=0.0).to(tl.float32)
    if CENTRED:
        x = tl.where(mask, x - tl.div_rn(tl.sum(x, 0), size.to(tl.float32)), 0.0)
    weight = tl.load(weight_ptr + place, mask=mask, other=0.0).to(tl.float32)
    out = _scaled(x, size, weight, eps)
    if CENTRED:
        out += tl.load(bias_ptr + place, mask=mask, other=0.0).to(tl.float32)
    out = rounded(out, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * out_stride + place, out, mask=mask)


@triton.jit
def head_norm_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, half, num_heads, row_stride, eps, BLOCK: tl.constexpr
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, BLOCK)
    mask = place < half
    head_ptr = qkv_ptr + row * row_stride + head * 2 * half
    low = tl.load(head_ptr + place, mask=mask, other=0.0)
    high = tl.load(head_ptr + half + place, mask=mask, other=0.0)
    weight_ptr = q_weight_ptr if head < num_heads else k_weight_ptr
    mean = tl.div_rn(tl.sum(low * low, 0) + tl.sum(high * high, 0), (2 * half).to(tl.float32))
    root = tl.sqrt_rn(mean + eps)
    low_weight = tl.load(weight_ptr + place, mask=mask, other=0.0).to(tl.float32)
    high_weight = tl.load(weight_ptr + half + place, mask=mask, other=0.0).to(tl.float32)
    low, high = tl.div_rn(low, root) * low_weight, tl.div_rn(high, root) * high_weight
    tl.store(head_ptr + place, low, mask=mask)
    tl.store(head_ptr + half + place, high, mask=mask)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def rope_append_kernel(
    qkv_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, k_ptr, v_ptr,
    num_heads, num_kv_heads, row_stride, group_stride, slot_stride,
    HALF: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One head of one token: queries are rotated, keys rotated and written, values written."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, BLOCK)
    mask = place < HALF
    head_ptr = qkv_ptr + row * row_stride + head * 2 * HALF
    low = tl.load(head_ptr + place, mask=mask, other=0.0)
    high = tl.load(head_ptr + HALF + place, mask=mask, other=0.0)
    if head < num_heads + num_kv_heads:
        position = tl.load(positions_ptr + row).to(tl.int64)
        cos = tl.load(cos_ptr + position * HALF + place, mask=mask, other=0.0)
        sin = tl.load(sin_ptr + position * HALF + place, mask=mask, other=0.0)
        turned_low = low * cos - high * sin
        turned_high = high * cos + low * sin
        low, high = turned_low, turned_high
        tl.store(head_ptr + place, low, mask=mask)
        tl.store(head_ptr + HALF + place, high, mask=mask)
    if head >= num_heads:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        is_key = head < num_heads + num_kv_heads
        group = head - num_heads - tl.where(is_key, 0, num_kv_heads)
        arena_ptr = k_ptr if is_key else v_ptr
        at = group.to(tl.int64) * group_stride + slot * slot_stride
        dtype = k_ptr.dtype.element_ty
        keep = mask & (slot >= 0)
        tl.store(arena_ptr + at + place, rounded(low, dtype), mask=keep)
        tl.store(arena_ptr + at + HALF + place, rounded(high, dtype), mask=keep)


@triton.jit
def silu_mul_kernel(x_ptr, out_ptr, size, x_stride, out_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = place < size
    gate = tl.load(x_ptr + row * x_stride + place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + size + place, mask=mask, other=0.0).to(tl.float32)
    out = tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * out_stride + place, rounded(out, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gelu_kernel(x_ptr, out_ptr, size, x_stride, out_stride, BLOCK: tl.constexpr):
    """x / 2 * (1 + tanh(u)) is x / (1 + e^(-2u)), which keeps its digits where tanh nears -1."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = place < size
    x = tl.load(x_ptr + row * x_stride + place, mask=mask, other=0.0).to(tl.float32)
    u = 0.7978845608028654 * (x + 0.044715 * (x * x * x))
    out = tl.div_rn(x, 1.0 + tl.exp(-2.0 * u))
    tl.store(out_ptr + row * out_stride + place, rounded(out, out_ptr.dtype.element_ty), mask=mask)
