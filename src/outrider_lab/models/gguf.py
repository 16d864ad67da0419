"""GGUF files, version 3, of the Llama family: header and metadata, number formats, tensor names.

A file is a header, metadata (keys with typed values), a list of tensors (name, sizes, type, place)
and their bytes, each tensor at a multiple of 32; numbers are little-endian. Sizes are listed
innermost first, so a matrix of O rows and I columns is (I, O). Files are checked against the
package `gguf` and against llama.cpp in the tests; the package has no bfloat16 and brings an HTTP
client, so the program does not use it.

Shapes:  O = rows or outputs, I = columns or inputs, N = blocks, B = 32, H = size of a head,
         R = H/2.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from outrider.core.errors import CheckpointError, ContractError
from outrider.models.configs import LlamaConfig
from outrider.models.gguf.architectures import ARCHITECTURES, PAIRED
from outrider.models.llama_weights import EMBEDDING
from outrider.models.rope import frequencies
from outrider.models.weights import HEAD, Weights

BLOCK = 32
# Values that are converted at once, so that a large table needs little memory beside itself.
_MAX_VALUES = 1 << 21


@dataclass(frozen=True, slots=True)
class Format:
    """`type_id` is a tensor's type in the file, `file_type` that of a file mostly made of it;
    `block` values take `block_bytes`. `encode` gives the bytes of rows of float32.

    A block is 32 neighbours of a row with one scale d, a float16 before their integers q:

        q8_0:  d = max |x| / 127,  q = x / d rounded, halves away from zero;  x is about d q
        q4_0:  d = m / -8, where m is the first x of largest size,  q = floor(x / d + 8.5) up to 15;
               x is about d (q - 8); byte j of a block holds q[j] below and q[j + 16] above

    Norms and biases stay f32, as llama.cpp wants them. The scale is rounded to float16 only when it
    is stored: the integers are of the exact one.
    """

    type_id: int
    file_type: int
    block: int
    block_bytes: int
    encode: Callable[[Tensor], Tensor]

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        return prod(shape) // self.block * self.block_bytes


def encoded(tensor: Tensor, form: Format) -> Iterator[bytes]:
    """The bytes of a matrix, some rows at a time, or of a vector; whole blocks a row."""
    rows_OI = tensor if tensor.ndim == 2 else tensor[None]
    if rows_OI.shape[1] % form.block != 0:
        raise ContractError("a row has no whole number of blocks")
    step = max(1, _MAX_VALUES // rows_OI.shape[1])
    for part_OI in torch.split(rows_OI, step):
        yield form.encode(part_OI.float().contiguous()).numpy().tobytes()


def _f32(rows_OI: Tensor) -> Tensor:
    return rows_OI.view(torch.uint8)


def _f16(rows_OI: Tensor) -> Tensor:
    """Exact for bfloat16 numbers between 6e-5 and 65504 in size; raises CheckpointError above."""
    half_OI = rows_OI.half()
    if half_OI.isinf().any():
        raise CheckpointError("a weight is too large for float16.", hint="use --gguf bf16")
    return half_OI.view(torch.uint8)


def _bf16(rows_OI: Tensor) -> Tensor:
    return rows_OI.bfloat16().view(torch.uint8)


def _q8_0(rows_OI: Tensor) -> Tensor:
    blocks_NB = rows_OI.view(-1, BLOCK)
    scale_N = blocks_NB.abs().amax(1) / 127
    scaled_NB = blocks_NB * _inverse(scale_N)[:, None]
    whole_NB = scaled_NB.trunc()
    far_NB = (scaled_NB - whole_NB).abs() >= 0.5
    ints_NB = (whole_NB + far_NB * scaled_NB.sign()).to(torch.int8)
    return torch.cat([_stored(scale_N), ints_NB.view(torch.uint8)], dim=1)


def _q4_0(rows_OI: Tensor) -> Tensor:
    blocks_NB = rows_OI.view(-1, BLOCK)
    largest_N1 = blocks_NB.abs().argmax(1, keepdim=True)
    scale_N = blocks_NB.gather(1, largest_N1)[:, 0] / -8
    scaled_NB = blocks_NB * _inverse(scale_N)[:, None]
    ints_NB = (scaled_NB + 8.5).floor().clamp(max=15).to(torch.uint8)
    low_NH, high_NH = torch.chunk(ints_NB, 2, dim=1)
    return torch.cat([_stored(scale_N), low_NH | high_NH << 4], dim=1)


def _inverse(scale_N: Tensor) -> Tensor:
    return torch.where(scale_N == 0, 0.0, 1 / scale_N)


def _stored(scale_N: Tensor) -> Tensor:
    return scale_N.half()[:, None].view(torch.uint8)


FORMATS: Mapping[str, Format] = {
    "f32": Format(type_id=0, file_type=0, block=1, block_bytes=4, encode=_f32),
    "f16": Format(type_id=1, file_type=1, block=1, block_bytes=2, encode=_f16),
    "bf16": Format(type_id=30, file_type=32, block=1, block_bytes=2, encode=_bf16),
    "q8_0": Format(type_id=8, file_type=7, block=BLOCK, block_bytes=34, encode=_q8_0),
    "q4_0": Format(type_id=2, file_type=2, block=BLOCK, block_bytes=18, encode=_q4_0),
}


ALIGNMENT = 32
_MAGIC, _VERSION = b"GGUF", 3
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9

# What a value may be here: numbers are unsigned, in a list they are signed.
Value = str | bool | int | float | Sequence[str] | Sequence[int]


def head_of(metadata: Mapping[str, Value], tensors: Sequence[tuple[Exportable, Format]]) -> bytes:
    """Everything before the first tensor's bytes, padded to where they begin."""
    parts = [_MAGIC, struct.pack("<IQQ", _VERSION, len(tensors), len(metadata))]
    parts += [_text(key) + _typed(value) for key, value in metadata.items()]
    offset = 0
    for tensor, form in tensors:
        sizes = tensor.shape[::-1]
        parts.append(_text(tensor.name))
        parts.append(struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, form.type_id, offset))
        offset += padded(form.num_bytes(tensor.shape))
    head = b"".join(parts)
    return head.ljust(padded(len(head)), b"\0")


def padded(num_bytes: int) -> int:
    """So many bytes, and the zeros behind them."""
    return num_bytes + -num_bytes % ALIGNMENT


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _typed(value: Value) -> bytes:
    match value:
        case str():
            return struct.pack("<I", _STRING) + _text(value)
        case bool():
            return struct.pack("<I?", _BOOL, value)
        case int():
            return struct.pack("<II", _UINT32, value)
        case float():
            return struct.pack("<If", _FLOAT32, value)
        case _:
            return struct.pack("<I", _ARRAY) + _array(value)


def _array(values: Sequence[str] | Sequence[int]) -> bytes:
    texts = [value for value in values if isinstance(value, str)]
    if texts:
        return struct.pack("<IQ", _STRING, len(texts)) + b"".join(map(_text, texts))
    return struct.pack(f"<IQ{len(values)}i", _INT32, len(values), *values)


_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


@dataclass(frozen=True, slots=True)
class Exportable:
    """A tensor of the file and how it is read; `is_matrix` ones take the file's number format."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) == 2


def architecture_of(config: LlamaConfig) -> str:
    """Raises CheckpointError for a model that llama.cpp would not run as it is meant."""
    found = _ARCHITECTURES.get(config.family)
    if found is None:
        raise CheckpointError(
            f"a {config.family} model cannot be exported to GGUF.",
            hint=f"it can be done for: {', '.join(_ARCHITECTURES)}",
        )
    stretched = config.rope.kind
    if stretched not in ("default", "linear", *(["llama3"] if found == "llama" else [])):
        raise CheckpointError(
            f"positions of type {stretched!r} cannot be exported to GGUF for a {found} model.",
            hint="choose a checkpoint whose config.json has no such rope_scaling",
        )
    if found != "llama" and (config.out_bias or config.mlp_bias):
        raise CheckpointError(
            f"a {config.family} model with biases after attention cannot be exported to GGUF.",
            hint="choose a checkpoint without attention_bias",
        )
    return found


def metadata_of(config: LlamaConfig, name: str) -> dict[str, Value]:
    """The keys that describe the model, without its tokenizer and number format."""
    arch = architecture_of(config)
    sizes: dict[str, Value] = {
        "vocab_size": config.vocab_size,
        "context_length": config.whole_tokens,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.ffn_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": config.rope.theta,
    }
    if config.rope.kind == "linear":
        sizes |= {"rope.scaling.type": "linear", "rope.scaling.factor": config.rope.factor}
    general: dict[str, Value] = {
        "general.architecture": arch,
        "general.type": "model",
        "general.name": name,
    }
    return general | {f"{arch}.{key}": value for key, value in sizes.items()}


def tensors_of(config: LlamaConfig, weights: Weights) -> list[Exportable]:
    """All of them in the order of a pass; nothing is read yet."""
    table = (config.vocab_size, config.hidden_size)
    found = [_plain(weights, "token_embd.weight", EMBEDDING, table)]
    if config.rope.kind == "llama3":
        found.append(
            Exportable("rope_freqs.weight", (config.head_dim // 2,), lambda: _factors(config))
        )
    for index in range(config.num_layers):
        found += _layer(config, weights, index)
    found.append(_plain(weights, "output_norm.weight", "model.norm.weight", table[1:]))
    # As in transformers, a head that is stored wins over tying; without one, the embedding serves.
    if HEAD in weights or not config.tie_word_embeddings:
        found.append(_plain(weights, "output.weight", HEAD, table))
    return found


def _layer(config: LlamaConfig, weights: Weights, index: int) -> Iterator[Exportable]:
    row, hidden, head = ARCHITECTURES[architecture_of(config)], config.hidden_size, config.head_dim
    attended, kv, ffn = config.num_heads * head, config.num_kv_heads * head, config.ffn_size

    def part(name: str, ending: str, *shape: int) -> Exportable:
        ours = f"{row.stem}{index}.{row.names[name]}.{ending}"
        found = _plain(weights, f"blk.{index}.{name}.{ending}", ours, shape)
        if not row.paired or name not in PAIRED:
            return found
        return replace(found, read=lambda: interleave(found.read(), head))

    yield part("attn_norm", "weight", hidden)
    yield part("ffn_norm", "weight", hidden)
    if config.qk_norm:
        yield part("attn_q_norm", "weight", head)
        yield part("attn_k_norm", "weight", head)
    for name, num_out, num_in, has_bias in (
        ("attn_q", attended, hidden, config.qkv_bias),
        ("attn_k", kv, hidden, config.qkv_bias),
        ("attn_v", kv, hidden, config.qkv_bias),
        ("attn_output", hidden, attended, config.out_bias),
        ("ffn_gate", ffn, hidden, config.mlp_bias),
        ("ffn_up", ffn, hidden, config.mlp_bias),
        ("ffn_down", hidden, ffn, config.mlp_bias),
    ):
        yield part(name, "weight", num_out, num_in)
        if has_bias:
            yield part(name, "bias", num_out)


def _plain(weights: Weights, name: str, source: str, shape: tuple[int, ...]) -> Exportable:
    return Exportable(name, shape, lambda: weights.take(source, *shape))


def interleave(rows_O: Tensor, head_dim: int) -> Tensor:
    """Rows of each head in the order 0, R, 1, R + 1, ...; `rows_O` is a matrix or a bias.

    llama.cpp turns neighbouring pairs (2i, 2i + 1) of a head for `llama`, where checkpoints pair
    (i, i + H/2). So rows of queries and keys are interleaved for that architecture, and scores,
    sums over a head, stay the same. For `qwen2` and `qwen3` llama.cpp pairs as checkpoints do.
    """
    order_H = torch.arange(head_dim).view(2, -1).T.flatten()
    order_O = torch.arange(rows_O.shape[0]).view(-1, head_dim)[:, order_H].flatten()
    return rows_O[order_O]


def _factors(config: LlamaConfig) -> Tensor:
    """factors_R: what llama.cpp divides each plain frequency by."""
    plain_R = frequencies(replace(config.rope, kind="default"), config.head_dim)
    return plain_R / frequencies(config.rope, config.head_dim)
