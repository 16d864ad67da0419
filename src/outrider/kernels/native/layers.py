"""Parts of layers as native calls: recurrences, latent attention and mixtures of experts.

csrc/delta.cpp, csrc/latent.cpp and csrc/mixture.cpp; kernels/reference/delta.py, models/latent.py
and models/ffn.py are the definitions.

Shapes:  N = tokens, D = hidden size, F = an FFN's size, X = scores of a router, P = outputs of a
         layer's first product, O = value heads x value size; E = queries, key and value as
         attention reads them, R = rank of the latent, Q = rank of the queries, A = heads x row
         size, V = heads x value size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_float, c_int32, c_void_p
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from outrider.core.spec import LatentShape
from outrider.kernels.native.ops import LinearStruct, function, pointer, struct_fields
from outrider.kernels.plan import PackedLinear
from outrider.kernels.reference.delta import Cells, DeltaWeights, TokenRun

_ABSENT = -1
_Numbers = np.ndarray[Any, np.dtype[np.int32]]
_Addresses = np.ndarray[Any, np.dtype[np.int64]]


class DeltaStruct(Structure):
    """A layer's weights and sizes (csrc/delta.h)."""

    _fields_ = struct_fields(
        (c_void_p, "conv rate dt_bias conv_bias skip"),
        (c_int32, "taps channels key_heads heads key_dim value_dim"),
    )


class _Pass(Structure):
    _fields_ = struct_fields(
        (c_void_p, "team runs states inputs replayed state_cells input_cells"),
        (c_int32, "num_runs"),
    )


@dataclass(slots=True)
class NativeDelta:
    """The operator `delta` of `Kernels`: `call` of the library, on the threads at address `team`.

    It stores the last pass, so it is not thread-safe, but two instances may run at once."""

    call: Any
    team: int
    _layers: dict[int, tuple[DeltaWeights, DeltaStruct]] = field(
        default_factory=dict[int, tuple[DeltaWeights, DeltaStruct]]
    )
    _runs: Sequence[TokenRun] | None = None
    _arrays: tuple[_Numbers | _Addresses, ...] = ()
    _pass: _Pass = field(default_factory=_Pass)

    def __call__(
        self,
        first_NP: Tensor,
        weights: DeltaWeights,
        runs: Sequence[TokenRun],
        cells: Cells,
        layer: int,
        out_NO: Tensor,
    ) -> None:
        self.call(
            self.described(runs, cells),
            ctypes.addressof(self._described(weights)),
            first_NP.data_ptr(),
            first_NP.stride(0),
            first_NP.shape[1] - weights.num_gates,
            layer,
            out_NO.data_ptr(),
        )

    def described(self, runs: Sequence[TokenRun], cells: Cells) -> int:
        """The address of the runs of a pass, until those of another pass are described."""
        if self._runs is not runs:
            self._describe(runs, cells)
        return ctypes.addressof(self._pass)

    def _described(self, weights: DeltaWeights) -> DeltaStruct:
        found = self._layers.get(id(weights))
        if found is None:
            # The weights are stored too, so that no other object can get their id.
            found = weights, described_layer(weights)
            self._layers[id(weights)] = found
        return found[1]

    def _describe(self, runs: Sequence[TokenRun], cells: Cells) -> None:
        replayed = [cell for run in runs for cell in run.replayed]
        rows: list[tuple[int, ...]] = []
        end = 0
        for run in runs:
            start, end = end, end + len(run.replayed)
            rows.append((run.first, run.stop, _number(run.source), _number(run.fold), start, end))
        states = [_number(cell) for run in runs for cell in run.states]
        inputs = [_number(cell) for run in runs for cell in run.inputs]
        # The lists only grow, so they have all cells of the plan by now.
        state_cells = [
            address
            for cell in list(cells.states)
            for address in (cell.conv_LWC.data_ptr(), cell.state_LHKV.data_ptr())
        ]
        input_cells = [
            tensor.data_ptr()
            for cell in list(cells.inputs)
            for tensor in (cell.conv_LC, cell.key_LGK, cell.change_LHV, cell.decay_LH)
        ]
        self._arrays = (
            *(np.array(column, dtype=np.int32) for column in (rows, states, inputs, replayed)),
            *(np.array(column, dtype=np.int64) for column in (state_cells, input_cells)),
        )
        self._pass = _Pass(self.team, *(a.ctypes.data for a in self._arrays), len(runs))
        self._runs = runs


def _number(cell: int | None) -> int:
    """The number of a cell in native code."""
    return _ABSENT if cell is None else cell


def described_layer(weights: DeltaWeights) -> DeltaStruct:
    """The struct of `weights`, which must live as long as native code reads them."""
    taps, channels = weights.conv_JC.shape
    keys = weights.num_key_heads * weights.key_dim
    return DeltaStruct(
        weights.conv_JC.data_ptr(),
        weights.rate_H.data_ptr(),
        weights.dt_bias_H.data_ptr(),
        pointer(weights.conv_bias_C),
        pointer(weights.skip_H),
        taps,
        channels,
        weights.num_key_heads,
        weights.num_heads,
        weights.key_dim,
        (channels - 2 * keys) // max(1, weights.num_heads),
    )


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


# Names of gates, in the order of `Gating` in csrc/linears.h.
_GATINGS = ("silu", "gelu", "clamped", "squared")


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """One feed-forward net with a gate."""

    gate_up: PackedLinear
    down: PackedLinear
    gate_up_bias_2F: Tensor | None = None
    down_bias_D: Tensor | None = None


@dataclass(frozen=True, slots=True)
class MixtureWeights:
    """Weights of a mixture. `router` scores all experts, and the shared one, if it is gated, in its
    last output. `choice_bias_X` is added to shares where experts are chosen, and to nothing else.
    The shares of chosen experts are multiplied by `expert_scale_X`.
    `native`, if any, runs the mixture in one call."""

    router: PackedLinear
    experts: Sequence[DenseWeights]
    shared: DenseWeights | None = None
    router_bias_X: Tensor | None = None
    choice_bias_X: Tensor | None = None
    expert_scale_X: Tensor | None = None
    latent_in: PackedLinear | None = None
    latent_out: PackedLinear | None = None
    native: NativeMixture | None = None

    @property
    def always_read(self) -> tuple[PackedLinear, ...]:
        """The matrices that every token reads."""
        shared = () if self.shared is None else (self.shared.gate_up, self.shared.down)
        return (self.router, *shared)


class MixtureSizes(Protocol):
    """Sizes of a mixture; see `Experts` in models/expert_kinds.py."""

    @property
    def num_experts(self) -> int: ...
    @property
    def num_chosen(self) -> int: ...
    @property
    def ffn_size(self) -> int: ...
    @property
    def shared_ffn_size(self) -> int: ...
    @property
    def normalise(self) -> bool: ...
    @property
    def gate(self) -> Enum: ...
    @property
    def alpha(self) -> float: ...
    @property
    def limit(self) -> float: ...
    @property
    def scale(self) -> float: ...
    @property
    def has_sigmoids(self) -> bool: ...
    @property
    def gates_shared(self) -> bool: ...
    @property
    def num_groups(self) -> int: ...
    @property
    def top_groups(self) -> int: ...
    @property
    def group_best(self) -> int: ...


class _Net(Structure):
    _fields_ = struct_fields((LinearStruct, "gate_up down"))


class _Mixture(Structure):
    _fields_ = struct_fields(
        (c_void_p, "team"),
        (LinearStruct, "router"),
        (c_void_p, "experts"),
        (_Net, "shared"),
        (c_void_p, "choice_bias"),
        (c_float, "alpha limit scale"),
        (c_int32, "hidden_size num_experts num_chosen ffn_size shared_ffn_size normalise gating"),
        (c_int32, "num_scores has_sigmoids gates_shared num_groups top_groups group_best"),
    )


class NativeMixture:
    """Runs rows through the experts that their router chooses. Owns what native code reads."""

    def __init__(
        self, library: ctypes.CDLL, team: int, sizes: MixtureSizes, weights: MixtureWeights
    ) -> None:
        self._weights = weights
        experts = (_Net * len(weights.experts))(*map(_net, weights.experts))
        self._experts = experts
        self._mixture = _Mixture(
            team,
            LinearStruct.of(weights.router, weights.router_bias_X),
            ctypes.addressof(experts),
            _Net() if weights.shared is None else _net(weights.shared),
            pointer(weights.choice_bias_X),
            sizes.alpha,
            sizes.limit,
            sizes.scale,
            weights.router.num_in,
            sizes.num_experts,
            sizes.num_chosen,
            sizes.ffn_size,
            sizes.shared_ffn_size,
            sizes.normalise,
            _GATINGS.index(sizes.gate.value),
            weights.router.num_out,
            sizes.has_sigmoids,
            sizes.gates_shared,
            sizes.num_groups,
            sizes.top_groups,
            sizes.group_best,
        )
        self.address = ctypes.addressof(self._mixture)
        self._run = function(library, "mixture")

    def __call__(self, x_ND: Tensor, out_ND: Tensor) -> None:
        """Run the mixture. Tensors are contiguous float32 on the CPU."""
        self._run(self.address, x_ND.data_ptr(), out_ND.data_ptr(), len(x_ND))


def _net(net: DenseWeights) -> _Net:
    return _Net(
        LinearStruct.of(net.gate_up, net.gate_up_bias_2F),
        LinearStruct.of(net.down, net.down_bias_D),
    )
