"""The fixed sizes of tiles: pure functions of what a model is, never of how many rows there are.

Tuning at run time would give another machine, or another run, other sums. So each class of shapes
has one size, chosen for sm_90 with these aims: some 100 programs at least, since no product is
split, and some 20 kB of weights on their way to each multiprocessor, which is what hides the
latency of memory.

Shapes:  N = rows of a call, A = query heads, P = parts of the context, D = head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.kernels.triton.launch import cdiv, power_of_two
from outrider.kernels.triton.room import Part

# Rows of every tile: the least that the matrix units of a GPU take, so 1 row costs what 16 do.
ROWS = 16
# Positions of a context that one program attends to; results are merged in the order of parts.
PART = 256


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A tile has `outputs` outputs and goes over the inputs in steps of `inputs`."""

    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


def linear_shape(num_out: int, dtype: torch.dtype) -> LinearShape:
    """`dtype` is that of the packed weight; uint8 holds two values of 4 bits to a byte."""
    outputs = 64 if num_out >= 16_384 else 32 if num_out >= 2_048 else 16
    if dtype == torch.float32:
        return LinearShape(outputs, 32, 4, 3)
    if dtype == torch.int8:
        return LinearShape(outputs, 256, 4, 4)
    return LinearShape(outputs, 256 if dtype == torch.uint8 else 128, 4, 4)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """`shared` query heads read one key head. A tile holds `heads_of_a_tile` of them, a power of
    two, for several tokens; `head_tiles` tiles hold them all. `dims` is the head size padded,
    `keys` how many keys one step takes."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dims: int
    keys: int
    num_stages: int
    part: int = PART

    @property
    def shared(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def heads_of_a_tile(self) -> int:
        return min(ROWS, power_of_two(self.shared))

    @property
    def head_tiles(self) -> int:
        return cdiv(self.shared, self.heads_of_a_tile)

    def tokens_of_a_tile(self, num_tokens: int, num_seqs: int) -> int:
        """As many neighbours as a sequence has on average, a power of two: tokens of one sequence
        read its keys together. A token's bits do not depend on it."""
        average = max(1, num_tokens // max(1, num_seqs))
        return min(ROWS // self.heads_of_a_tile, 1 << (average.bit_length() - 1))

    def room(self, num_rows: int, num_parts: int) -> tuple[Part, Part, Part]:
        """What a call needs: the maximum, the sum and the mixed values of each part."""
        shape = (num_rows, self.num_heads, num_parts)
        return (
            (shape, torch.float32),
            (shape, torch.float32),
            ((*shape, self.head_dim), torch.float32),
        )


def attention_shape(
    *, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> AttentionShape:
    """`dtype` is the arena's."""
    dims = max(16, power_of_two(head_dim))
    keys = (32 if dims <= 64 else 16) if dtype == torch.float32 else 64 if dims <= 128 else 32
    return AttentionShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dims=dims,
        keys=keys,
        num_stages=2 if dtype == torch.float32 else 3,
    )


def delta_columns(value_dim: int) -> int:
    """Of a recurrent state, that one warp holds: 8 of 128 numbers are 32 registers a thread."""
    return min(8, power_of_two(value_dim))


def num_warps(size: int) -> int:
    """For one program that holds a row of `size` numbers."""
    return min(16, max(1, power_of_two(size) // 512))
