"""Quantised blocks become the numbers that the reference implementation makes of them."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.models.gguf.blocks import DECODERS, TYPES, TensorType, decode

# Where float16 scales are in a block; random bytes could be no numbers, which have many forms.
SCALES: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,),
    "IQ4_XS": (0,), "MXFP4": (), "NVFP4": (), "IQ1_S": (0,), "IQ1_M": (), "IQ2_XXS": (0,),
    "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,), "TQ1_0": (52,), "TQ2_0": (64,),
    "Q1_0": (0,), "Q2_0": (0,),
}  # fmt: skip
# SHA-256, its first digits, of what ggml and the package `gguf` make of `blocks_of(name, 8)`.
GOLDEN: dict[str, str] = {
    "Q4_0": "5f659d0199c1c141",
    "Q4_1": "ca72975d1f3ceb94",
    "Q5_0": "8c11757ddd8a3248",
    "Q5_1": "fadd880fb70bd365",
    "Q8_0": "ae2d201eb5fffc55",
    "Q2_K": "9ff5c2693d9a87da",
    "Q3_K": "0af963d0062a2d53",
    "Q4_K": "a896379c919aa048",
    "Q5_K": "57679f579ed7bd87",
    "Q6_K": "9d687179bce7c62f",
    "IQ4_NL": "815d099f4b52359e",
    "IQ4_XS": "888801a1196ed6d9",
    "MXFP4": "84a4924b8df57cd9",
    "NVFP4": "22d99379d58fc1c0",
    "IQ1_S": "e8dab4cf7e479b2b",
    "IQ1_M": "e3270ae978081d58",
    "IQ2_XXS": "94dc499bb8fbdfaf",
    "IQ2_XS": "2b97af05b6af84cd",
    "IQ2_S": "4f8e8b4fee366bab",
    "IQ3_XXS": "802d070029b8f7f1",
    "IQ3_S": "74ba6bfca07b993b",
    "TQ1_0": "f792c9e56def74f9",
    "TQ2_0": "48c983bf0cd33fb0",
    "Q1_0": "cd60d5f2b7eba4f5",
    "Q2_0": "7b69bc397a1ed871",
}
KINDS = {kind.name: kind for kind in TYPES.values()}


def blocks_of(name: str, num: int) -> NDArray[np.uint8]:
    kind = KINDS[name]
    rng = np.random.default_rng(20 + len(name))
    raw = rng.integers(0, 256, (num, kind.block_bytes), np.uint8)
    for at in SCALES[name]:
        # Signs and sizes of all kinds, subnormal ones too, but nothing infinite.
        raw[:, at + 1] &= 0xBB
    if name == "IQ1_M":  # its float16 lies in the upper halves of four words
        raw[:, 55] &= 0xBF
    return raw


def digest(numbers: NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(numbers, "<f4").tobytes()).hexdigest()[:16]


def test_every_quantised_type_is_decoded() -> None:
    quantised = {kind.name for kind in TYPES.values() if kind.supported and kind.is_quantised}
    assert quantised == set(DECODERS) == set(SCALES) == set(GOLDEN)


@pytest.mark.parametrize("name", SCALES)
def test_numbers_have_the_bits_of_the_package(name: str) -> None:
    quants: Any = pytest.importorskip(
        "gguf.quants", reason="no package gguf: pip install --no-deps gguf"
    )
    constants: Any = pytest.importorskip("gguf.constants")
    raw = blocks_of(name, 5000)
    if name not in constants.GGMLQuantizationType.__members__:
        pytest.skip("the package does not decode this type")
    kind = constants.GGMLQuantizationType[name]
    with np.errstate(over="ignore"):
        wanted, few = (quants.dequantize(blocks, kind) for blocks in (raw, blocks_of(name, 8)))
    found = decode(raw.reshape(-1), KINDS[name])
    assert np.array_equal(found.view(np.uint32), wanted.reshape(-1).view(np.uint32))
    assert digest(few) == GOLDEN[name]


@pytest.mark.parametrize("name", SCALES)
def test_numbers_have_the_bits_they_had(name: str) -> None:
    assert digest(decode(blocks_of(name, 8).reshape(-1), KINDS[name])) == GOLDEN[name]


def test_blocks_are_laid_out_as_defined() -> None:
    half = np.array([0.5], "<f2").view(np.uint8).tolist()
    raw = np.array([*half, *half, *range(16)], np.uint8)
    numbers = decode(raw, KINDS["Q4_1"])
    assert numbers[:16].tolist() == [0.5 * place + 0.5 for place in range(16)]
    assert numbers[16:].tolist() == [0.5] * 16
    exponents = np.array([128, *[0x21] * 16], np.uint8)
    assert decode(exponents, KINDS["MXFP4"]).tolist() == [1.0] * 16 + [2.0] * 16


def test_scales_that_are_no_numbers_make_no_noise() -> None:
    raw = np.full((2, KINDS["Q4_1"].block_bytes), 255, np.uint8)
    assert np.isnan(decode(raw.reshape(-1), KINDS["Q4_1"])).all()


def test_nothing_becomes_nothing() -> None:
    kind = TensorType("Q8_0", 8, 32, 34)
    assert decode(np.empty(0, np.uint8), kind).shape == (0,)
