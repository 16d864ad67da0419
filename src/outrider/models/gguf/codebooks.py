"""Decoding of GGUF's types of 1 to 3 bits: groups of 4 or 8 numbers are entries of a codebook.

`codebooks.bin` holds the codebooks, which are part of the format. An entry is a list of indices of
magnitudes. A group's index selects an entry; signs, or the shift of IQ1, are stored with it. A code
is an index of a magnitude, plus 8 if the number is negative or shifted down, and `v` is its number:

    IQ2_XXS, IQ2_XS, IQ2_S:  x = (d (2s + 1) / 8) v,  v = 8, 25, 43 and their negatives
    IQ3_XXS:                 x = (d (2s + 1) / 4) v,  v = 4, 12, ..., 52, 62 and their negatives
    IQ3_S:                   x = (d (2s + 1)) v,      v = 1, 3, ..., 15 and their negatives
    IQ1_S, IQ1_M:            x = (d (2s + 1) / 8) v,  v = -7, 1, 9 or -9, -1, 7

with a scale s for 16 (IQ2_XS, IQ2_S, IQ1_M) or 32 numbers. `native/csrc/groups_pack.cpp` does the
same for matrices that stay in blocks.

Shapes:  N = blocks, B = bytes of a block, X = numbers of a block, G = groups of 8 numbers of a
         block, E = entries, V = numbers of an entry, S = scales of a block, P = numbers of a scale.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
# What operations on the bits of unsigned integers return to a type checker.
Integers = NDArray[np.integer[Any]]
Floats = NDArray[np.float32]

_FILE = Path(__file__).with_name("codebooks.bin")
# In the order of the file: entries, numbers of an entry, bits of an index.
_SHAPES = {
    "IQ2_XXS": (256, 8, 2),
    "IQ2_XS": (512, 8, 2),
    "IQ2_S": (1024, 8, 2),
    "IQ3_XXS": (256, 4, 4),
    "IQ3_S": (512, 4, 4),
    "IQ1_S": (2048, 8, 2),
}
_SAME = {"IQ1_M": "IQ1_S"}


def _table(*magnitudes: int) -> Floats:
    """The numbers of the 16 codes."""
    row = [*magnitudes, *[0] * (8 - len(magnitudes))]
    return np.array([*row, *(-one for one in row)], np.float32)


_IQ2 = _table(8, 25, 43)
_IQ3_XXS = _table(4, 12, 20, 28, 36, 44, 52, 62)
_IQ3_S = _table(1, 3, 5, 7, 9, 11, 13, 15)
_IQ1 = np.array([-7, 1, 9, 0, 0, 0, 0, 0, -9, -1, 7, 0, 0, 0, 0, 0], np.float32)


@cache
def codebook(name: str) -> Bytes:
    """The codebook of type `name`, indices of magnitudes [E, V]."""
    name = _SAME.get(name, name)
    at = 0
    for other, (entries, values, bits) in _SHAPES.items():
        size = entries * values * bits // 8
        if other == name:
            break
        at += size
    else:
        raise KeyError(name)
    packed = np.fromfile(_FILE, np.uint8, size, offset=at)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    indices = packed[:, None] >> shifts & np.uint8((1 << bits) - 1)
    return np.asarray(indices, np.uint8).reshape(entries, values)


def has_codebook(name: str) -> bool:
    return name in _SHAPES or name in _SAME


# The byte of 8 signs that 7 bits stand for: an even number of them is negative.
_EVEN_SIGNS = np.array([bits | (bits.bit_count() & 1) << 7 for bits in range(128)], np.uint8)


def _negative(signs_NG: Bytes) -> Integers:
    """8 for each negative number, else 0: [N, 8 G]."""
    return np.unpackbits(signs_NG, axis=1, bitorder="little") << 3


def _halves(blocks_NB: Bytes) -> Floats:
    """The float16 at the beginning of each block, [N, 1]."""
    return blocks_NB[:, :2].copy().view(np.float16).astype(np.float32)


def _nibbles(bytes_NS: Bytes) -> Integers:
    """The low and the high half of each byte, one after the other."""
    return np.stack([bytes_NS & 15, bytes_NS >> 4], axis=2).reshape(len(bytes_NS), -1)


def _finish(
    name: str,
    index_NG: Integers,
    above_NX: Integers,
    scales_NS: Floats,
    table: Floats,
    out_NX: Floats,
) -> None:
    """Numbers of the entries `index_NG` times their scales; `above_NX` is 8 or 0 for each."""
    codes_NX = codebook(name)[index_NG].reshape(out_NX.shape)
    np.take(table, codes_NX | above_NX, out=out_NX, mode="clip")
    out_NSP = out_NX.reshape(*scales_NS.shape, -1)
    out_NSP *= scales_NS[:, :, None]


def _odd(scales_NS: Integers) -> Floats:
    return scales_NS.astype(np.float32) * 2 + 1


def _signs_and_scales(words_NG: NDArray[np.uint32]) -> tuple[Bytes, Floats]:
    """Parts of words of 32 numbers: four times 7 bits of signs, and 2s + 1 of the upper 4 bits."""
    shifts = np.arange(0, 28, 7, dtype=np.uint32)
    signs = _EVEN_SIGNS[(words_NG[:, :, None] >> shifts & 127).reshape(len(words_NG), -1)]
    return signs, _odd(words_NG >> 28)


def iq2_xxs(blocks_NB: Bytes, out_NX: Floats) -> None:
    """d; for 32 numbers 4 bytes of indices, then a word of signs and the scale."""
    words = blocks_NB[:, 2:].copy().view(np.uint32).reshape(-1, 8, 2)
    signs, scales = _signs_and_scales(words[:, :, 1])
    index = words[:, :, 0].copy().view(np.uint8).reshape(-1, 32)
    scales = _halves(blocks_NB) * np.float32(0.125) * scales
    _finish("IQ2_XXS", index, _negative(signs), scales, _IQ2, out_NX)


def iq2_xs(blocks_NB: Bytes, out_NX: Floats) -> None:
    """d; for 8 numbers a word, 9 bits of index below 7 of signs; 16 scales of 4 bits."""
    words = blocks_NB[:, 2:66].copy().view(np.uint16)
    scales = _halves(blocks_NB) * np.float32(0.125) * _odd(_nibbles(blocks_NB[:, 66:]))
    signs = _EVEN_SIGNS[words >> 9]
    _finish("IQ2_XS", words & 511, _negative(signs), scales, _IQ2, out_NX)


def iq2_s(blocks_NB: Bytes, out_NX: Floats) -> None:
    """d; 32 bytes of indices, 32 of signs, 8 of the indices' upper two bits; 16 scales."""
    shifts = np.arange(0, 8, 2, dtype=np.uint8)
    upper = (blocks_NB[:, 66:74, None] >> shifts & 3).reshape(-1, 32)
    index = blocks_NB[:, 2:34] | upper.astype(np.uint16) << 8
    scales = _halves(blocks_NB) * np.float32(0.125) * _odd(_nibbles(blocks_NB[:, 74:]))
    _finish("IQ2_S", index, _negative(blocks_NB[:, 34:66]), scales, _IQ2, out_NX)


def iq3_xxs(blocks_NB: Bytes, out_NX: Floats) -> None:
    """d; 64 bytes of indices, of 4 numbers each; for 32 numbers a word of signs and the scale."""
    signs, scales = _signs_and_scales(blocks_NB[:, 66:].copy().view(np.uint32))
    scales = _halves(blocks_NB) * np.float32(0.25) * scales
    _finish("IQ3_XXS", blocks_NB[:, 2:66], _negative(signs), scales, _IQ3_XXS, out_NX)


def iq3_s(blocks_NB: Bytes, out_NX: Floats) -> None:
    """d; 64 bytes of indices of 4 numbers each, 8 of their ninth bits, 32 of signs; 8 scales."""
    upper = np.unpackbits(blocks_NB[:, 66:74], axis=1, bitorder="little")
    index = blocks_NB[:, 2:66] | upper.astype(np.uint16) << 8
    scales = _halves(blocks_NB) * _odd(_nibbles(blocks_NB[:, 106:]))
    _finish("IQ3_S", index, _negative(blocks_NB[:, 74:106]), scales, _IQ3_S, out_NX)


def iq1_s(blocks_NB: Bytes, out_NX: Floats) -> None:
    """d; 32 bytes of indices; for 32 numbers a word: four times 3 upper bits, s, and the shift."""
    words = blocks_NB[:, 34:].copy().view(np.uint16)
    shifts = np.arange(0, 12, 3, dtype=np.uint16)
    upper = (words[:, :, None] >> shifts & 7).reshape(-1, 32)
    index = blocks_NB[:, 2:34] | upper << 8
    scales = _halves(blocks_NB) * np.float32(0.125) * _odd(words >> 12 & 7)
    above = np.repeat((words >> 15 << 3).astype(np.uint8), 32, axis=1)
    _finish("IQ1_S", index, above, scales, _IQ1, out_NX)


def iq1_m(blocks_NB: Bytes, out_NX: Floats) -> None:
    """32 bytes of indices, 16 of upper bits and shifts; 4 words: four scales s of 3 bits each,
    below a quarter of d."""
    words = blocks_NB[:, 48:].copy().view(np.uint16)
    quarters = (words >> 12) << np.arange(0, 16, 4, dtype=np.uint16)
    half_N1 = np.bitwise_or.reduce(quarters, axis=1, keepdims=True).view(np.float16)
    parts = words[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7
    scales = half_N1.astype(np.float32) * np.float32(0.125) * _odd(parts.reshape(-1, 16))
    upper = _nibbles(blocks_NB[:, 32:48])
    index = blocks_NB[:, :32] | (upper & 7).astype(np.uint16) << 8
    _finish("IQ1_M", index, np.repeat(upper & 8, 8, axis=1), scales, _IQ1, out_NX)
