"""Quantised linears on CPUs: weights of 8 or 4 bits in the layout of csrc/quantised.cpp.

The kernel reads blocks of B outputs, the bytes of four inputs of an output side by side:

    int8    for each block: B float32 scales; [I / 4][B][4] bytes, each 128 more than the value
    int4    for each block, for each group: B bfloat16 scales; [4][B][4] bytes, each of two values,
            8 more than they are; of eight inputs, the low halves hold the first four

Tiles read the same with B = 32, whatever the CPU; for int8, zero bytes fill the last 64 inputs.

Shapes:  N = rows, I = inputs, O = outputs, P = blocks, B = outputs of a block, G = groups,
         S = steps of four inputs, J = steps of eight inputs in a group, Y = bytes of a block.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from outrider.kernels.native import cpu
from outrider.kernels.native.cpu import TILES, VECTORS
from outrider.kernels.native.ops import TILE_BYTES, NativeLinear
from outrider.kernels.plan import PackedLinear
from outrider.kernels.reference.linear import GROUP, in_parts, num_groups


class NativeQuantised(NativeLinear):
    """`pack` and `linear` of one scheme. Activations are contiguous float32, on the CPU.

    `kind` is VECTORS or TILES, which `refused_kinds` must allow.
    """

    def __init__(
        self, library: ctypes.CDLL, scheme: str, num_threads: int, *, kind: str = VECTORS
    ) -> None:
        super().__init__(library, num_threads, scheme, kind)
        self.scheme = scheme
        self._step = TILE_BYTES if kind == TILES and scheme == "int8" else GROUP

    def pack(self, weight_OI: Tensor) -> PackedLinear:
        num_out, num_in = weight_OI.shape
        num_blocks, groups = -(-num_out // self._block), num_groups(num_in)
        padded_in = -(-groups * GROUP // self._step) * self._step
        size = 4 + padded_in if self.scheme == "int8" else groups * (2 + GROUP // 2)
        data_PY = cpu.empty(num_blocks, self._block * size, dtype=torch.uint8).zero_()
        packed = self.packed(weight_OI, data_PY)
        lay_out = _int8_blocks if self.scheme == "int8" else _int4_blocks
        for first, values_OI, scales in in_parts(weight_OI, self.scheme, self._block):
            part_PY = lay_out(values_OI, scales, self._block)
            start = first // self._block
            data_PY[start : start + part_PY.shape[0], : part_PY.shape[1]] = part_PY
        return packed


def _int8_blocks(values_OI: Tensor, scale_O: Tensor, block: int) -> Tensor:
    values_PSB4 = values_OI.view(-1, block, values_OI.shape[1] // 4, 4).transpose(1, 2)
    bytes_PY = values_PSB4.reshape(values_PSB4.shape[0], -1).view(torch.uint8) ^ 128
    return torch.cat([scale_O.view(-1, block).view(torch.uint8), bytes_PY], dim=1)


def _int4_blocks(values_OI: Tensor, scale_OG: Tensor, block: int) -> Tensor:
    groups = scale_OG.shape[1]
    shape = (-1, block, groups, GROUP // 8, 2, 4)
    low_PBGJ4, high_PBGJ4 = (values_OI + 8).view(torch.uint8).view(shape).unbind(4)
    bytes_PGJB4 = (low_PBGJ4 | high_PBGJ4 << 4).permute(0, 2, 3, 1, 4)
    scale_PGB = scale_OG.to(torch.bfloat16).view(-1, block, groups).transpose(1, 2).contiguous()
    parts = (scale_PGB.view(torch.uint8), bytes_PGJB4.flatten(2))
    return torch.cat(parts, dim=2).flatten(1)
