"""Attention metadata of a packed pass: where each token reads and writes in the KV cache.

A token at logical position t attends to exactly t + 1 keys, its own included, in logical order. The
first `visible_N[n]` are in the sequence's pages at positions 0, 1, 2, ...; a tree node whose
ancestors are not a contiguous run lists the slots of the rest in `extra`. A kernel's arithmetic for
a token may depend only on those keys in that order: not on the number of packed tokens, on other
sequences of the batch, or on pages. So a verify pass of K + 1 tokens has the bits of K + 1 passes
of one.

Shapes:  N = packed tokens, B = sequences in the pass, P = page-table columns, E = extra keys,
         H = query heads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.early import Origin
from outrider.core.spec import KV_GROUP as GROUP


def sent(host: Tensor, device: torch.device) -> Tensor:
    """A copy of `host` on `device`. The copy uses pinned memory: one from pageable memory would
    wait for all work of a CUDA device, such as a running round."""
    is_cuda = device.type == "cuda"
    return (host.pin_memory() if is_cuda else host).to(device, non_blocking=is_cuda)


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """The plan of a pass. Tensors are int32 and contiguous, on the arena's device.

    `pages_BP` holds each sequence's page numbers (unused columns are 0); the slot of logical
    position t is `pages[t // page_size] * page_size + t % page_size`. `extra_offsets_N1` and
    `extra_slots_E` are None when every token of the pass lies on a chain.
    """

    page_size: int
    tokens_N: Tensor
    positions_N: Tensor
    slots_N: Tensor
    seq_N: Tensor
    visible_N: Tensor
    pages_BP: Tensor
    extra_offsets_N1: Tensor | None = None
    extra_slots_E: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.tokens_N.shape[0]


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """The attention of a layer that is more than a softmax over all keys.

    Products are multiplied by `scale`. A token sees the last `window` of its keys, itself included;
    0 means all. A score s becomes `cap` * tanh(s / `cap`); a cap of 0 means none. `sinks_H`,
    float32, has a score for each query head that takes a share of its softmax but has no value.
    """

    scale: float
    window: int = 0
    cap: float = 0.0
    sinks_H: Tensor | None = None

    @classmethod
    def of(cls, how: AttentionKind | float) -> AttentionKind:
        """An AttentionKind for `how`; a number is a plain softmax's scale."""
        return how if isinstance(how, AttentionKind) else cls(how)


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Rows of a matrix as a GGUF file stores them: `raw` has blocks of type number `kind`, row by
    row. Output o is row `order_O[o]`, or row o if there is no order. `codebook_EV` has the groups
    of V numbers to which the blocks of some types refer, a byte for each number. All numbers are
    multiplied by `factor`. `stored_at` is the key of a file and the first byte there, if rows are
    in one."""

    raw: NDArray[np.uint8]
    kind: int
    num_out: int
    num_in: int
    order_O: Tensor | None = None
    codebook_EV: NDArray[np.uint8] | None = None
    factor: float = 1.0
    stored_at: tuple[str, int] | None = None

    def in_order(self, order_O: Tensor) -> BlockRows:
        """The same rows with their outputs in another order."""
        own = self.order_O
        return replace(self, order_O=order_O if own is None else own[order_O])

    @property
    def origin(self) -> Origin | None:
        if self.stored_at is None:
            return None
        order = b"" if self.order_O is None else self.order_O.to(torch.int32).numpy().tobytes()
        return *self.stored_at, order


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight matrix made by a `pack`; only the `linear` chosen with it can read it.

    `pointer` is the address of `descriptor`, which describes `data` to the native kernel. `tile` is
    the number of rows in one call of the reference; None means all rows. `scales` are those of
    quantised weights that are not within `data`. `call` is the address of the native function that
    multiplies by the matrix, 0 if there is none.
    """

    num_out: int
    num_in: int
    data: Tensor
    pointer: int = 0
    descriptor: ctypes.Structure | None = None
    tile: int | None = None
    scales: Tensor | None = None
    call: int = 0

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)


class Linear(Protocol):
    """out_NO (+)= x_NI W^T by a packed W."""

    def __call__(
        self, x_NI: Tensor, packed: PackedLinear, out_NO: Tensor, accumulate: bool = False
    ) -> None: ...


@dataclass(frozen=True)
class PackedTable:
    """The embeddings of all tokens as a packed matrix, which may be the output head as well.

    `read` writes rows of it as float32; `lookup` is the address of the native function that does.
    `dtype` is the dtype of the other weights and of copies of the table.
    """

    packed: PackedLinear
    read: Callable[[Tensor, Tensor], None]
    lookup: int
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.num_out, self.packed.num_in

    def floats(self) -> Tensor:
        """The whole table as numbers, [V, D]."""
        out_VD = torch.empty(self.shape)
        self.read(torch.arange(self.shape[0]), out_VD)
        return out_VD.to(self.dtype)

    @cached_property
    def kept(self) -> Tensor:
        """The result of `floats`, made once and shared by all its users."""
        return self.floats()


# Rows of keys and values in an arena: floats, or integers of 8 bits (`--kv-dtype int8`).
#
# A row of integers has the numbers of GGUF's format Q8_0, with all codes before the scales: D bytes
# of -127 to 127, then a float16 for each 32 of them, so D + D / 16 bytes. A number is its code
# times its scale. A row's bytes depend on that row alone, so speculation changes no text.
#
# Shapes:  D = head size, R = bytes of a row.
LARGEST = 127


def row_size(head_dim: int, dtype: torch.dtype) -> int:
    """Number of elements of a stored row. For integers, `head_dim` is a multiple of 32."""
    return head_dim + head_dim // GROUP * 2 if dtype == torch.int8 else head_dim


def head_dim_of(rows: Tensor) -> int:
    """The head size D of rows of any shape [..., R]."""
    size = rows.shape[-1]
    return size * GROUP // (GROUP + 2) if rows.dtype == torch.int8 else size


def same_memory(k_GSD: Tensor, v_GSD: Tensor) -> bool:
    """True if a layer's values are its keys (`ModelSpec.values_in_keys`)."""
    return k_GSD.data_ptr() == v_GSD.data_ptr()


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Floats [..., D] as an arena of `dtype` has them, [..., R]."""
    if dtype != torch.int8:
        return x.to(dtype)
    groups = x.float().reshape(*x.shape[:-1], -1, GROUP)
    # A number that is not finite makes its whole group NaN.
    scale = groups.abs().amax(-1, keepdim=True) / LARGEST + (groups * 0).sum(-1, keepdim=True)
    half = scale.half()
    kept = half.float()
    inverse = torch.where(kept > 0, 1 / kept, 0.0)
    codes = (groups * inverse).nan_to_num(0.0).clamp(-LARGEST, LARGEST).round().to(torch.int8)
    return torch.cat([codes.flatten(-2), half.squeeze(-1).view(torch.int8)], dim=-1)


def floats(rows: Tensor) -> Tensor:
    """Stored rows as float32, [..., D]."""
    if rows.dtype != torch.int8:
        return rows.float()
    head_dim = head_dim_of(rows)
    scales = rows[..., head_dim:].contiguous().view(torch.float16).float()
    codes = rows[..., :head_dim].reshape(*rows.shape[:-1], -1, GROUP)
    return (codes * scales[..., None]).flatten(-2)
