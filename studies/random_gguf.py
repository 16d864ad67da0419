"""GGUF files of random weights with the sizes of published models, for studies of speed alone.

No weight is quantised: blocks of random bytes with small scales are written as they are, so a file
of gigabytes takes seconds. Types of tensors are those that llama-quantize chooses.

Shapes:  N = blocks, B = bytes of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from tokenizers.pre_tokenizers import ByteLevel

from outrider.core.errors import ConfigError, did_you_mean
from outrider.core.files import replacing
from outrider.models.configs import LlamaConfig
from outrider.models.weights import Weights
from outrider_lab.models.gemm import gemm_shape
from outrider_lab.models.gguf import (
    FORMATS,
    Exportable,
    Format,
    Value,
    head_of,
    metadata_of,
    padded,
    tensors_of,
)

# By name: sizes as `gemm_shape` reads them, vocabulary, window, and whether the head is the table.
SHAPES: Mapping[str, tuple[str, int, int, bool]] = {
    "tiny": ("256x512x2x4x2x64", 512, 8192, True),
    # Tier B of the studies.
    "0.4b": ("1024x4096x24x16x8x64", 8192, 2048, False),
    # Gemma 3 270M, SmolLM2 1.7B, Qwen3 4B and Llama 3.1 8B, all in the architecture of Llama.
    "270m": ("640x2048x18x4x1x256", 262_144, 32_768, True),
    "1.7b": ("2048x8192x24x32x32x64", 49_152, 8192, True),
    "4b": ("2560x9728x36x32x8x128", 151_936, 40_960, True),
    "8b": ("4096x14336x32x32x8x128", 128_256, 131_072, False),
}
MIX = "q4_k_m"
_MIX_TYPE = 15
# A prime number of random blocks is repeated, so rows of a matrix differ.
_NUM_DRAWN = 65_537


@dataclass(frozen=True, slots=True)
class Blocks:
    """A type of tensors: its number in a file, values and bytes of a block, and float16 numbers in
    it by their place."""

    number: int
    values: int
    num_bytes: int
    halves: Mapping[int, float]

    def drawn(self) -> NDArray[np.uint8]:
        raw_NB = np.random.default_rng(0).integers(0, 256, (_NUM_DRAWN, self.num_bytes), np.uint8)
        for place, number in self.halves.items():
            raw_NB[:, place : place + 2] = np.array([number], "<f2").view(np.uint8)
        return raw_NB


BLOCKS: Mapping[str, Blocks] = {
    "q8_0": Blocks(8, 32, 34, {0: 3e-4}),
    "q5_0": Blocks(6, 32, 22, {0: 3e-3}),
    "q4_1": Blocks(3, 32, 20, {0: 3e-3, 2: -2e-2}),
    "q4_k": Blocks(12, 256, 144, {0: 1e-4, 2: 1e-4}),
    "q6_k": Blocks(14, 256, 210, {208: 1e-4}),
    "iq2_xxs": Blocks(16, 256, 66, {0: 2e-3}),
    "iq2_xs": Blocks(17, 256, 74, {0: 2e-3}),
    "iq2_s": Blocks(22, 256, 82, {0: 2e-3}),
    "iq3_xxs": Blocks(18, 256, 98, {0: 2e-3}),
    "iq3_s": Blocks(21, 256, 110, {0: 2e-3}),
}


def write_random_gguf(path: Path) -> None:
    """Write the file that `path` names as SHAPE-FORMAT.gguf; nothing if it is there.

    Raises ConfigError for a name of another kind.
    """
    if path.exists():
        return
    shape, _, form = path.stem.partition("-")
    forms = (MIX, "bf16", *BLOCKS)
    for word, known in ((shape, SHAPES), (form, forms)):
        if word not in known:
            raise ConfigError(
                f"{path.name} is no SHAPE-FORMAT.gguf of this study.",
                hint=did_you_mean(word, known),
            )
    config = _config(shape)
    # Only names and sizes are used, so no weights are needed.
    listed = tensors_of(config, cast("Weights", cast("Any", {})))
    named = [(one, _type_of(one, form, config)) for one in listed]
    kinds = {
        "mix": _MIX_TYPE,
        **{name: one.file_type for name, one in FORMATS.items()},
    }
    metadata: dict[str, Value] = {
        **metadata_of(config, path.stem),
        "general.file_type": kinds.get(form, kinds["mix"]),
        "general.quantization_version": 2,
        **_vocabulary(config.vocab_size),
    }
    tensors = [(one, _format(kind)) for one, kind in named]
    drawn = {kind: BLOCKS[kind].drawn() for _, kind in named if kind in BLOCKS}
    rng = np.random.default_rng(0)
    floats = (rng.standard_normal(_NUM_DRAWN, np.float32) / 50).view(np.uint32) >> 16
    drawn["bf16"] = floats.astype("<u2").view(np.uint8).reshape(-1, 2)
    drawn["f32"] = np.ones((1, 1), "<f4").view(np.uint8)
    with replacing(path) as part, part.open("wb") as file:
        file.write(head_of(metadata, tensors))
        for (one, kind), (_, format_) in zip(named, tensors, strict=True):
            size = format_.num_bytes(one.shape)
            raw_NB = drawn[kind]
            file.write(np.resize(raw_NB, (size // raw_NB.shape[1], raw_NB.shape[1])).data)
            file.write(bytes(padded(size) - size))


def _config(shape: str) -> LlamaConfig:
    sizes, vocab_size, window, tied = SHAPES[shape]
    return replace(
        gemm_shape(sizes).config(),
        family="llama",
        vocab_size=vocab_size,
        max_tokens=window,
        tie_word_embeddings=tied,
    )


def _type_of(tensor: Exportable, form: str, config: LlamaConfig) -> str:
    """Of Q4_K_M some matrices have six bits, and rows that are no whole blocks of 256 another
    type."""
    if not tensor.is_matrix:
        return "f32"
    table = "token_embd.weight" if config.tie_word_embeddings else "output.weight"
    if form.startswith("iq"):
        return "q6_k" if "token_embd" in tensor.name or tensor.name == table else form
    if form != MIX:
        return form
    more = tensor.name == table
    if ".attn_v." in tensor.name or ".ffn_down." in tensor.name:
        layer, eighth = int(tensor.name.split(".")[1]), config.num_layers // 8
        last = layer >= 7 * config.num_layers // 8
        more = layer < eighth or last or (layer - eighth) % 3 == 2
    if tensor.shape[-1] % 256:
        return "q8_0" if more else "q5_0"
    return "q6_k" if more else "q4_k"


def _format(kind: str) -> Format:
    if kind not in BLOCKS:
        return FORMATS[kind]
    found = BLOCKS[kind]
    return replace(
        FORMATS["q8_0"], type_id=found.number, block=found.values, block_bytes=found.num_bytes
    )


def _vocabulary(size: int) -> dict[str, Value]:
    """Bytes, an end, and tokens that stand for nothing."""
    tokens = [*sorted(ByteLevel.alphabet()), "<|endoftext|>"]
    tokens += [f"t{number}" for number in range(size - len(tokens))]
    kinds = [3 if token == "<|endoftext|>" else 1 for token in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": ["t 1"],
        "tokenizer.ggml.eos_token_id": 256,
    }
