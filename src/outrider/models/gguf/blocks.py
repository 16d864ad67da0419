"""Types of tensors in GGUF files, and the decoding of their blocks to numbers, many at once.

A block begins or ends with its scale d, mostly a float16; q are its integers and x its numbers, in
float32. Two integers of 4 bits share a byte: the lower halves come first, then the upper ones.

    Q4_0:  x = d (q - 8)         Q4_1:  x = d q + m         Q8_0:  x = d q
    Q5_0:  x = d (q - 16)        Q5_1:  x = d q + m         (fifth bits lie in 4 bytes)
    Q2_K, Q4_K, Q5_K:  x = (d s) q - (e t), with s and t for each 16 or 32 of 256 numbers
    Q3_K, Q6_K:        x = (d s) q, with s for each 16 numbers
    IQ4_NL, IQ4_XS, MXFP4, NVFP4:  x = d v[q] or (d s) v[q], by a table v
    TQ1_0, TQ2_0, Q2_0: x = d (q - 1)    Q1_0: x = d (2q - 1)
    IQ1, IQ2, IQ3:      groups of numbers in a codebook (codebooks.bin)

Products are rounded in the order of the brackets, as the reference implementation rounds them.

Shapes:  N = blocks, B = bytes of a block, X = numbers of a block, S = parts of a block, P = numbers
         of a part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TensorType:
    """A type of tensor, `number` in files: `block` values in `block_bytes`, 0 if unsupported."""

    name: str
    number: int
    block: int = 1
    block_bytes: int = 0

    @property
    def supported(self) -> bool:
        return self.block_bytes > 0

    @property
    def is_quantised(self) -> bool:
        return self.block > 1


TYPES: Mapping[int, TensorType] = {
    0: TensorType("F32", 0, 1, 4),
    1: TensorType("F16", 1, 1, 2),
    2: TensorType("Q4_0", 2, 32, 18),
    3: TensorType("Q4_1", 3, 32, 20),
    6: TensorType("Q5_0", 6, 32, 22),
    7: TensorType("Q5_1", 7, 32, 24),
    8: TensorType("Q8_0", 8, 32, 34),
    10: TensorType("Q2_K", 10, 256, 84),
    11: TensorType("Q3_K", 11, 256, 110),
    12: TensorType("Q4_K", 12, 256, 144),
    13: TensorType("Q5_K", 13, 256, 176),
    14: TensorType("Q6_K", 14, 256, 210),
    16: TensorType("IQ2_XXS", 16, 256, 66),
    17: TensorType("IQ2_XS", 17, 256, 74),
    18: TensorType("IQ3_XXS", 18, 256, 98),
    19: TensorType("IQ1_S", 19, 256, 50),
    20: TensorType("IQ4_NL", 20, 32, 18),
    21: TensorType("IQ3_S", 21, 256, 110),
    # Of tables of ids.
    27: TensorType("I64", 27, 1, 8),
    22: TensorType("IQ2_S", 22, 256, 82),
    23: TensorType("IQ4_XS", 23, 256, 136),
    29: TensorType("IQ1_M", 29, 256, 56),
    30: TensorType("BF16", 30, 1, 2),
    34: TensorType("TQ1_0", 34, 256, 54),
    35: TensorType("TQ2_0", 35, 256, 66),
    39: TensorType("MXFP4", 39, 32, 17),
    40: TensorType("NVFP4", 40, 64, 36),
    41: TensorType("Q1_0", 41, 128, 18),
    42: TensorType("Q2_0", 42, 64, 18),
    **{
        number: TensorType(name, number)
        for number, name in {
            4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32",
            28: "F64", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8",
        }.items()
    },
}  # fmt: skip
SUPPORTED = tuple(kind.name for kind in TYPES.values() if kind.supported)

# Where kernels run on blocks, scales of 6 bits and of 4 take a byte, integers of 1 to 3 bits take
# 4 bits, and exponents and floats of 8 bits take 2 bytes.
_HELD = {
    "Q2_K": 164, "Q3_K": 146, "Q4_K": 148, "Q5_K": 180, "IQ4_XS": 138, "MXFP4": 18, "NVFP4": 40,
    "IQ1_S": 138, "IQ1_M": 146, "IQ2_XXS": 138, "IQ2_XS": 146, "IQ2_S": 146, "IQ3_XXS": 138,
    "IQ3_S": 138, "TQ1_0": 144, "TQ2_0": 144, "Q1_0": 72, "Q2_0": 36,
}  # fmt: skip


def held_bytes(kind: TensorType) -> int:
    """Bytes of a block in memory, as csrc/groups.h holds it."""
    return _HELD.get(kind.name, kind.block_bytes)


Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
# What operations on the bits of unsigned integers return to a type checker.
Integers = NDArray[np.integer[Any]]
# Numbers decoded at once, so few that intermediate results stay in the cache.
_AT_ONCE = 1 << 17


def decode(raw: Bytes, kind: TensorType) -> Floats:
    """Decode `raw`, whole blocks of a quantised type, to numbers in order. One thread does it, as
    PyTorch's threads would wait for each other after every step."""
    blocks_NB = raw.reshape(-1, kind.block_bytes)
    out_NX = np.empty((len(blocks_NB), kind.block), np.float32)
    step = _AT_ONCE // kind.block
    # A damaged scale may be infinite or NaN: the model's run reports that.
    with np.errstate(all="ignore"):
        for first in range(0, len(blocks_NB), step):
            part_NB = blocks_NB[first : first + step]
            DECODERS[kind.name](part_NB, out_NX[first : first + step])
    return out_NX.reshape(-1)


def _half(blocks_NB: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of each block, N by 1."""
    return blocks_NB[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(bytes_NB: Bytes) -> Bytes:
    # Copied first: operations on rows that are not contiguous take several times as long.
    bytes_NB = bytes_NB.copy()
    return cast("Bytes", np.concatenate([bytes_NB & 15, bytes_NB >> 4], axis=-1))


def _bits(bytes_NB: Bytes, num_bits: int) -> Bytes:
    """Integers of `num_bits` bits, ordered by their position in the byte and then by the byte."""
    shifts_S1 = np.arange(0, 8, num_bits, dtype=np.uint8)[:, None]
    ints = (bytes_NB.copy()[..., None, :] >> shifts_S1) & ((1 << num_bits) - 1)
    return cast("Bytes", ints)


def _in_order(bytes_NB: Bytes, num_bits: int) -> Bytes:
    """Integers of `num_bits` bits, byte by byte, the lowest bits of each first."""
    return _bits(bytes_NB[:, :, None], num_bits).reshape(len(bytes_NB), -1)


def _fifth(bytes_N4: Bytes) -> Bytes:
    """The 32 bits of 4 bytes in order, each as 0 or 16."""
    return cast("Bytes", np.unpackbits(bytes_N4, axis=1, bitorder="little") << 4)


def _q4_0(blocks_NB: Bytes, out_NX: Floats) -> None:
    np.subtract(_nibbles(blocks_NB[:, 2:]), 8, out=out_NX, dtype=np.float32)
    out_NX *= _half(blocks_NB, 0)


def _q4_1(blocks_NB: Bytes, out_NX: Floats) -> None:
    out_NX[:] = _nibbles(blocks_NB[:, 4:])
    out_NX *= _half(blocks_NB, 0)
    out_NX += _half(blocks_NB, 2)


def _q5_0(blocks_NB: Bytes, out_NX: Floats) -> None:
    ints_NX = _nibbles(blocks_NB[:, 6:]) | _fifth(blocks_NB[:, 2:6])
    np.subtract(ints_NX, 16, out=out_NX, dtype=np.float32)
    out_NX *= _half(blocks_NB, 0)


def _q5_1(blocks_NB: Bytes, out_NX: Floats) -> None:
    out_NX[:] = _nibbles(blocks_NB[:, 8:]) | _fifth(blocks_NB[:, 4:8])
    out_NX *= _half(blocks_NB, 0)
    out_NX += _half(blocks_NB, 2)


def _q8_0(blocks_NB: Bytes, out_NX: Floats) -> None:
    out_NX[:] = blocks_NB[:, 2:].view(np.int8)
    out_NX *= _half(blocks_NB, 0)


def _q2_k(blocks_NB: Bytes, out_NX: Floats) -> None:
    """16 bytes of s below and t above, 64 of integers, d, e; 4 times 32 integers share 32 bytes."""
    halves = blocks_NB[:, :16].copy()
    out_NSP = out_NX.reshape(-1, 16, 16)
    out_NSP[:] = _bits(blocks_NB[:, 16:80].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    out_NSP *= (_half(blocks_NB, 80) * (halves & 15))[:, :, None]
    out_NSP -= (_half(blocks_NB, 82) * (halves >> 4))[:, :, None]


def _q3_k(blocks_NB: Bytes, out_NX: Floats) -> None:
    """32 bytes of third bits, 64 of lower bits, 12 of 6-bit scales, d; minus 4 if bit 3 is 0."""
    upper = _bits(blocks_NB[:, :32], 1).reshape(-1, 16, 16)
    lower = _bits(blocks_NB[:, 32:96].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    low_scales = _nibbles(blocks_NB[:, 96:104])
    high_scales = _bits(blocks_NB[:, 104:108], 2).reshape(-1, 16)
    scales = (low_scales | high_scales << 4).astype(np.float32) - 32
    out_NSP = out_NX.reshape(-1, 16, 16)
    np.subtract(lower | upper << 2, 4, out=out_NSP, dtype=np.float32)
    out_NSP *= (_half(blocks_NB, 108) * scales)[:, :, None]


def _scales_and_offsets(blocks_NB: Bytes) -> tuple[Floats, Floats]:
    """Eight products d s and eight e t, of 6-bit s and t in 12 bytes. Four s and four t fill the
    low 6 bits of a byte; the upper two bits of these bytes belong to the other four."""
    first, second, third = (blocks_NB[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=1)
    offsets = np.concatenate([second & 63, (third >> 4) | (second >> 6) << 4], axis=1)
    return ((_half(blocks_NB, 0) * scales)[:, :, None], (_half(blocks_NB, 2) * offsets)[:, :, None])


def _q4_k(blocks_NB: Bytes, out_NX: Floats) -> None:
    scales_NS1, offsets_NS1 = _scales_and_offsets(blocks_NB)
    out_NSP = out_NX.reshape(-1, 8, 32)
    out_NSP[:] = _nibbles(blocks_NB[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    out_NSP *= scales_NS1
    out_NSP -= offsets_NS1


def _q5_k(blocks_NB: Bytes, out_NX: Floats) -> None:
    scales_NS1, offsets_NS1 = _scales_and_offsets(blocks_NB)
    lower_NSP = _nibbles(blocks_NB[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    out_NSP = out_NX.reshape(-1, 8, 32)
    out_NSP[:] = lower_NSP | _bits(blocks_NB[:, 16:48], 1) << 4
    out_NSP *= scales_NS1
    out_NSP -= offsets_NS1


def _q6_k(blocks_NB: Bytes, out_NX: Floats) -> None:
    """128 integers at a time: 64 bytes of their lower 4 bits, and 32 bytes of their upper two."""
    lower = _nibbles(blocks_NB[:, :128].reshape(-1, 2, 64)).reshape(-1, 16, 16)
    upper = _bits(blocks_NB[:, 128:192].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    out_NSP = out_NX.reshape(-1, 16, 16)
    np.subtract(lower | upper << 4, 32, out=out_NSP, dtype=np.float32)
    out_NSP *= (_half(blocks_NB, 208) * blocks_NB[:, 192:208].view(np.int8))[:, :, None]


_NON_LINEAR = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
# Twice the numbers of E2M1: the scale is halved.
_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def _iq4_nl(blocks_NB: Bytes, out_NX: Floats) -> None:
    np.take(_NON_LINEAR, _nibbles(blocks_NB[:, 2:]), out=out_NX, mode="clip")
    out_NX *= _half(blocks_NB, 0)


def _iq4_xs(blocks_NB: Bytes, out_NX: Floats) -> None:
    """d, then eight scales of 6 bits: two bytes of upper bits and four of lower halves."""
    upper, lower = _in_order(blocks_NB[:, 2:4], 2), _in_order(blocks_NB[:, 4:8], 4)
    scales = _half(blocks_NB, 0) * ((lower | upper << 4).astype(np.float32) - 32)
    out_NSP = out_NX.reshape(-1, 8, 32)
    ints_NSP = _nibbles(blocks_NB[:, 8:].reshape(-1, 8, 16))
    np.take(_NON_LINEAR, ints_NSP, out=out_NSP, mode="clip")
    out_NSP *= scales[:, :, None]


def _mxfp4(blocks_NB: Bytes, out_NX: Floats) -> None:
    """The scale is a power of two whose exponent is a byte; half of it is 2 ** (e - 128)."""
    np.take(_E2M1, _nibbles(blocks_NB[:, 1:]), out=out_NX, mode="clip")
    out_NX *= np.ldexp(np.float32(1), blocks_NB[:, :1].astype(np.int32) - 128)


def _nvfp4(blocks_NB: Bytes, out_NX: Floats) -> None:
    """Four scales, half of an unsigned float of 4 bits of exponent and 3 of fraction; 0x7f is 0,
    as in the reference."""
    bits = blocks_NB[:, :4]
    exponents = np.maximum(bits >> 3 & 15, 1).astype(np.int32) - 11
    fractions = (bits & 7) | np.where(bits >> 3 & 15, np.uint8(8), np.uint8(0))
    scales = np.ldexp(np.where(bits == 0x7F, 0, fractions).astype(np.float32), exponents)
    out_NSP = out_NX.reshape(-1, 4, 16)
    np.take(_E2M1, _nibbles(blocks_NB[:, 4:].reshape(-1, 4, 8)), out=out_NSP, mode="clip")
    out_NSP *= scales[:, :, None]


def _tq1_0(blocks_NB: Bytes, out_NX: Floats) -> None:
    """Five digits of base 3 in each of 32, then of 16 bytes, and four in each of 4; then d. A byte
    is their fraction of 256: times 3, its ninth and tenth bits are the first digit."""
    at = 0
    for first, last, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        for digit in range(digits):
            rest = blocks_NB[:, first:last] * np.uint8(3**digit)
            to = at + (last - first)
            np.subtract(rest.astype(np.uint16) * 3 >> 8, 1, out=out_NX[:, at:to], dtype=np.float32)
            at = to
    out_NX *= _half(blocks_NB, 52)


def _tq2_0(blocks_NB: Bytes, out_NX: Floats) -> None:
    """Two bits: 32 numbers' in the lowest bits of 32 bytes, the next 32's above them; then d."""
    ints = _bits(blocks_NB[:, :64].reshape(-1, 2, 32), 2).reshape(out_NX.shape)
    np.subtract(ints, 1, out=out_NX, dtype=np.float32)
    out_NX *= _half(blocks_NB, 64)


def _q1_0(blocks_NB: Bytes, out_NX: Floats) -> None:
    bits_NX = np.unpackbits(blocks_NB[:, 2:], axis=1, bitorder="little")
    np.subtract(bits_NX << 1, 1, out=out_NX, dtype=np.float32)
    out_NX *= _half(blocks_NB, 0)


def _q2_0(blocks_NB: Bytes, out_NX: Floats) -> None:
    """d, then two bits for each number in order."""
    np.subtract(_in_order(blocks_NB[:, 2:], 2), 1, out=out_NX, dtype=np.float32)
    out_NX *= _half(blocks_NB, 0)


# Types of 1 to 3 bits: groups of 4 or 8 numbers are entries of a codebook.
#
# `codebooks.bin` holds the codebooks, which are part of the format. An entry is a list of indices
# of magnitudes. A group's index selects an entry; signs, or the shift of IQ1, are stored with it. A
# code is an index of a magnitude, plus 8 if the number is negative or shifted down, and `v` is its
# number:
#
#     IQ2_XXS, IQ2_XS, IQ2_S:  x = (d (2s + 1) / 8) v,  v = 8, 25, 43 and their negatives
#     IQ3_XXS:                 x = (d (2s + 1) / 4) v,  v = 4, 12, ..., 52, 62 and their negatives
#     IQ3_S:                   x = (d (2s + 1)) v,      v = 1, 3, ..., 15 and their negatives
#     IQ1_S, IQ1_M:            x = (d (2s + 1) / 8) v,  v = -7, 1, 9 or -9, -1, 7
#
# with a scale s for 16 (IQ2_XS, IQ2_S, IQ1_M) or 32 numbers. `native/csrc/groups_pack.cpp` does the
# same for matrices that stay in blocks.
#
# Shapes:  G = groups of 8 numbers of a block, E = entries of a codebook, V = numbers of an entry,
#          S = scales of a block, P = numbers of a scale.

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


def _scaled(blocks_NB: Bytes, unit: float, scales_NS: Integers) -> Floats:
    """d, with which each block begins, times `unit` and 2s + 1."""
    return _half(blocks_NB, 0) * np.float32(unit) * _odd(scales_NS)


def _signs_and_scales(words_NG: NDArray[np.uint32]) -> tuple[Bytes, Integers]:
    """Parts of words of 32 numbers: four times 7 bits of signs, and s in the upper 4 bits."""
    shifts = np.arange(0, 28, 7, dtype=np.uint32)
    signs = _EVEN_SIGNS[(words_NG[:, :, None] >> shifts & 127).reshape(len(words_NG), -1)]
    return signs, words_NG >> 28


def _iq2_xxs(blocks_NB: Bytes, out_NX: Floats) -> None:
    """d; for 32 numbers 4 bytes of indices, then a word of signs and the scale."""
    words = blocks_NB[:, 2:].copy().view(np.uint32).reshape(-1, 8, 2)
    signs, scales = _signs_and_scales(words[:, :, 1])
    index = words[:, :, 0].copy().view(np.uint8).reshape(-1, 32)
    scales_NS = _scaled(blocks_NB, 0.125, scales)
    _finish("IQ2_XXS", index, _negative(signs), scales_NS, _IQ2, out_NX)


def _iq2_xs(blocks_NB: Bytes, out_NX: Floats) -> None:
    """d; for 8 numbers a word, 9 bits of index below 7 of signs; 16 scales of 4 bits."""
    words = blocks_NB[:, 2:66].copy().view(np.uint16)
    scales = _scaled(blocks_NB, 0.125, _in_order(blocks_NB[:, 66:], 4))
    signs = _EVEN_SIGNS[words >> 9]
    _finish("IQ2_XS", words & 511, _negative(signs), scales, _IQ2, out_NX)


def _iq2_s(blocks_NB: Bytes, out_NX: Floats) -> None:
    """d; 32 bytes of indices, 32 of signs, 8 of the indices' upper two bits; 16 scales."""
    index = blocks_NB[:, 2:34] | _in_order(blocks_NB[:, 66:74], 2).astype(np.uint16) << 8
    scales = _scaled(blocks_NB, 0.125, _in_order(blocks_NB[:, 74:], 4))
    _finish("IQ2_S", index, _negative(blocks_NB[:, 34:66]), scales, _IQ2, out_NX)


def _iq3_xxs(blocks_NB: Bytes, out_NX: Floats) -> None:
    """d; 64 bytes of indices, of 4 numbers each; for 32 numbers a word of signs and the scale."""
    signs, scales = _signs_and_scales(blocks_NB[:, 66:].copy().view(np.uint32))
    scales_NS = _scaled(blocks_NB, 0.25, scales)
    _finish("IQ3_XXS", blocks_NB[:, 2:66], _negative(signs), scales_NS, _IQ3_XXS, out_NX)


def _iq3_s(blocks_NB: Bytes, out_NX: Floats) -> None:
    """d; 64 bytes of indices of 4 numbers each, 8 of their ninth bits, 32 of signs; 8 scales."""
    index = blocks_NB[:, 2:66] | _in_order(blocks_NB[:, 66:74], 1).astype(np.uint16) << 8
    scales = _scaled(blocks_NB, 1.0, _in_order(blocks_NB[:, 106:], 4))
    _finish("IQ3_S", index, _negative(blocks_NB[:, 74:106]), scales, _IQ3_S, out_NX)


def _iq1_s(blocks_NB: Bytes, out_NX: Floats) -> None:
    """d; 32 bytes of indices; for 32 numbers a word: four times 3 upper bits, s, and the shift."""
    words = blocks_NB[:, 34:].copy().view(np.uint16)
    shifts = np.arange(0, 12, 3, dtype=np.uint16)
    upper = (words[:, :, None] >> shifts & 7).reshape(-1, 32)
    index = blocks_NB[:, 2:34] | upper << 8
    scales = _scaled(blocks_NB, 0.125, words >> 12 & 7)
    above = np.repeat((words >> 15 << 3).astype(np.uint8), 32, axis=1)
    _finish("IQ1_S", index, above, scales, _IQ1, out_NX)


def _iq1_m(blocks_NB: Bytes, out_NX: Floats) -> None:
    """32 bytes of indices, 16 of upper bits and shifts; 4 words: four scales s of 3 bits each,
    below a quarter of d."""
    words = blocks_NB[:, 48:].copy().view(np.uint16)
    quarters = (words >> 12) << np.arange(0, 16, 4, dtype=np.uint16)
    half_N1 = np.bitwise_or.reduce(quarters, axis=1, keepdims=True).view(np.float16)
    parts = words[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7
    scales = half_N1.astype(np.float32) * np.float32(0.125) * _odd(parts.reshape(-1, 16))
    upper = _in_order(blocks_NB[:, 32:48], 4)
    index = blocks_NB[:, :32] | (upper & 7).astype(np.uint16) << 8
    _finish("IQ1_M", index, np.repeat(upper & 8, 8, axis=1), scales, _IQ1, out_NX)


DECODERS: Mapping[str, Callable[[Bytes, Floats], None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    "Q1_0": _q1_0,
    "Q2_0": _q2_0,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
}
