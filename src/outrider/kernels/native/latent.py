"""Attention over latents as native calls: the products before and after it (csrc/latent.cpp).

Shapes:  N = tokens, D = hidden size, E = queries, key and value as attention reads them,
         P = outputs of the first product, R = rank of the latent, Q = rank of the queries,
         A = heads x row size, V = heads x value size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_float, c_int32, c_void_p
from dataclasses import dataclass

from torch import Tensor

from outrider.core.spec import LatentShape
from outrider.kernels.native.ops import LinearStruct, function, pointer, struct_fields
from outrider.kernels.plan import PackedLinear


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Matrices and norms of a layer with latent attention, but for its first and last product.
    `keys` has a matrix for each head, from the still part of a query to a latent; `values` from a
    latent to the head's values; `queries` is None if queries come from the residual. `native`, if
    any, makes one call of the products before attention, and one of those after it."""

    shape: LatentShape
    keys: Sequence[PackedLinear]
    values: Sequence[PackedLinear]
    norm_R: Tensor
    query_norm_Q: Tensor | None = None
    queries: PackedLinear | None = None
    native: NativeLatent | None = None

    @property
    def matrices(self) -> tuple[PackedLinear, ...]:
        """The matrices that every token reads."""
        queries = () if self.queries is None else (self.queries,)
        return (*queries, *self.keys, *self.values)


class _Latent(Structure):
    _fields_ = struct_fields(
        (c_void_p, "team query_norm norm"),
        (LinearStruct, "queries"),
        (c_void_p, "keys values"),
        (c_float, "eps"),
        (c_int32, "num_heads rank turning still value_dim query_rank interleaved"),
    )


class NativeLatent:
    """Runs the products of one layer. Owns what native code reads."""

    def __init__(self, library: ctypes.CDLL, team: int, weights: LatentWeights) -> None:
        shape, queries, num_heads = weights.shape, weights.queries, weights.shape.num_heads
        self._weights = weights
        self._keys, self._values = (
            (LinearStruct * num_heads)(*(LinearStruct.of(one, None) for one in heads))
            for heads in (weights.keys, weights.values)
        )
        self._latent = _Latent(
            team,
            pointer(weights.query_norm_Q),
            pointer(weights.norm_R),
            LinearStruct() if queries is None else LinearStruct.of(queries, None),
            ctypes.addressof(self._keys),
            ctypes.addressof(self._values),
            shape.eps,
            num_heads,
            shape.rank,
            shape.turning,
            shape.still,
            shape.value_dim,
            shape.query_rank,
            shape.interleaved,
        )
        self.address = ctypes.addressof(self._latent)
        self._read, self._give = (
            function(library, f"latent_{part}") for part in ("queries", "values")
        )

    def queries(
        self, first: PackedLinear, bias_P: Tensor | None, x_ND: Tensor, qkv_NE: Tensor
    ) -> None:
        """Fill the queries and the key of `qkv_NE` from the normed residual. Tensors are contiguous
        float32 on the CPU."""
        product = LinearStruct.of(first, bias_P)
        at, (num_rows, row_size) = ctypes.addressof(product), qkv_NE.shape
        self._read(self.address, at, x_ND.data_ptr(), qkv_NE.data_ptr(), num_rows, row_size)

    def values(self, attended_NA: Tensor, out_NV: Tensor) -> None:
        """Fill `out_NV` with the values of all heads."""
        at, out = attended_NA.data_ptr(), out_NV.data_ptr()
        self._give(self.address, at, out, len(out_NV))
