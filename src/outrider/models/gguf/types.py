"""Types of tensors in GGUF files, by their number: values and bytes of a block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorType:
    """`block` values take `block_bytes`; a type that is not `supported` has none. `number` is what
    files call it."""

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
    20: TensorType("IQ4_NL", 20, 32, 18),
    23: TensorType("IQ4_XS", 23, 256, 136),
    30: TensorType("BF16", 30, 1, 2),
    39: TensorType("MXFP4", 39, 32, 17),
    **{
        number: TensorType(name, number)
        for number, name in {
            4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS",
            18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32",
            27: "I64", 28: "F64", 29: "IQ1_M", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8",
            34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4",
        }.items()
    },
}  # fmt: skip
SUPPORTED = tuple(kind.name for kind in TYPES.values() if kind.supported)

# Scales of 6 bits, and of 4, take a byte where kernels run on blocks, and integers of 2 and 3 bits
# take 4; an exponent takes 2 bytes.
_HELD = {"Q2_K": 164, "Q3_K": 146, "Q4_K": 148, "Q5_K": 180, "IQ4_XS": 138, "MXFP4": 18}


def held_bytes(kind: TensorType) -> int:
    """Of a block, as csrc/groups.h holds it."""
    return _HELD.get(kind.name, kind.block_bytes)
