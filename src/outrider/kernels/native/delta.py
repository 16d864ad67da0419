"""The recurrence of a layer as one native call: csrc/delta.cpp.

kernels/reference/delta.py is the definition. The runs of a pass are converted once to arrays of
numbers for native code.

Shapes:  N = packed tokens, P = outputs of a layer's first product, O = value heads x value size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_int32, c_void_p
from typing import Any

import numpy as np
from torch import Tensor

from outrider.kernels.native.ops import function, pointer, struct_fields
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


class NativeDelta:
    """The operator `delta` of `Kernels`. `team` is the address of the threads that run it.

    It stores the last pass, so it is not thread-safe, but two instances may run at once."""

    def __init__(self, library: ctypes.CDLL, team: int) -> None:
        self._team = team
        self._call = function(library, "delta")
        self._layers: dict[int, tuple[DeltaWeights, DeltaStruct]] = {}
        self._runs: Sequence[TokenRun] | None = None
        self._arrays: tuple[_Numbers | _Addresses, ...] = ()
        self._pass = _Pass()

    def __call__(
        self,
        first_NP: Tensor,
        weights: DeltaWeights,
        runs: Sequence[TokenRun],
        cells: Cells,
        layer: int,
        out_NO: Tensor,
    ) -> None:
        self._call(
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
        self._pass = _Pass(self._team, *(a.ctypes.data for a in self._arrays), len(runs))
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
