"""Quantised linears on CPUs: weights of 8 bits in the layout of csrc/quantised.cpp, and blocks of
GGUF files in the layout of csrc/groups.h. int4 weights are such blocks, made at load.

The kernel of 8 bits reads blocks of B outputs, with the bytes of four inputs of an output next to
each other: for each block B float32 scales, then [I / 4][B][4] bytes, each 128 more than the value.
Tiles read the same layout with B = 32 on every CPU; zero bytes fill the last 64 inputs. Blocks of
files keep their values, with codes, scales and minimums in another order; csrc/groups_add.h has the
sums.

Shapes:  O = outputs, I = inputs, P = blocks, B = outputs of a block, S = steps of four inputs,
         Y = bytes of a block, N = rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_int32, c_void_p

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.errors import ContractError, given
from outrider.kernels.native import huge_pages
from outrider.kernels.native.cpu import TILES, VECTORS
from outrider.kernels.native.ops import (
    SUFFIXES,
    TILE_BYTES,
    NativeLinear,
    address,
    function,
    struct_fields,
)
from outrider.kernels.plan import BlockRows, Linear, PackedLinear, PackedTable
from outrider.kernels.reference.grouped import BITS, HEAD_BITS
from outrider.kernels.reference.linear import GROUP, in_parts, num_groups


class NativeInt8(NativeLinear):
    """`pack` and `linear` of 8-bit weights. Activations are contiguous float32, on the CPU.

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


# As in csrc/groups.h.
MOST_PARTS = 8
# Parts begin at a cache line.
_ALIGNMENT = 64
# GGUF's numbers of the types of 4 and 8 bits, Q4_1 and Q8_0.
_KINDS = {4: 3, 8: 8}
_BLOCK_BYTES = {4: 20, 8: 34}


class _Rows(Structure):
    _fields_ = struct_fields((c_void_p, "packed"), (c_int32, "type first_out num_out unused"))


class _Grouped(Structure):
    _fields_ = [
        *struct_fields((c_void_p, "team"), (c_int32, "num_in num_out num_parts unused")),
        ("parts", _Rows * MOST_PARTS),
    ]


class NativeGrouped(NativeLinear):
    """`pack` and `linear` of blocks. Activations are contiguous float32, on the CPU."""

    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        super().__init__(library, num_threads, "grouped", VECTORS)
        self._bytes = function(library, "grouped_bytes")
        self._pack = function(library, "pack_grouped")
        self._rows = function(library, "grouped_rows")

    def pack(self, parts: Sequence[BlockRows]) -> PackedLinear | None:
        """One matrix from the rows of all parts; None for too many parts or an unknown type."""
        if len(parts) > MOST_PARTS or not all(self._size(one, num_out=1) for one in parts):
            return None
        starts, end = list[int](), 0
        for one in parts:
            starts.append(end)
            end += -(-self._size(one) // _ALIGNMENT) * _ALIGNMENT
        data = huge_pages.empty(end, dtype=torch.uint8)
        num_in, num_out = parts[0].num_in, sum(one.num_out for one in parts)
        grouped = _Grouped(self.team, num_in, num_out, len(parts))
        first_out = 0
        for index, (one, start) in enumerate(zip(parts, starts, strict=True)):
            if one.num_in != num_in:
                raise ContractError("the parts of a matrix are of different widths")
            to, order = data.data_ptr() + start, one.order_O
            order = None if order is None else order.to(torch.int32).contiguous()
            rows = None if order is None else order.data_ptr()
            self._pack(self.team, one.kind, one.raw.ctypes.data, rows, to, one.num_out, one.num_in)
            grouped.parts[index] = _Rows(to, one.kind, first_out, one.num_out)
            first_out += one.num_out
        pointer, call = ctypes.addressof(grouped), self._linear_address
        return PackedLinear(num_out, num_in, data, pointer, grouped, call=call)

    def with_plain(self, plain: Linear) -> Linear:
        """A linear for matrices packed here and for those that `plain` reads."""

        def linear(
            x_NI: Tensor, packed: PackedLinear, out_NO: Tensor, accumulate: bool = False
        ) -> None:
            own = self.linear if packed.call == self._linear_address else plain
            own(x_NI, packed, out_NO, accumulate)

        return linear

    def table(self, packed: PackedLinear, dtype: torch.dtype) -> PackedTable:
        """The outputs of a packed matrix as the rows of a table of tokens."""

        def read(rows_N: Tensor, out_NI: Tensor) -> None:
            if len(rows_N) and not 0 <= int(rows_N.min()) <= int(rows_N.max()) < packed.num_out:
                raise IndexError("a row is not in the table")
            rows_N = rows_N.to(torch.int32).contiguous()
            self._rows(packed.pointer, rows_N.data_ptr(), out_NI.data_ptr(), len(rows_N))

        return PackedTable(packed, read, address(self._rows), dtype)

    def _size(self, one: BlockRows, num_out: int | None = None) -> int:
        """Bytes of the part's outputs when packed; 0 for an unknown type of blocks."""
        size: int = self._bytes(one.kind, num_out or one.num_out, one.num_in)
        return size


class NativeInt4:
    """Matrices of 4 bits and an output head of 8, as reference/grouped.py defines them."""

    scheme = "int4"

    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        self._blocks = NativeGrouped(library, num_threads)
        self._quantise = function(library, "quantise")
        self.linear, self.table = self._blocks.linear, self._blocks.table

    def pack(self, weight_OI: Tensor) -> PackedLinear:
        return self._packed(weight_OI, BITS)

    def pack_head(self, weight_OI: Tensor) -> PackedLinear:
        return self._packed(weight_OI, HEAD_BITS)

    def _packed(self, weight_OI: Tensor, bits: int) -> PackedLinear:
        num_out, num_in = weight_OI.shape
        rows = BlockRows(self.chosen(weight_OI, bits), _KINDS[bits], num_out, num_in)
        return given(self._blocks.pack([rows]), "layout of these blocks")

    def chosen(self, weight_OI: Tensor, bits: int) -> NDArray[np.uint8]:
        """The blocks of reference/quantise.py, bit for bit."""
        num_out, num_in = weight_OI.shape
        weight_OI = weight_OI.detach().cpu().contiguous()
        if weight_OI.dtype not in SUFFIXES:
            weight_OI = weight_OI.float()
        blocks = np.empty(num_out * -(-num_in // GROUP) * _BLOCK_BYTES[bits], np.uint8)
        dtype, at = list(SUFFIXES).index(weight_OI.dtype), weight_OI.data_ptr()
        self._quantise(self._blocks.team, dtype, at, bits, blocks.ctypes.data, num_out, num_in)
        return blocks
