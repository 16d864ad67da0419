"""GGUF files of random weights in the mixture of formats called Q4_K_M, written block by block.

Shapes:  N = blocks, R = bytes of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from time import perf_counter

import numpy as np

from outrider.core.errors import ContractError
from outrider.core.files import replacing
from outrider_lab.models.gguf import FORMATS, Exportable, Format, Value, head_of, padded

# Blocks that tensors repeat; every tensor begins elsewhere in them.
POOL = 1 << 16
# Spread of the numbers of a matrix.
SPREAD = 0.02
# Numbers of a head of linear attention, and tokens of its convolution.
LINEAR_DIM, CONVOLVED = 128, 4
MOSTLY_Q4_K_M = 15


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Qwen3 model, or of a Qwen3.5 one with an MTP block if it has `linear` heads, of
    keys and of values, in three of four layers."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    linear: tuple[int, int] | None = None


SHAPES: Mapping[str, Shape] = {
    "0.6b": Shape(1024, 28, 16, 8, 128, 3072, 151_936),
    "1.7b": Shape(2048, 28, 16, 8, 128, 6144, 151_936),
    "4b": Shape(2560, 36, 32, 8, 128, 9728, 151_936),
    "qwen3.5-4b": Shape(2560, 32, 16, 4, 256, 9216, 248_320, (16, 32)),
    "tiny-draft": Shape(256, 2, 4, 2, 64, 512, 2048),
    "tiny": Shape(512, 4, 8, 4, 64, 1024, 2048),
    "tiny-mtp": Shape(512, 4, 4, 2, 128, 1024, 2048, (2, 4)),
}


def _blocks(num_bytes: int, place: int, *halves: float, scales: slice | None = None) -> np.ndarray:
    """blocks_NR of random bytes, with `halves` as float16 from `place` on. Bytes of `scales` are
    signed numbers of at most 16."""
    dice = np.random.default_rng(num_bytes)
    blocks_NR = dice.integers(0, 256, (POOL, num_bytes), dtype=np.uint8)
    if scales is not None:
        small_NR = dice.integers(-16, 17, blocks_NR[:, scales].shape, dtype=np.int8)
        blocks_NR[:, scales] = small_NR.view(np.uint8)
    stored = np.array(halves, np.float16).view(np.uint8)
    blocks_NR[:, place : place + len(stored)] = stored
    return blocks_NR


def _unread(_values: object) -> object:
    raise ContractError("blocks are not made of numbers")


def _format(type_id: int, num_bytes: int) -> Format:
    return Format(type_id, MOSTLY_Q4_K_M, 256, num_bytes, _unread)  # pyright: ignore[reportArgumentType]


# Of x = (d s) q - (e t) with s and t of 6 bits, the mean is 0 where e is the mean of q times d; the
# spread is then 258 d for q of 4 bits, 526 d for 5 bits. Of x = (d s) q with s of 16 at most and q
# of 6 bits it is 175 d.
FORMS: Mapping[str, Format] = {
    "q4_k": _format(12, 144),
    "q5_k": _format(13, 176),
    "q6_k": _format(14, 210),
    **dict.fromkeys(("one", "zero", "rate", "tap"), FORMATS["f32"]),
}
# Vectors: norms, biases of time steps, rates of decay, and taps of convolutions.
CONSTANTS = {"one": 1.0, "zero": 0.0, "rate": -0.5, "tap": 0.25}


def _pools() -> dict[str, np.ndarray]:
    four, five, six = SPREAD / 258, SPREAD / 526, SPREAD / 175
    return {
        "q4_k": _blocks(144, 0, four, 7.5 * four),
        "q5_k": _blocks(176, 0, five, 15.5 * five),
        "q6_k": _blocks(210, 208, six, scales=slice(192, 208)),
    }


def written(folder: Path, name: str) -> Path:
    """The file of a shape, written if it is not there yet."""
    path = folder / f"{name}-q4_k_m.gguf"
    if not path.exists():
        started = perf_counter()
        with replacing(path) as part:
            _write(part, SHAPES[name], name)
        size = path.stat().st_size / 1e9
        print(f"{path.name}: {size:.2f} GB in {perf_counter() - started:.0f} s", flush=True)
    return path


def _write(path: Path, shape: Shape, name: str) -> None:
    tensors, pools = list(_tensors(shape)), _pools()
    listed = [(Exportable(one, size, _unread), FORMS[kind]) for one, size, kind in tensors]  # pyright: ignore[reportArgumentType]
    with path.open("wb") as file:
        file.write(head_of(_metadata(shape, name), listed))
        for number, (_, size, kind) in enumerate(tensors):
            form = FORMS[kind]
            if kind in pools:
                left, at = form.num_bytes(size) // form.block_bytes, 7919 * number % POOL
                while left:
                    part_NR = pools[kind][at : at + left]
                    file.write(part_NR.tobytes())
                    left, at = left - len(part_NR), 0
            else:
                file.write(np.full(prod(size), CONSTANTS[kind], np.float32).tobytes())
            file.write(bytes(padded(form.num_bytes(size)) - form.num_bytes(size)))


Tensor = tuple[str, tuple[int, ...], str]


def _tensors(shape: Shape) -> Iterator[Tensor]:
    """Names, sizes and number formats, as llama-quantize chooses them."""
    yield "token_embd.weight", (shape.vocab, shape.hidden), "q6_k"
    yield "output_norm.weight", (shape.hidden,), "one"
    for index in range(shape.layers):
        if shape.linear and (index + 1) % 4:
            yield from _linear(shape, f"blk.{index}.", *shape.linear)
        else:
            yield from _attention(shape, f"blk.{index}.", _form_of(index, shape.layers))
        yield from _rest(shape, f"blk.{index}.", _form_of(index, shape.layers))
    if shape.linear:
        block = f"blk.{shape.layers}."
        yield from _attention(shape, block, "q6_k")
        yield from _rest(shape, block, "q6_k")
        yield f"{block}nextn.eh_proj.weight", (shape.hidden, 2 * shape.hidden), "q4_k"
        for norm in ("enorm", "hnorm", "shared_head_norm"):
            yield f"{block}nextn.{norm}.weight", (shape.hidden,), "one"


def _form_of(index: int, num_layers: int) -> str:
    """The format of a layer's most sensitive matrices."""
    first, last = num_layers // 8, 7 * num_layers // 8
    return "q6_k" if index < first or index >= last or (index - first) % 3 == 2 else "q4_k"


def _attention(shape: Shape, block: str, sensitive: str) -> Iterator[Tensor]:
    """In a hybrid, queries have a gate of their size."""
    attended, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    queries = 2 * attended if shape.linear else attended
    yield f"{block}attn_q.weight", (queries, shape.hidden), "q4_k"
    yield f"{block}attn_k.weight", (kv, shape.hidden), "q4_k"
    yield f"{block}attn_v.weight", (kv, shape.hidden), sensitive
    yield f"{block}attn_output.weight", (shape.hidden, attended), "q4_k"
    for norm in ("attn_q_norm", "attn_k_norm"):
        yield f"{block}{norm}.weight", (shape.head_dim,), "one"


def _linear(shape: Shape, block: str, num_keys: int, num_values: int) -> Iterator[Tensor]:
    values = num_values * LINEAR_DIM
    mixed = 2 * num_keys * LINEAR_DIM + values
    yield f"{block}attn_qkv.weight", (mixed, shape.hidden), "q5_k"
    yield f"{block}attn_gate.weight", (values, shape.hidden), "q4_k"
    yield f"{block}ssm_conv1d.weight", (mixed, CONVOLVED), "tap"
    yield f"{block}ssm_dt.bias", (num_values,), "zero"
    yield f"{block}ssm_a", (num_values,), "rate"
    for one in ("ssm_beta", "ssm_alpha"):
        yield f"{block}{one}.weight", (num_values, shape.hidden), "q4_k"
    yield f"{block}ssm_norm.weight", (LINEAR_DIM,), "one"
    yield f"{block}ssm_out.weight", (shape.hidden, values), "q4_k"


def _rest(shape: Shape, block: str, sensitive: str) -> Iterator[Tensor]:
    second = "post_attention_norm" if shape.linear else "ffn_norm"
    for norm in ("attn_norm", second):
        yield f"{block}{norm}.weight", (shape.hidden,), "one"
    for one in ("ffn_gate", "ffn_up"):
        yield f"{block}{one}.weight", (shape.ffn, shape.hidden), "q4_k"
    yield f"{block}ffn_down.weight", (shape.hidden, shape.ffn), sensitive


def _metadata(shape: Shape, name: str) -> dict[str, Value]:
    arch = "qwen35" if shape.linear else "qwen3"
    sizes: dict[str, Value] = {
        "vocab_size": shape.vocab,
        "context_length": 4096,
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
    general: dict[str, Value] = {"general.architecture": arch, "general.name": name}
    general |= {"general.file_type": MOSTLY_Q4_K_M, "general.quantization_version": 2}
    return general | {f"{arch}.{key}": value for key, value in sizes.items()} | _words(shape.vocab)


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
