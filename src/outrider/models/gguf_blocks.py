"""The number formats of GGUF that are written here: f32, f16, bf16, and blocks in 8 or 4 bits.

A block is 32 neighbours of a row with one scale d, a float16 before their integers q:

    q8_0:  d = max |x| / 127,  q = x / d rounded, halves away from zero;  x is about d q
    q4_0:  d = m / -8, where m is the first x of largest size,  q = floor(x / d + 8.5) up to 15;
           x is about d (q - 8); byte j of a block holds q[j] below and q[j + 16] above

Norms and biases stay f32, as llama.cpp wants them. The scale is rounded to float16 only when it is
stored: the integers are of the exact one.

Shapes:  O = rows, I = columns, N = blocks, B = 32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from outrider.core.errors import CheckpointError, ContractError

BLOCK = 32
# Values that are converted at once, so that a large table needs little memory beside itself.
_MAX_VALUES = 1 << 21


@dataclass(frozen=True, slots=True)
class Format:
    """`type_id` is a tensor's type in the file, `file_type` that of a file mostly made of it;
    `block` values take `block_bytes`. `encode` gives the bytes of rows of float32."""

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
