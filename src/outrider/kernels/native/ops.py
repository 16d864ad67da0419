"""Native CPU kernels as Python callables: each call only passes raw pointers through ctypes.

Signatures are set once, the team of threads is started once, and a plan's pointers are reused while
the plan stays the same (every layer of a pass). Calls release the interpreter lock; kernels on one
team take turns. See csrc/ for the arithmetic.

Shapes:  N = packed tokens, I = inputs, O = outputs, E = packed query, key and value heads,
         D = head size or hidden size, F = feed-forward size, T = positions, H = head size / 2,
         G = key/value heads, S = slots, M = logits rows, V = vocabulary.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from ctypes import Structure, c_double, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.errors import ContractError, given
from outrider.kernels.native import huge_pages
from outrider.kernels.native.cpu import DOTS, ENDINGS, TILES, VECTORS, pinned_threads
from outrider.kernels.plan import (
    AttentionKind,
    BlockRows,
    Linear,
    PackedLinear,
    PackedPlan,
    PackedTable,
    head_dim_of,
)
from outrider.kernels.reference.linear import BITS, GROUP, HEAD_BITS, in_parts, num_groups

# In the order of csrc/forward.cpp.
SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
# Output columns of a block and bytes of a column's inputs in a step (csrc/tiles_blocks.h).
TILE_BLOCK, TILE_BYTES = 32, 64
# Inputs of a column in a step.
_STEPS = {VECTORS: 1, DOTS: 2, TILES: TILE_BYTES // 2}


def struct_fields(*groups: tuple[type, str]) -> list[tuple[str, type]]:
    """The fields of a `Structure`, from groups in order: a type and the names of its fields."""
    return [(name, kind) for kind, names in groups for name in names.split()]


class PassStruct(Structure):
    """A pass as native code reads it (csrc/pass.h)."""

    _fields_ = struct_fields(
        (c_void_p, "team"),
        (c_int64, "head_stride slot_stride"),
        (
            c_int32,
            "row_size num_heads num_kv_heads head_dim page_size num_tokens num_page_columns unused",
        ),
        (c_void_p, "positions slots seq visible pages extra_offsets extra_slots"),
    )


class LookStruct(Structure):
    """The attention of a layer (csrc/pass.h)."""

    _fields_ = struct_fields(
        (c_float, "scale cap"), (c_int32, "window unused"), (c_void_p, "sinks")
    )

    @classmethod
    def of(cls, how: AttentionKind | float) -> LookStruct:
        """The struct of `how`, whose tensors must live as long as native code reads them."""
        kind = AttentionKind.of(how)
        return cls(kind.scale, kind.cap, kind.window, 0, pointer(kind.sinks_H))


class LinearStruct(Structure):
    """A packed matrix and the function that multiplies by it (csrc/linears.h)."""

    _fields_ = struct_fields((c_void_p, "call weights bias"))

    @classmethod
    def of(cls, packed: PackedLinear, bias_O: Tensor | None) -> LinearStruct:
        return cls(packed.call, packed.pointer, pointer(bias_O))


class WeightsStruct(Structure):
    """A matrix as a linear reads it (csrc/linear.cpp, csrc/quantised.cpp)."""

    _fields_ = struct_fields((c_void_p, "team packed"), (c_int32, "num_in num_out"))


_TYPES = {"p": c_void_p, "i": c_int, "l": c_int64, "u": c_uint64, "f": c_float, "d": c_double}
# For each function of csrc/, the types of its arguments and, after a colon, of its result.
_SIGNATURES = {
    "argmax": "pppil",
    "attention": "pppppp",
    "choose": "p:i",
    "delta": "pppiiip",
    "drafts": "p:i",
    "forward": "ppppip:i",
    "gelu": "pppii",
    "gelu_mul": "pppii",
    "grouped_bytes": "iii:l",
    "grouped_rows": "pppi",
    "grow_tree": "pppl:i",
    "head_drafts": "p:i",
    "head_norm": "ppppfiiii",
    "judge": "p:i",
    "keep_likely": "ppddil",
    "lane_team": "p",
    "latent_queries": "ppppil",
    "latent_values": "pppi",
    "layer_norm": "ppppfpii",
    "leftover": "pppldpl:d",
    "linear": "pppii",
    "lookup_close": "pl",
    "lookup_free": "p",
    "lookup_offer": "pliiip:i",
    "lookup_open": "pll",
    "mixture": "pppi",
    "ngram": "p:p",
    "pack": "pppii",
    "pack_grouped": "pippppii",
    "peak": "pil:l",
    "pick": "ppdl:l",
    "quantise": "pipipii",
    "race": "ppuuul:l",
    "rank": "ppilifpp:i",
    "ranks": "piid:p",
    "ranks_bytes": "i:l",
    "ranks_end": "p",
    "ranks_follow": "pppp:l",
    "ranks_put": "pipld:l",
    "ranks_receive": "pipl:i",
    "ranks_send": "pipl:i",
    "ranks_sum": "ppl:i",
    "ranks_take": "pipld:l",
    "ranks_tell": "ppl:i",
    "ranks_turn": "pi",
    "rms_norm": "pppfpii",
    "rope_append": "pppppp",
    "round": "p:i",
    "sigmoid_mul": "pppii",
    "silu_mul": "pppii",
    "soft_cap": "ppfii",
    "softmax": "ppfpil",
    "stream": "ppli:u",
    "suffix": "p:p",
    "suffix_forget": "p",
    "suffix_learn": "ppl",
    "suffix_states": "p:l",
    "team": "ip:p",
    "top_k": "pplpil",
    "tree_drafts": "p:i",
    "write_blocks": "p:i",
}


def function(library: ctypes.CDLL, op: str, suffix: str = "") -> Callable[..., Any]:
    native = library[f"outrider_{op}{suffix}"]
    arguments, _, result = _SIGNATURES[op].partition(":")
    native.argtypes = [_TYPES[code] for code in arguments]
    native.restype = _TYPES[result] if result else None
    return native


def address(native: Callable[..., None]) -> int:
    """The address of the machine code of `native`."""
    found = ctypes.cast(native, c_void_p).value  # pyright: ignore[reportArgumentType]
    return given(found, "function")


@functools.cache
def team(library: ctypes.CDLL, num_threads: int) -> int:
    """The address of the team of this size, which all models of the process share."""
    pinned = pinned_threads(num_threads)
    cpus = (c_int * len(pinned))(*pinned) if pinned else None
    return function(library, "team")(num_threads, cpus)


@functools.cache
def _lane_team(library: ctypes.CDLL, number: int, num_threads: int) -> int:
    """A lane's team. Not pinned: teams of two lanes would be pinned to the same cores."""
    del number
    return function(library, "team")(num_threads, None)


def join_lane(library: ctypes.CDLL, number: int, num_threads: int) -> None:
    """Make the team of lane `number` run the native calls of this thread from now on."""
    function(library, "lane_team")(_lane_team(library, number, num_threads))


class NativeLinear:
    """The linears of one precision and kind."""

    def __init__(self, library: ctypes.CDLL, num_threads: int, precision: str, kind: str) -> None:
        self.team = team(library, num_threads)
        self._block: int = TILE_BLOCK if kind == TILES else library.outrider_block()
        self._linear = function(library, "linear", f"_{precision}{ENDINGS[kind]}")
        self._linear_address = address(self._linear)

    def linear(
        self, x_NI: Tensor, packed: PackedLinear, out_NO: Tensor, accumulate: bool = False
    ) -> None:
        num_rows, num_in = x_NI.shape
        if num_in != packed.num_in:
            raise ContractError("input and weight are of different widths")
        self._linear(packed.pointer, x_NI.data_ptr(), out_NO.data_ptr(), num_rows, accumulate)

    def packed(self, weight_OI: Tensor, data: Tensor) -> PackedLinear:
        """A packed matrix whose `data` is `weight_OI` in the native function's layout."""
        if weight_OI.device.type != "cpu":
            raise ContractError("native kernels read weights on the CPU")
        num_out, num_in = weight_OI.shape
        weights = WeightsStruct(self.team, data.data_ptr(), num_in, num_out)
        pointer, call = ctypes.addressof(weights), self._linear_address
        return PackedLinear(num_out, num_in, data, pointer, weights, call=call)


class NativeOps(NativeLinear):
    """One model's kernels for weights and arena of `dtype`. Tensors are contiguous, on the CPU.

    Not thread-safe as a whole (it stores the last plan), but two instances may run at once. `kind`
    is the kind of linears, which `refused_kinds` must allow: only bfloat16 has others than VECTORS.
    `attention` is that of attention over an arena of `dtype`, VECTORS or TILES; None is TILES with
    linears on tiles.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        dtype: torch.dtype,
        num_threads: int,
        *,
        kind: str = VECTORS,
        attention: str | None = None,
    ) -> None:
        if kind != VECTORS and dtype != torch.bfloat16:
            raise ContractError("only bfloat16 has other kinds than vectors")
        super().__init__(library, num_threads, SUFFIXES[dtype], kind)
        suffix = f"_{SUFFIXES[dtype]}"
        self._dtype, self._step = dtype, _STEPS[kind]
        self._pack = function(library, "pack", suffix + ENDINGS[kind])
        # By the dtype of the arena: that of the weights, or int8.
        on_tiles = (attention or kind) == TILES
        ending = ENDINGS[TILES] if on_tiles else ""
        self._over = {
            kind: (function(library, "rope_append", own), function(library, "attention", own + end))
            for kind, own, end in ((dtype, suffix, ending), (torch.int8, "_int8", ""))
        }
        self._rms_norm = function(library, "rms_norm")
        self._layer_norm = function(library, "layer_norm")
        self._head_norm = function(library, "head_norm")
        self.silu_mul, self.sigmoid_mul, self.gelu, self.gelu_mul = (
            self._by_row(function(library, op))
            for op in ("silu_mul", "sigmoid_mul", "gelu", "gelu_mul")
        )
        self._soft_cap = function(library, "soft_cap")
        self._argmax = function(library, "argmax")
        self._plan: PackedPlan | None = None
        self._shape: tuple[int, ...] = ()
        self._pass = PassStruct()
        self._pass_address = ctypes.addressof(self._pass)

    def pack(self, weight_OI: Tensor) -> PackedLinear:
        if weight_OI.dtype != self._dtype:
            raise ContractError("the weight is of another dtype than the kernels")
        weight_OI = weight_OI.detach().contiguous()
        num_out, num_in = weight_OI.shape
        padded_out = -(-num_out // self._block) * self._block
        padded_in = -(-num_in // self._step) * self._step
        data = huge_pages.empty(padded_out * padded_in, dtype=self._dtype)
        packed = self.packed(weight_OI, data)
        self._pack(self.team, weight_OI.data_ptr(), data.data_ptr(), num_out, num_in)
        return packed

    def rms_norm(self, x_ND: Tensor, weight_D: Tensor, eps: float, out_ND: Tensor) -> None:
        num_rows, size = x_ND.shape
        self._rms_norm(
            self.team, x_ND.data_ptr(), weight_D.data_ptr(), eps, out_ND.data_ptr(), num_rows, size
        )

    def layer_norm(
        self, x_ND: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float, out_ND: Tensor
    ) -> None:
        num_rows, size = x_ND.shape
        x, weight, bias = x_ND.data_ptr(), weight_D.data_ptr(), bias_D.data_ptr()
        self._layer_norm(self.team, x, weight, bias, eps, out_ND.data_ptr(), num_rows, size)

    def head_norm(
        self, qkv_NE: Tensor, q_weight_D: Tensor, k_weight_D: Tensor, num_kv_heads: int, eps: float
    ) -> None:
        num_rows, row_size = qkv_NE.shape
        dim = q_weight_D.shape[0]
        qkv, q, k = qkv_NE.data_ptr(), q_weight_D.data_ptr(), k_weight_D.data_ptr()
        num_heads = row_size // dim - 2 * num_kv_heads
        self._head_norm(self.team, qkv, q, k, eps, num_rows, num_heads, num_kv_heads, dim)

    def _by_row(self, native: Callable[..., None]) -> Callable[[Tensor, Tensor], None]:
        """An operator that reads a tensor and writes another one row by row."""

        def run(x: Tensor, out_NF: Tensor) -> None:
            native(self.team, x.data_ptr(), out_NF.data_ptr(), *out_NF.shape)

        return run

    def soft_cap(self, x_NF: Tensor, cap: float) -> None:
        num_rows, size = x_NF.shape
        self._soft_cap(self.team, x_NF.data_ptr(), cap, num_rows, size)

    def argmax(self, logits_MV: Tensor) -> list[int]:
        num_rows, vocab_size = logits_MV.shape
        chosen = (c_int64 * num_rows)()
        self._argmax(
            self.team, logits_MV.data_ptr(), ctypes.addressof(chosen), num_rows, vocab_size
        )
        return chosen[:]

    def rope_append(
        self,
        qkv_NE: Tensor,
        cos_TH: Tensor,
        sin_TH: Tensor,
        plan: PackedPlan,
        k_GSD: Tensor,
        v_GSD: Tensor,
    ) -> None:
        self._describe_rows(plan, qkv_NE, k_GSD)
        rope_append, _ = self._over[k_GSD.dtype]
        rope_append(
            self._pass_address,
            qkv_NE.data_ptr(),
            cos_TH.data_ptr(),
            sin_TH.data_ptr(),
            k_GSD.data_ptr(),
            v_GSD.data_ptr(),
        )

    def attention(
        self,
        qkv_NE: Tensor,
        k_GSD: Tensor,
        v_GSD: Tensor,
        plan: PackedPlan,
        how: AttentionKind | float,
        out_NO: Tensor,
    ) -> None:
        self._describe_rows(plan, qkv_NE, k_GSD)
        look, (_, attention) = LookStruct.of(how), self._over[k_GSD.dtype]
        attention(
            self._pass_address,
            qkv_NE.data_ptr(),
            k_GSD.data_ptr(),
            v_GSD.data_ptr(),
            ctypes.addressof(look),
            out_NO.data_ptr(),
        )

    def _describe_rows(self, plan: PackedPlan, qkv_NE: Tensor, k_GSD: Tensor) -> None:
        if qkv_NE.shape[0] != plan.num_tokens:
            raise ContractError("the plan is of another number of tokens")
        self.describe(plan, qkv_NE.shape[1], k_GSD)

    def describe(self, plan: PackedPlan, row_size: int, k_GSD: Tensor) -> int:
        """The address of a PassStruct of `plan`, valid until the next call. `row_size` is the size
        of fused queries, keys and values."""
        shape = (row_size, *k_GSD.shape, *k_GSD.stride())
        if plan is self._plan and shape == self._shape:
            return self._pass_address
        self._pass = self.blank(row_size, k_GSD, plan.page_size)
        self._pass.num_tokens = plan.num_tokens
        self._pass.num_page_columns = plan.pages_BP.shape[1]
        self._pass.positions = pointer(plan.positions_N)
        self._pass.slots = pointer(plan.slots_N)
        self._pass.seq = pointer(plan.seq_N)
        self._pass.visible = pointer(plan.visible_N)
        self._pass.pages = pointer(plan.pages_BP)
        self._pass.extra_offsets = pointer(plan.extra_offsets_N1)
        self._pass.extra_slots = pointer(plan.extra_slots_E)
        self._pass_address = ctypes.addressof(self._pass)
        self._plan, self._shape = plan, shape
        return self._pass_address

    def blank(self, row_size: int, k_GSD: Tensor, page_size: int) -> PassStruct:
        """A PassStruct without tokens, for rows of this size and an arena like `k_GSD`."""
        num_kv_heads, head_dim = k_GSD.shape[0], head_dim_of(k_GSD)
        head_stride, slot_stride, inner = k_GSD.stride()
        if inner != 1:
            raise ContractError("elements of a row are not adjacent")
        if k_GSD.dtype not in self._over:
            raise ContractError("keys are of another dtype than the kernels")
        return PassStruct(
            self.team,
            head_stride,
            slot_stride,
            row_size,
            row_size // head_dim - 2 * num_kv_heads,
            num_kv_heads,
            head_dim,
            page_size,
        )

    def functions(self, dtype: torch.dtype) -> tuple[int, int]:
        """The addresses of `rope_append` and `attention` over an arena of `dtype`."""
        rope_append, attention = self._over[dtype]
        return address(rope_append), address(attention)


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


# Quantised linears on CPUs: weights of 8 bits in the layout of csrc/quantised.cpp, and blocks of
# GGUF files in the layout of csrc/groups.h. int4 weights are such blocks, made at load.
#
# The kernel of 8 bits reads blocks of B outputs, with the bytes of four inputs of an output next to
# each other: for each block B float32 scales, then [I / 4][B][4] bytes, each 128 more than the
# value. Tiles read the same layout with B = 32 on every CPU; zero bytes fill the last 64 inputs.
# Blocks of files keep their values, with codes, scales and minimums in another order;
# csrc/groups_add.h has the sums.
#
# Shapes:  O = outputs, I = inputs, P = blocks, B = outputs of a block, S = steps of four inputs,
#          Y = bytes of a block, N = rows.
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
    _fields_ = struct_fields(
        (c_void_p, "packed"), (c_int32, "type first_out num_out"), (c_float, "factor")
    )


class _Grouped(Structure):
    _fields_ = [
        *struct_fields((c_void_p, "team"), (c_int32, "num_in num_out num_parts on_tiles")),
        ("parts", _Rows * MOST_PARTS),
    ]


class NativeGrouped(NativeLinear):
    """`pack` and `linear` of blocks. Activations are contiguous float32, on the CPU.

    With TILES as `kind`, which `refused_kinds` must allow, more than a few rows are multiplied on
    tiles; the layout and all bits are those of VECTORS.
    """

    def __init__(self, library: ctypes.CDLL, num_threads: int, *, kind: str = VECTORS) -> None:
        super().__init__(library, num_threads, "grouped", VECTORS)
        self._on_tiles = kind == TILES
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
        packed = huge_pages.packed(parts)
        data = huge_pages.empty(end, dtype=torch.uint8) if packed is None else packed
        num_in, num_out = parts[0].num_in, sum(one.num_out for one in parts)
        grouped = _Grouped(self.team, num_in, num_out, len(parts), self._on_tiles)
        if any(one.num_in != num_in for one in parts):
            raise ContractError("the parts of a matrix are of different widths")
        first_out = 0
        for index, (one, start) in enumerate(zip(parts, starts, strict=True)):
            to, book = data.data_ptr() + start, one.codebook_EV
            if packed is None:
                order = None if one.order_O is None else one.order_O.to(torch.int32).contiguous()
                rows = None if order is None else order.data_ptr()
                raw, values = one.raw.ctypes.data, None if book is None else book.ctypes.data
                self._pack(self.team, one.kind, raw, rows, values, to, one.num_out, one.num_in)
            grouped.parts[index] = _Rows(to, one.kind, first_out, one.num_out, one.factor)
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


def first_outputs(packed: PackedLinear, count: int) -> PackedLinear | None:
    """The matrix of the first `count` outputs in the memory of `packed`; None if other kernels than
    these packed it."""
    whole = packed.descriptor
    if isinstance(whole, WeightsStruct):
        part = WeightsStruct(whole.team, whole.packed, whole.num_in, count)
    elif isinstance(whole, _Grouped):
        part = _Grouped.from_buffer_copy(whole)
        part.num_out = count
        parts = [part.parts[index] for index in range(whole.num_parts)]
        part.num_parts = sum(rows.first_out < count for rows in parts)
        for rows in parts:
            rows.num_out = min(rows.num_out, max(count - rows.first_out, 0))
    else:
        return None
    return replace(packed, num_out=count, pointer=ctypes.addressof(part), descriptor=part)


class NativeInt4:
    """Matrices of 4 bits and an output head of 8, as reference/linear.py defines them."""

    scheme = "int4"

    def __init__(self, library: ctypes.CDLL, num_threads: int, *, kind: str = VECTORS) -> None:
        self._blocks = NativeGrouped(library, num_threads, kind=kind)
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
        """The blocks of reference/linear.py, bit for bit."""
        num_out, num_in = weight_OI.shape
        weight_OI = weight_OI.detach().cpu().contiguous()
        weight_OI = weight_OI if weight_OI.dtype in SUFFIXES else weight_OI.float()
        blocks = np.empty(num_out * -(-num_in // GROUP) * _BLOCK_BYTES[bits], np.uint8)
        dtype, at = list(SUFFIXES).index(weight_OI.dtype), weight_OI.data_ptr()
        self._quantise(self._blocks.team, dtype, at, bits, blocks.ctypes.data, num_out, num_in)
        return blocks
