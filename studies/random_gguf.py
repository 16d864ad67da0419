"""GGUF files of random weights with the sizes of published models, for studies of speed alone.

No weight is quantised: blocks of random bytes with small scales are written as they are, so a file
of gigabytes takes seconds. Types of tensors are those that llama-quantize chooses.

Shapes:  N = blocks, R = bytes of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.errors import ConfigError, ContractError, did_you_mean
from outrider.core.files import replacing
from outrider_lab.models.gguf import FORMATS, Exportable, Format, Value, head_of, padded

# Numbers of a head of linear attention, and tokens of its convolution.
LINEAR_DIM, CONVOLVED = 128, 4


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model of an architecture of GGUF: llama, qwen3, or qwen35 with an MTP block. That
    one has `linear` heads, of keys and of values, in three of four layers. The output head is the
    table of tokens if it is `tied`."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    arch: str = "llama"
    window: int = 4096
    tied: bool = True
    linear: tuple[int, int] | None = None


def _qwen(*sizes: int, linear: tuple[int, int] | None = None) -> Shape:
    return Shape(*sizes, arch="qwen35" if linear else "qwen3", linear=linear)


# All in the architecture of Llama: tier B of the studies, Gemma 3 270M, SmolLM2 1.7B, Qwen3 4B and
# Llama 3.1 8B.
LLAMAS: Mapping[str, Shape] = {
    "tiny": Shape(256, 2, 4, 2, 64, 512, 512, window=8192),
    "0.4b": Shape(1024, 24, 16, 8, 64, 4096, 8192, window=2048, tied=False),
    "270m": Shape(640, 18, 4, 1, 256, 2048, 262_144, window=32_768),
    "1.7b": Shape(2048, 24, 32, 32, 64, 8192, 49_152, window=8192),
    "4b": Shape(2560, 36, 32, 8, 128, 9728, 151_936, window=40_960),
    "8b": Shape(4096, 32, 32, 8, 128, 14_336, 128_256, window=131_072, tied=False),
}
QWENS: Mapping[str, Shape] = {
    "0.6b": _qwen(1024, 28, 16, 8, 128, 3072, 151_936),
    "1.7b": _qwen(2048, 28, 16, 8, 128, 6144, 151_936),
    "4b": _qwen(2560, 36, 32, 8, 128, 9728, 151_936),
    "qwen3.5-4b": _qwen(2560, 32, 16, 4, 256, 9216, 248_320, linear=(16, 32)),
    "tiny-draft": _qwen(256, 2, 4, 2, 64, 512, 2048),
    "tiny": _qwen(512, 4, 8, 4, 64, 1024, 2048),
    "tiny-mtp": _qwen(512, 4, 4, 2, 128, 1024, 2048, linear=(2, 4)),
}

# Blocks that tensors repeat; every tensor begins elsewhere in them.
_POOL = 1 << 16
# Spread of the numbers of a matrix in super-blocks. Of x = (d s) q - (e t) with s and t of 6 bits,
# the mean is 0 where e is the mean of q times d; the spread is then 258 d for q of 4 bits, 526 d
# for 5 bits. Of x = (d s) q with s of 16 at most and q of 6 bits it is 175 d.
_SPREAD = 0.02
_FOUR, _FIVE, _SIX = _SPREAD / 258, _SPREAD / 526, _SPREAD / 175


@dataclass(frozen=True, slots=True)
class Blocks:
    """A type of tensors: its number in a file, values and bytes of a block, and in it float16
    numbers by their place. Bytes of `scales` are signed numbers of at most 16."""

    number: int
    values: int
    num_bytes: int
    halves: Mapping[int, float] = field(default_factory=dict[int, float])
    scales: slice | None = None

    def drawn(self) -> NDArray[np.uint8]:
        """Return blocks_NR of random bytes."""
        dice = np.random.default_rng(self.num_bytes)
        blocks_NR = dice.integers(0, 256, (_POOL, self.num_bytes), dtype=np.uint8)
        if self.scales is not None:
            small_NR = dice.integers(-16, 17, blocks_NR[:, self.scales].shape, dtype=np.int8)
            blocks_NR[:, self.scales] = small_NR.view(np.uint8)
        for place, number in self.halves.items():
            blocks_NR[:, place : place + 2] = np.array([number], "<f2").view(np.uint8)
        return blocks_NR


BLOCKS: Mapping[str, Blocks] = {
    "q8_0": Blocks(8, 32, 34, {0: 3e-4}),
    "q5_0": Blocks(6, 32, 22, {0: 3e-3}),
    "q4_1": Blocks(3, 32, 20, {0: 3e-3, 2: -2e-2}),
    "q4_k": Blocks(12, 256, 144, {0: _FOUR, 2: 7.5 * _FOUR}),
    "q5_k": Blocks(13, 256, 176, {0: _FIVE, 2: 15.5 * _FIVE}),
    "q6_k": Blocks(14, 256, 210, {208: _SIX}, slice(192, 208)),
    "iq2_xxs": Blocks(16, 256, 66, {0: 2e-3}),
    "iq2_xs": Blocks(17, 256, 74, {0: 2e-3}),
    "iq2_s": Blocks(22, 256, 82, {0: 2e-3}),
    "iq3_xxs": Blocks(18, 256, 98, {0: 2e-3}),
    "iq3_s": Blocks(21, 256, 110, {0: 2e-3}),
}
MIX = "q4_k_m"
_MIX_TYPE = 15
# Vectors, and taps of convolutions, by what they are: norms, biases of time steps, rates of decay.
_CONSTANTS = {"one": 1.0, "zero": 0.0, "rate": -0.5, "tap": 0.25}
# Types of matrices in the mix.
_MIXED = {
    "matrix": "q4_k",
    "table": "q4_k",
    "wide": "q5_k",
    "sensitive": "q6_k",
    "head": "q6_k",
}

# A tensor's name, sizes, and what it is: one of _CONSTANTS or of _MIXED.
Named = tuple[str, tuple[int, ...], str]


def write_random_gguf(path: Path, shapes: Mapping[str, Shape] = LLAMAS) -> None:
    """Write the file that `path` names as SHAPE-FORMAT.gguf, of one of `shapes`; nothing if it is
    there.

    Raises ConfigError for a name of another kind.
    """
    if path.exists():
        return
    name, _, form = path.stem.rpartition("-")
    for word, known in ((name, shapes), (form, (MIX, "bf16", *BLOCKS))):
        if word not in known:
            raise ConfigError(
                f"{path.name} is no SHAPE-FORMAT.gguf of this study.",
                hint=did_you_mean(word, known),
            )
    started, shape = perf_counter(), shapes[name]
    tensors = [(one, size, _type_of(kind, form, size[-1])) for one, size, kind in _tensors(shape)]
    file_type = FORMATS[form].file_type if form in FORMATS else _MIX_TYPE
    with replacing(path) as part:
        _write(part, _metadata(shape, name, file_type), tensors)
    size = path.stat().st_size / 1e9
    print(f"{path.name}: {size:.2f} GB in {perf_counter() - started:.0f} s", flush=True)


def _write(path: Path, metadata: Mapping[str, Value], tensors: list[Named]) -> None:
    formats = [_format(kind) for _, _, kind in tensors]
    listed = [Exportable(name, size, _unread) for name, size, _ in tensors]
    pools = {kind: _drawn(kind) for _, _, kind in tensors if kind not in _CONSTANTS}
    with path.open("wb") as file:
        file.write(head_of(metadata, list(zip(listed, formats, strict=True))))
        for number, ((_, size, kind), form) in enumerate(zip(tensors, formats, strict=True)):
            if kind in pools:
                left, at = form.num_bytes(size) // form.block_bytes, 7919 * number % _POOL
                while left:
                    part_NR = pools[kind][at : at + left]
                    file.write(part_NR.tobytes())
                    left, at = left - len(part_NR), 0
            else:
                file.write(np.full(prod(size), _CONSTANTS[kind], np.float32).tobytes())
            file.write(bytes(padded(form.num_bytes(size)) - form.num_bytes(size)))


def _unread() -> Tensor:
    raise ContractError("blocks are not made of numbers")


def _drawn(kind: str) -> NDArray[np.uint8]:
    if kind in BLOCKS:
        return BLOCKS[kind].drawn()
    floats = (np.random.default_rng(0).standard_normal(_POOL, np.float32) * _SPREAD).view(np.uint32)
    return (floats >> 16).astype("<u2").view(np.uint8).reshape(-1, 2)


def _type_of(kind: str, form: str, num_columns: int) -> str:
    """The type of a tensor of the file: of i-quants tables have six bits, and in the mix rows that
    are no whole blocks of 256 another type."""
    if kind in _CONSTANTS:
        return kind
    if form.startswith("iq"):
        return "q6_k" if kind in ("head", "table") else form
    if form != MIX:
        return form
    if num_columns % 256:
        return "q8_0" if _MIXED[kind] == "q6_k" else "q5_0"
    return _MIXED[kind]


def _format(kind: str) -> Format:
    if kind not in BLOCKS:
        return FORMATS.get(kind, FORMATS["f32"])
    found = BLOCKS[kind]
    return Format(found.number, _MIX_TYPE, found.values, found.num_bytes, lambda _: _unread())


def _tensors(shape: Shape) -> Iterator[Named]:
    table = (shape.vocab, shape.hidden)
    yield "token_embd.weight", table, "head" if shape.tied else "table"
    yield "output_norm.weight", (shape.hidden,), "one"
    if not shape.tied:
        yield "output.weight", table, "head"
    for index in range(shape.layers):
        if shape.linear and (index + 1) % 4:
            yield from _linear(shape, f"blk.{index}.", *shape.linear)
        else:
            yield from _attention(shape, f"blk.{index}.", _kind_of(index, shape.layers))
        yield from _rest(shape, f"blk.{index}.", _kind_of(index, shape.layers))
    if shape.linear:
        block = f"blk.{shape.layers}."
        yield from _attention(shape, block, "sensitive")
        yield from _rest(shape, block, "sensitive")
        yield f"{block}nextn.eh_proj.weight", (shape.hidden, 2 * shape.hidden), "matrix"
        for norm in ("enorm", "hnorm", "shared_head_norm"):
            yield f"{block}nextn.{norm}.weight", (shape.hidden,), "one"


def _kind_of(index: int, num_layers: int) -> str:
    """What the most sensitive matrices of a layer are."""
    first, last = num_layers // 8, 7 * num_layers // 8
    more = index < first or index >= last or (index - first) % 3 == 2
    return "sensitive" if more else "matrix"


def _attention(shape: Shape, block: str, sensitive: str) -> Iterator[Named]:
    """In a hybrid, queries have a gate of their size."""
    attended, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    queries = 2 * attended if shape.linear else attended
    yield f"{block}attn_q.weight", (queries, shape.hidden), "matrix"
    yield f"{block}attn_k.weight", (kv, shape.hidden), "matrix"
    yield f"{block}attn_v.weight", (kv, shape.hidden), sensitive
    yield f"{block}attn_output.weight", (shape.hidden, attended), "matrix"
    for norm in ("attn_q_norm", "attn_k_norm") if shape.arch != "llama" else ():
        yield f"{block}{norm}.weight", (shape.head_dim,), "one"


def _linear(shape: Shape, block: str, num_keys: int, num_values: int) -> Iterator[Named]:
    values = num_values * LINEAR_DIM
    mixed = 2 * num_keys * LINEAR_DIM + values
    yield f"{block}attn_qkv.weight", (mixed, shape.hidden), "wide"
    yield f"{block}attn_gate.weight", (values, shape.hidden), "matrix"
    yield f"{block}ssm_conv1d.weight", (mixed, CONVOLVED), "tap"
    yield f"{block}ssm_dt.bias", (num_values,), "zero"
    yield f"{block}ssm_a", (num_values,), "rate"
    for one in ("ssm_beta", "ssm_alpha"):
        yield f"{block}{one}.weight", (num_values, shape.hidden), "matrix"
    yield f"{block}ssm_norm.weight", (LINEAR_DIM,), "one"
    yield f"{block}ssm_out.weight", (shape.hidden, values), "matrix"


def _rest(shape: Shape, block: str, sensitive: str) -> Iterator[Named]:
    second = "post_attention_norm" if shape.linear else "ffn_norm"
    for norm in ("attn_norm", second):
        yield f"{block}{norm}.weight", (shape.hidden,), "one"
    for one in ("ffn_gate", "ffn_up"):
        yield f"{block}{one}.weight", (shape.ffn, shape.hidden), "matrix"
    yield f"{block}ffn_down.weight", (shape.hidden, shape.ffn), sensitive


def _metadata(shape: Shape, name: str, file_type: int) -> dict[str, Value]:
    sizes: dict[str, Value] = {
        "vocab_size": shape.vocab,
        "context_length": shape.window,
        "embedding_length": shape.hidden,
        "block_count": shape.layers + bool(shape.linear),
        "feed_forward_length": shape.ffn,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
    }
    if shape.linear:
        num_keys, num_values = shape.linear
        turned = shape.head_dim // 4
        sizes |= {
            "nextn_predict_layers": 1,
            "full_attention_interval": 4,
            "rope.dimension_count": turned,
            "rope.dimension_sections": [turned // 2 - 2 * (turned // 6), *[turned // 6] * 2, 0],
            "ssm.conv_kernel": CONVOLVED,
            "ssm.inner_size": num_values * LINEAR_DIM,
            "ssm.state_size": LINEAR_DIM,
            "ssm.time_step_rank": num_values,
            "ssm.group_count": num_keys,
        }
    general: dict[str, Value] = {"general.architecture": shape.arch, "general.name": name}
    general |= {"general.file_type": file_type, "general.quantization_version": 2}
    own = {f"{shape.arch}.{key}": value for key, value in sizes.items()}
    return general | own | _words(shape.vocab)


def _words(vocab: int) -> dict[str, Value]:
    """The bytes and one pair; all other tokens are unused."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(one) for one in plain] + [chr(256 + one) for one in range(256 - len(plain))]
    tokens = [*letters, "ab", *(f"<|{number}|>" for number in range(257, vocab))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 257 + [5] * (vocab - 257),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": vocab - 1,
    }
