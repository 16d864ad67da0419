"""Quantised linears on CPUs: weights of 8 bits in the layout of csrc/quantised.cpp.

The kernel reads blocks of B outputs, the bytes of four inputs of an output side by side: for each
block B float32 scales, then [I / 4][B][4] bytes, each 128 more than the value. Tiles read the same
with B = 32, whatever the CPU; zero bytes fill the last 64 inputs.

Shapes:  O = outputs, I = inputs, P = blocks, B = outputs of a block, S = steps of four inputs,
         Y = bytes of a block.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from outrider.kernels.native import huge_pages
from outrider.kernels.native.cpu import TILES, VECTORS
from outrider.kernels.native.ops import TILE_BYTES, NativeLinear
from outrider.kernels.plan import PackedLinear
from outrider.kernels.reference.linear import GROUP, in_parts, num_groups


class NativeInt8(NativeLinear):
    """`pack` and `linear`. Activations are contiguous float32, on the CPU.

    `kind` is VECTORS or TILES, which `refused_kinds` must allow.
    """

    scheme = "int8"

    def __init__(self, library: ctypes.CDLL, num_threads: int, *, kind: str = VECTORS) -> None:
        super().__init__(library, num_threads, "int8", kind)
        self._step = TILE_BYTES if kind == TILES else GROUP

    def pack(self, weight_OI: Tensor) -> PackedLinear:
        num_out, num_in = weight_OI.shape
        num_blocks, padded_in = -(-num_out // self._block), num_groups(num_in) * GROUP
        padded_in = -(-padded_in // self._step) * self._step
        data_PY = huge_pages.empty(
            num_blocks, self._block * (4 + padded_in), dtype=torch.uint8
        ).zero_()
        packed = self.packed(weight_OI, data_PY)
        for first, values_OI, scale_O in in_parts(weight_OI, self._block):
            part_PY = _blocks(values_OI, scale_O, self._block)
            start = first // self._block
            data_PY[start : start + part_PY.shape[0], : part_PY.shape[1]] = part_PY
        return packed


def _blocks(values_OI: Tensor, scale_O: Tensor, block: int) -> Tensor:
    values_PSB4 = values_OI.view(-1, block, values_OI.shape[1] // 4, 4).transpose(1, 2)
    bytes_PY = values_PSB4.reshape(values_PSB4.shape[0], -1).view(torch.uint8) ^ 128
    return torch.cat([scale_O.view(-1, block).view(torch.uint8), bytes_PY], dim=1)
