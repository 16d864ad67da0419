"""Types of tensors in GGUF files, and the decoding of their blocks to numbers, many at once.

A block begins or ends with its scale d, mostly a float16; q are its integers and x its numbers, in
float32. Two integers of 4 bits share a byte: the lower halves come first, then the upper ones.

    Q4_0:  x = d (q - 8)         Q4_1:  x = d q + m         Q8_0:  x = d q
    Q5_0:  x = d (q - 16)        Q5_1:  x = d q + m         (fifth bits lie in 4 bytes)
    Q2_K, Q4_K, Q5_K:  x = (d s) q - (e t), with s and t for each 16 or 32 of 256 numbers
    Q3_K, Q6_K:        x = (d s) q, with s for each 16 numbers
    IQ4_NL, IQ4_XS, MXFP4, NVFP4:  x = d v[q] or (d s) v[q], by a table v
    TQ1_0, TQ2_0, Q2_0: x = d (q - 1)    Q1_0: x = d (2q - 1)
    IQ1, IQ2, IQ3:      groups of numbers in a codebook (codebooks.py)

Products are rounded in the order of the brackets, as the reference implementation rounds them.

Shapes:  N = blocks, B = bytes of a block, X = numbers of a block, S = parts of a block, P = numbers
         of a part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from outrider.models.gguf import codebooks


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
    upper = _bits(blocks_NB[:, 2:4, None], 2).reshape(-1, 8)
    lower = _bits(blocks_NB[:, 4:8, None], 4).reshape(-1, 8)
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
    ints_NX = (blocks_NB[:, 2:, None] >> np.arange(0, 8, 2, dtype=np.uint8)) & 3
    np.subtract(ints_NX.reshape(out_NX.shape), 1, out=out_NX, dtype=np.float32)
    out_NX *= _half(blocks_NB, 0)


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
    "IQ1_S": codebooks.iq1_s,
    "IQ1_M": codebooks.iq1_m,
    "IQ2_XXS": codebooks.iq2_xxs,
    "IQ2_XS": codebooks.iq2_xs,
    "IQ2_S": codebooks.iq2_s,
    "IQ3_XXS": codebooks.iq3_xxs,
    "IQ3_S": codebooks.iq3_s,
}
