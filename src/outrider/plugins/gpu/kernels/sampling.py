"""Triton kernels of sampling: probabilities from logits, argmax, residuals, and the keyed RNG.

`read_distribution` merges the results of `pieces_kernel` for a row, in one order, and `probability`
turns a logit into a probability; every kernel that needs one uses these two, so all see the same
bits.

Shapes:  as flat pointers; logits are [rows, vocabulary], results of pieces [rows, pieces].
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.plugins.gpu.kernels.tiles import rounded

# pyright: basic, reportGeneralTypeIssues=false


# A quotient by less would overflow (core/sampling.py).
_LEAST_TEMPERATURE = tl.constexpr(1e-20)
_NOWHERE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def divisor(temperature_ptr, row, rows_per_distribution, TEMPERED: tl.constexpr):
    """The temperature of a row, and what its logits are divided by; temperature 0 leaves them."""
    temperature = tl.full((), 0.0, tl.float32)
    if TEMPERED:
        temperature = tl.load(temperature_ptr + row // rows_per_distribution).to(tl.float32)
    return temperature, tl.where(temperature > 0, tl.maximum(temperature, _LEAST_TEMPERATURE), 1.0)


@triton.jit(do_not_specialize=["rows_per_distribution"])
def pieces_kernel(
    rows_ptr, temperature_ptr, best_ptr, total_ptr, first_ptr, size, num_pieces,
    rows_per_distribution, TEMPERED: tl.constexpr, PIECE: tl.constexpr
):  # fmt: skip
    """For each piece of the vocabulary the kernel leaves the largest logit (divided by the
    temperature), the sum of e^(logit - largest) and the first place of the largest, which is -1 if
    the piece holds a NaN.
    """
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = piece * PIECE + tl.arange(0, PIECE)
    mask = index < size
    _, below = divisor(temperature_ptr, row, rows_per_distribution, TEMPERED)
    logit = tl.load(rows_ptr + row * size + index, mask=mask, other=float("-inf"))
    logit = tl.div_rn(logit.to(tl.float32), below)
    has_nan = tl.max(tl.where(logit == logit, 0, 1), 0) == 1
    best = tl.max(logit, 0)
    base = tl.where(best == float("-inf"), 0.0, best)
    first = tl.min(tl.where(mask & (logit == best), index, _NOWHERE), 0)
    at = row * num_pieces + piece
    tl.store(best_ptr + at, best)
    tl.store(total_ptr + at, tl.sum(tl.exp(logit - base), 0))
    tl.store(first_ptr + at, tl.where(has_nan, -1, first))


@triton.jit
def read_distribution(
    temperature_ptr, best_ptr, total_ptr, first_ptr, row, num_pieces, rows_per_distribution,
    READY: tl.constexpr, PIECES: tl.constexpr
):  # fmt: skip
    """(temperature, divisor, largest, sum, first largest or -1) of a row; nothing if READY."""
    if READY:
        zero = tl.full((), 0.0, tl.float32)
        return zero, zero, zero, zero, tl.full((), 0, tl.int32)
    else:
        temperature, below = divisor(temperature_ptr, row, rows_per_distribution, True)
        piece = tl.arange(0, PIECES)
        mask, at = piece < num_pieces, row * num_pieces + piece
        bests = tl.load(best_ptr + at, mask=mask, other=float("-inf"))
        best = tl.max(bests, 0)
        base = tl.where(best == float("-inf"), 0.0, best)
        totals = tl.load(total_ptr + at, mask=mask, other=0.0)
        total = tl.sum(totals * tl.exp(bests - base), 0)
        first = first_largest(best_ptr, first_ptr, row, num_pieces, PIECES)
        return temperature, below, base, total, first


@triton.jit
def first_largest(best_ptr, first_ptr, row, num_pieces, PIECES: tl.constexpr):
    """The first largest of a row, -1 if the row has a NaN."""
    piece = tl.arange(0, PIECES)
    mask, at = piece < num_pieces, row * num_pieces + piece
    firsts = tl.load(first_ptr + at, mask=mask, other=_NOWHERE)
    has_nan = tl.min(firsts, 0) < 0
    bests = tl.load(best_ptr + at, mask=mask, other=float("-inf"))
    return tl.where(has_nan, -1, tl.min(tl.where(bests == tl.max(bests, 0), firsts, _NOWHERE), 0))


@triton.jit
def probability(value, index, distribution, READY: tl.constexpr):
    """Of a token whose logit is `value`, under what `read_distribution` gave; float32."""
    if READY:
        return value
    else:
        temperature, below, base, total, first = distribution
        soft = tl.div_rn(tl.exp(tl.div_rn(value, below) - base), total)
        point = tl.where(first < 0, float("nan"), tl.where(index == first, 1.0, 0.0))
        return tl.where(temperature > 0, soft, point)


@triton.jit(do_not_specialize=["rows_per_distribution"])
def softmax_kernel(
    rows_ptr, temperature_ptr, best_ptr, total_ptr, first_ptr, out_ptr, size, num_pieces,
    rows_per_distribution, PIECE: tl.constexpr, PIECES: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    mask = index < size
    distribution = read_distribution(
        temperature_ptr, best_ptr, total_ptr, first_ptr, row, num_pieces, rows_per_distribution,
        False, PIECES,
    )  # fmt: skip
    logit = tl.load(rows_ptr + row * size + index, mask=mask, other=0.0).to(tl.float32)
    out = probability(logit, index, distribution, False)
    tl.store(out_ptr + row * size + index, rounded(out, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def argmax_kernel(best_ptr, first_ptr, out_ptr, num_pieces, PIECES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    first = first_largest(best_ptr, first_ptr, row, num_pieces, PIECES)
    tl.store(out_ptr + row, first.to(out_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["token"])
def leftover_kernel(
    p_ptr, q_ptr, share_ptr, out_ptr, sums_ptr, token, size,
    POINT: tl.constexpr, PIECE: tl.constexpr
):  # fmt: skip
    """max(share * p - q, 0) of one distribution, and its sum in each piece; with POINT, q is all on
    `token`."""
    index = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
    mask = index < size
    p = tl.load(p_ptr + index, mask=mask, other=0.0).to(tl.float64) * tl.load(share_ptr)
    if POINT:
        left = tl.where(index == token, 0.0, p)
    else:
        left = p - tl.load(q_ptr + index, mask=mask, other=0.0).to(tl.float64)
        left = tl.where(left < 0, 0.0, left)
    tl.store(out_ptr + index, left.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(left, 0))


# pyright: basic, reportGeneralTypeIssues=false


_MASK = tl.constexpr(0xFFFFFFFF)
_UNIT = tl.constexpr(2.0**-53)


@triton.jit
def uniform(seed, node_word, start, sample, ROLE: tl.constexpr):
    """A float64 in [0, 1) with 53 random bits; `seed` is int64, `node_word` node + 1.

    The numbers are those of core/rng.py, bit for bit; the counter is (node + 1, start, sample,
    role). A word is 32 bits held in 64, so a product of two is whole and the lines do for any
    compiler.
    """
    key_0 = seed.to(tl.uint64, bitcast=True) & _MASK
    key_1 = seed.to(tl.uint64, bitcast=True) >> 32
    word_0 = node_word.to(tl.uint64)
    word_1 = start.to(tl.uint64) & _MASK
    word_2 = sample.to(tl.uint64) & _MASK
    word_3 = tl.full((), ROLE, tl.uint64)
    for _ in tl.static_range(10):
        product_0 = word_0 * 0xD2511F53
        product_1 = word_2 * 0xCD9E8D57
        word_0 = (product_1 >> 32) ^ word_1 ^ key_0
        word_1 = product_1 & _MASK
        word_2 = (product_0 >> 32) ^ word_3 ^ key_1
        word_3 = product_0 & _MASK
        key_0 = (key_0 + 0x9E3779B9) & _MASK
        key_1 = (key_1 + 0xBB67AE85) & _MASK
    return ((word_0 << 21) | (word_1 >> 11)).to(tl.float64) * _UNIT
