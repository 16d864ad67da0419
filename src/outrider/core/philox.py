"""Philox4x32-10: random words that are a pure function of a key and a counter. No tensors.

Random numbers of requests are keyed in core/rng.py. Salmon, Moraes, Dror, Shaw, "Parallel random
numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outrider.core.tree import ROOT as ROOT

Words: TypeAlias = NDArray[np.uint64]
Floats: TypeAlias = NDArray[np.float64]
Word: TypeAlias = int | Words
Counter: TypeAlias = tuple[Word, Word, Word, Word]

_MASK = 0xFFFFFFFF
_SQRT_HALF = math.sqrt(0.5)
_LN_2 = math.log(2)
# log(m) = 2 (s + s^3/3 + s^5/5 + ...), s = (m - 1) / (m + 1); here s^2 < 0.03.
_SERIES = tuple(1 / (2 * n + 1) for n in reversed(range(12)))


def philox_uniform(seed: int, counter: tuple[int, int, int, int]) -> float:
    """A float64 in [0, 1) with 53 random bits, from one block."""
    return _fraction(*_block(seed, counter))


def philox_uniforms(seed: Word, counter: Counter) -> Floats:
    """`philox_uniform` for every element; at least one argument is an array."""
    return _fraction(*_block(seed, counter))


def philox_exponentials(seed: Word, counter: Counter) -> Floats:
    """Exponential numbers of mean 1, above 0 and below 37, from one block each."""
    first, second = _block(seed, counter)
    return minus_log((((first << 20) | (second >> 12)) + 0.5) * 2.0**-52)


def minus_log(x: Floats) -> Floats:
    """-log(x) for x in (0, 1), within a few units in the last digit, the same on every machine.

    Mathematical libraries differ in a logarithm's last bit. This one is built from sums, products
    and one division, which IEEE 754 rounds alike everywhere, so a race ends the same way on every
    machine.
    """
    mantissa, exponent = np.frexp(x)
    low = mantissa < _SQRT_HALF
    mantissa = np.where(low, 2 * mantissa, mantissa)
    s = (mantissa - 1) / (mantissa + 1)
    square = s * s
    series = np.zeros_like(s)
    for coefficient in _SERIES:
        series = series * square + coefficient
    return (low - exponent) * _LN_2 - 2 * s * series


def _fraction(first: Any, second: Any) -> Any:
    return ((first << 21) | (second >> 11)) * 2.0**-53


def _block(seed: Any, counter: tuple[Any, Any, Any, Any]) -> tuple[Any, Any]:
    """The first two words of a block; ints in, ints out, and arrays likewise.

    One block is ten rounds of multiply and mix. The same lines serve Python ints and numpy arrays
    of uint64, since the product of two words of 32 bits fits into 64: a number drawn alone equals
    the same number drawn among a million.
    """
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    c0, c1, c2, c3 = counter
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1
