"""Writes small GGUF files, right ones and wrong ones, sharing no code with the program."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

# Numbers of types of values, and how Python writes one.
SCALARS = {
    "u8": (0, "<B"), "i8": (1, "<b"), "u16": (2, "<H"), "i16": (3, "<h"), "u32": (4, "<I"),
    "i32": (5, "<i"), "f32": (6, "<f"), "bool": (7, "<B"), "u64": (10, "<Q"), "i64": (11, "<q"),
    "f64": (12, "<d"),
}  # fmt: skip
STRING, ARRAY = 8, 9
# Types of tensors: number, values and bytes of a block.
TENSORS = {
    "F32": (0, 1, 4), "F16": (1, 1, 2), "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22), "Q5_1": (7, 32, 24), "Q8_0": (8, 32, 34), "Q2_K": (10, 256, 84),
    "Q3_K": (11, 256, 110), "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210), "IQ4_NL": (20, 32, 18), "IQ4_XS": (23, 256, 136), "MXFP4": (39, 32, 17),
    "IQ2_XXS": (16, 256, 66), "IQ2_XS": (17, 256, 74), "IQ3_XXS": (18, 256, 98),
    "IQ1_S": (19, 256, 50), "IQ3_S": (21, 256, 110), "IQ2_S": (22, 256, 82), "IQ1_M": (29, 256, 56),
    "TQ1_0": (34, 256, 54), "TQ2_0": (35, 256, 66), "NVFP4": (40, 64, 36), "Q1_0": (41, 128, 18),
    "Q2_0": (42, 64, 18), "I64": (27, 1, 8),
}  # fmt: skip
# Where a block has its float16 scale, and the one of its minimums. MXFP4 has an exponent at 0,
# NVFP4 floats of 8 bits, and IQ1_M the quarters of its float16 in the upper halves of four bytes.
SCALES: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,),
    "IQ4_XS": (0,), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ3_XXS": (0,), "IQ1_S": (0,), "IQ3_S": (0,),
    "IQ2_S": (0,), "TQ1_0": (52,), "TQ2_0": (64,), "Q1_0": (0,), "Q2_0": (0,),
}  # fmt: skip
# Bytes that hold scales of other forms.
OTHER_SCALES: dict[str, tuple[int, ...]] = {
    "MXFP4": (0,), "NVFP4": (0, 1, 2, 3), "IQ1_M": (49, 51, 53, 55),
}  # fmt: skip
# Largest magnitudes of what scales are multiplied by.
_REACH = {"Q4": 15, "Q5": 31, "Q8": 127, "Q2": 45, "Q3": 128, "Q6": 4096, "IQ": 127}


def random_blocks(kind: str, num: int, seed: int) -> np.ndarray[Any, Any]:
    """Blocks of numbers about as large as weights are."""
    number, _, num_bytes = TENSORS[kind]
    rng = np.random.default_rng([number, seed])
    raw = rng.integers(0, 256, (num, num_bytes), np.uint8)
    reach = _REACH.get(kind[:2], 1) * (40 if kind in ("Q4_K", "Q5_K", "IQ4_XS") else 1)
    for at in SCALES.get(kind, ()):
        scales = rng.standard_normal((num, 1)) / reach / 4
        raw[:, at : at + 2] = scales.astype("<f2").view(np.uint8)
    if kind == "MXFP4":
        raw[:, 0] = rng.integers(118, 125, num)
    if kind == "NVFP4":
        raw[:, :4] = rng.integers(1, 40, (num, 4))
    if kind == "IQ1_M":
        halves = (rng.standard_normal(num) / 40).astype("<f2").view(np.uint16)
        for quarter, at in enumerate(OTHER_SCALES["IQ1_M"]):
            raw[:, at] = (halves >> 4 * quarter & 15) << 4 | raw[:, at] & 15
    return raw


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def typed(value: Any) -> bytes:
    """With its type before it: a pair of type and number, or what Python's type says."""
    match value:
        case (str() as kind, number) if kind in SCALARS:
            return struct.pack("<I", SCALARS[kind][0]) + struct.pack(SCALARS[kind][1], number)
        case bool():
            return typed(("bool", value))
        case int():
            return typed(("u32", value))
        case float():
            return typed(("f32", value))
        case str() | bytes():
            return struct.pack("<I", STRING) + text(value)
        case _:
            return struct.pack("<I", ARRAY) + array(value)


def array(values: list[Any]) -> bytes:
    first = values[0] if values else ""
    if isinstance(first, list):
        inner = b"".join(array(value) for value in values)
        return struct.pack("<IQ", ARRAY, len(values)) + inner
    if isinstance(first, str | bytes):
        return struct.pack("<IQ", STRING, len(values)) + b"".join(map(text, values))
    kind = "f32" if isinstance(first, float) else "i32"
    return struct.pack("<IQ", SCALARS[kind][0], len(values)) + b"".join(
        struct.pack(SCALARS[kind][1], value) for value in values
    )


@dataclass
class Stored:
    """A tensor: sizes outermost first, its type, and its bytes. `offset` is where the table says
    that it is, if not where it is."""

    shape: tuple[int, ...]
    kind: str | int
    raw: bytes
    offset: int | None = None


@dataclass
class Gguf:
    """A file to write, right unless somebody changes it."""

    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    tensors: dict[str, Stored] = field(default_factory=dict[str, Stored])
    version: int = 3
    magic: bytes = b"GGUF"
    alignment: int = 32

    def add(self, name: str, values: np.ndarray[Any, Any], kind: str = "F32") -> None:
        raw = values.astype({"F32": "<f4", "F16": "<f2", "I64": "<i8"}[kind]).tobytes()
        self.tensors[name] = Stored(values.shape, kind, raw)

    def add_blocks(self, name: str, shape: tuple[int, ...], kind: str, seed: int) -> None:
        raw = random_blocks(kind, prod(shape) // TENSORS[kind][1], seed)
        self.tensors[name] = Stored(shape, kind, raw.tobytes())

    def head(self) -> bytes:
        counts = struct.pack("<IQQ", self.version, len(self.tensors), len(self.metadata))
        parts = [self.magic, counts]
        parts += [text(key) + typed(value) for key, value in self.metadata.items()]
        offset = 0
        for name, tensor in self.tensors.items():
            number = TENSORS[tensor.kind][0] if isinstance(tensor.kind, str) else tensor.kind
            sizes = tensor.shape[::-1]
            parts.append(text(name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes))
            place = offset if tensor.offset is None else tensor.offset
            parts.append(struct.pack("<IQ", number, place))
            offset += len(tensor.raw) + -len(tensor.raw) % self.alignment
        return b"".join(parts)

    def to_bytes(self) -> bytes:
        raw = self.head()
        for tensor in self.tensors.values():
            raw += b"\0" * (-len(raw) % self.alignment) + tensor.raw
        return raw

    def write(self, path: Path) -> Path:
        path.write_bytes(self.to_bytes())
        return path


TOKENS = ["<s>", "</s>", "a", "b", "ab", "Ġ", "Ġa", *(f"t{i}" for i in range(25))]
LLAMA: Mapping[str, Any] = {
    "general.architecture": "llama",
    "general.alignment": 32,
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, *([1] * (len(TOKENS) - 2))],
    "tokenizer.ggml.merges": ["a b", "Ġ a"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.add_bos_token": False,
}
# Matrices of the model above: outputs and inputs.
MATRICES = {
    "attn_q": (32, 32),
    "attn_k": (16, 32),
    "attn_v": (16, 32),
    "attn_output": (32, 32),
    "ffn_gate": (64, 32),
    "ffn_up": (64, 32),
    "ffn_down": (32, 64),
}


def small_llama(changes: Mapping[str, Any] | None = None, kind: str = "Q4_1") -> Gguf:
    """A model of one layer; a change of None takes a key away."""
    metadata = {**LLAMA, **(changes or {})}
    file = Gguf({key: value for key, value in metadata.items() if value is not None})
    file.add_blocks("token_embd.weight", (len(TOKENS), 32), "Q8_0", 1)
    for seed, (name, shape) in enumerate(MATRICES.items(), 2):
        file.add_blocks(f"blk.0.{name}.weight", shape, kind, seed)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        file.add(f"{name}.weight", np.ones(32))
    return file


def wide_llama(kinds: Sequence[str]) -> Gguf:
    """A model of two layers whose matrices blocks of 256 numbers divide; they are of `kinds`, in
    turns, and the table of tokens is of the last one."""
    sizes = {"embedding_length": 256, "feed_forward_length": 256, "context_length": 256}
    file = Gguf(dict(LLAMA) | {f"llama.{key}": size for key, size in sizes.items()})
    file.metadata["llama.block_count"] = 2
    shapes, turns = {"attn_k": (128, 256), "attn_v": (128, 256)}, cycle(kinds)
    for seed, (block, name) in enumerate(product((0, 1), MATRICES)):
        shape = shapes.get(name, (256, 256))
        file.add_blocks(f"blk.{block}.{name}.weight", shape, next(turns), seed)
    for name in ("blk.0.attn", "blk.0.ffn", "blk.1.attn", "blk.1.ffn", "output"):
        file.add(f"{name}_norm.weight", np.ones(256))
    file.add_blocks("token_embd.weight", (len(TOKENS), 256), kinds[-1], 99)
    return file


# Keys of a config.json, and what GGUF calls them after the architecture.
_KEYS = {
    "hidden_size": "embedding_length",
    "n_embd": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "n_inner": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "n_layer": "block_count",
    "num_attention_heads": "attention.head_count",
    "n_head": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "n_positions": "context_length",
    "sliding_window": "attention.sliding_window",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "rope_theta": "rope.freq_base",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
}
_MODULES = {
    "embed_tokens": "token_embd",
    "wte": "token_embd",
    "wpe": "position_embd",
    "norm": "output_norm",
    "ln_f": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "ln_1": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "ln_2": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


def module_named(module: str) -> str:
    """What GGUF calls a module of a checkpoint."""
    return _MODULES[module]


def from_config(config: Mapping[str, Any], arch: str) -> Gguf:
    """A file without tensors and tokenizer."""
    metadata: dict[str, Any] = {"general.architecture": arch}
    for key, value in config.items():
        if key in _KEYS and value is not None:
            metadata[f"{arch}.{_KEYS[key]}"] = value
    ends = {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.bos_token_id": 1}
    texts = [f"t{i}" for i in range(config["vocab_size"])]
    return Gguf({**metadata, **ends, "tokenizer.ggml.tokens": texts})


def from_checkpoint(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Gguf:
    """The file that llama.cpp's converter makes of a checkpoint in float32, without a tokenizer."""
    family = config["model_type"]
    arch = "llama" if family == "mistral" else family
    file = from_config(config, arch)
    heads = config.get("num_attention_heads", 1)
    for name, tensor in tensors.items():
        values = tensor.float().numpy()
        *outer, ending = name.split(".")
        if outer[0] == "model" or outer[0] == "transformer":
            outer = outer[1:]
        layer = "" if outer[0] not in ("layers", "h") else f"blk.{outer[1]}."
        module = _MODULES[".".join(outer[2:] if layer else outer)]
        if arch == "llama" and module in ("attn_q", "attn_k"):
            num = heads if module == "attn_q" else config["num_key_value_heads"]
            halves = values.reshape(num, 2, values.shape[0] // num // 2, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if arch == "gpt2" and layer and ending == "weight" and values.ndim == 2:
            values = values.T
        file.add(f"{layer}{module}.{ending}", np.ascontiguousarray(values))
    return file
