"""Scratch memory of Triton operators: one allocation, carved by shape.

Its contents are valid within one call of an operator, and calls on one stream follow each other, so
all operators of a stream share the same bytes; another stream needs a workspace of its own. A
captured graph stores the addresses that it saw: before the capture, `reserve` the memory of its
largest call, or run the calls once. A workspace that grows retains its older memory, so earlier
captures stay valid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

# A shape and a dtype.
Part: TypeAlias = tuple[tuple[int, ...], torch.dtype]

# Positions of a context that one program attends to; results are merged in the order of parts.
PART = 256
# Limits of the rows that attend at once, and of the bytes of their parts.
_MOST_ROWS, _MOST_OF_PARTS = 64, 128 << 20

# Views start at multiples of this many bytes, which is what wide loads need.
_ALIGNMENT = 256
_LEAST = 1 << 20


class Workspace:
    """Memory on one device for the calls of one stream."""

    __slots__ = ("_bytes", "_device", "_kept", "_views")

    def __init__(self, device: torch.device, num_bytes: int = 0) -> None:
        self._device = device
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)
        self._kept: list[Tensor] = []
        self._views: dict[tuple[Part, ...], list[Tensor]] = {}
        self.reserve(num_bytes)

    def reserve(self, num_bytes: int) -> None:
        """Allocate `num_bytes` unless there are as many. Must not be called within a capture."""
        if num_bytes <= self._bytes.nbytes:
            return
        if self._device.type == "cuda":
            assert not torch.cuda.is_current_stream_capturing(), "reserve before the capture"
        self._kept.append(self._bytes)
        size = max(_LEAST, 1 << (num_bytes - 1).bit_length())
        self._bytes = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._views.clear()

    def carve(self, *parts: Part) -> list[Tensor]:
        """Tensors of these shapes and dtypes, one after another, with undefined contents."""
        views = self._views.get(parts)
        if views is None:
            self.reserve(bytes_of(parts))
            views = self._views[parts] = self._cut(parts)
        return views

    def _cut(self, parts: Sequence[Part]) -> list[Tensor]:
        views: list[Tensor] = []
        start = 0
        for shape, dtype in parts:
            size = math.prod(shape) * dtype.itemsize
            views.append(self._bytes[start : start + size].view(dtype).view(shape))
            start += _aligned(size)
        return views


def attention_scratch(
    num_rows: int, num_heads: int, head_dim: int, num_parts: int
) -> tuple[Part, Part, Part]:
    """Parts for the maximum, the sum and the mixed values of each part of a context, for as many of
    `num_rows` rows as attend at once. The number of parts is rounded up to a power of two, so that
    growth is rare."""
    num_parts = 1 << (num_parts - 1).bit_length()
    at_once = _MOST_OF_PARTS // (num_heads * num_parts * (head_dim + 2) * 4)
    shape = (max(1, min(num_rows, _MOST_ROWS, at_once)), num_heads, num_parts)
    return (shape, torch.float32), (shape, torch.float32), ((*shape, head_dim), torch.float32)


def workspace_bytes(parts: Sequence[Part]) -> int:
    """The largest size of a workspace that has grown to hold `parts`."""
    return 2 * max(_LEAST, 1 << (bytes_of(parts) - 1).bit_length())


def bytes_of(parts: Sequence[Part]) -> int:
    """Bytes of a workspace that `parts` take."""
    return sum(_aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in parts)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
