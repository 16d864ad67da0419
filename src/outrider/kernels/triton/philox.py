# pyright: basic, reportGeneralTypeIssues=false
"""The numbers of core/rng.py, bit for bit, made where they are needed.

A word is 32 bits held in 64, so a product of two is whole and the same lines do for any compiler.
The counter is what core/rng.py keys a number by: (node + 1, start, sample, role).
"""

from __future__ import annotations

import triton
import triton.language as tl

_MASK = tl.constexpr(0xFFFFFFFF)
_UNIT = tl.constexpr(2.0**-53)


@triton.jit
def uniform(seed, node_word, start, sample, ROLE: tl.constexpr):
    """A float64 in [0, 1) with 53 random bits; `seed` is int64, `node_word` node + 1."""
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
