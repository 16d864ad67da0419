# Kernels have no types.
# pyright: reportUnknownMemberType=false
"""Launches of the gated delta rule on CUDA: two for each layer, and one copy of tables a pass.

Because of the copy it does not fit a CUDA graph. Sizes of tiles depend on the model alone, so a
row's bits do not depend on the number of rows.

Shapes:  N = packed tokens, P = outputs of a layer's first product, O = value heads x value size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.kernels.reference.delta import Cells, DeltaWeights, TokenRun
from outrider.plugins.gpu.kernels import delta
from outrider.plugins.gpu.kernels.delta_tables import DeltaTables, delta_tables
from outrider.plugins.gpu.kernels.scratch import Workspace
from outrider.plugins.gpu.kernels.tiles import cdiv, delta_columns, launch, num_warps, power_of_two


class TritonDelta:
    """The operator `delta`. It stores the tables of the last pass, for its other layers."""

    __slots__ = ("_runs", "_tables", "_workspace")

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._runs: Sequence[TokenRun] | None = None
        self._tables: DeltaTables | None = None

    def __call__(
        self,
        first_NP: Tensor,
        weights: DeltaWeights,
        runs: Sequence[TokenRun],
        cells: Cells,
        layer: int,
        out_NO: Tensor,
    ) -> None:
        taps, channels = weights.conv_JC.shape
        if self._tables is None or self._runs is not runs:
            self._tables, self._runs = delta_tables(runs, cells, taps, first_NP.device), runs
        tables, heads = self._tables, weights.num_heads
        key_heads, key_dim = weights.num_key_heads, weights.key_dim
        value_dim, shared = out_NO.shape[1] // heads, heads // key_heads
        num_rows, width = first_NP.shape
        assert first_NP.stride(1) == 1
        assert out_NO.is_contiguous()
        assert channels == 2 * key_heads * key_dim + heads * value_dim
        keys = ((num_rows, key_heads, key_dim), torch.float32)
        values = ((num_rows, heads, value_dim), torch.float32)
        gates = ((num_rows, heads), torch.float32)
        inputs = self._workspace.carve(keys, keys, values, gates, gates)
        launch(
            delta.prepare_kernel,
            (num_rows, key_heads),
            first_NP, weights.conv_JC, weights.rate_H, weights.dt_bias_H,
            tables.lines_NT2, tables.tokens_N7, *inputs,
            layer, first_NP.stride(0), width - 2 * heads, key_dim**0.5,
            KEY_HEADS=key_heads,
            SHARED=shared,
            KEY=key_dim,
            VALUE=value_dim,
            TAPS=taps,
            KEYS=power_of_two(key_dim),
            VALUES=power_of_two(shared * value_dim),
            GATES=power_of_two(shared),
            num_warps=num_warps(shared * value_dim),
        )  # fmt: skip
        columns = delta_columns(value_dim)
        launch(
            delta.recur_kernel,
            (heads * cdiv(value_dim, columns), tables.num_groups),
            *inputs, tables.tokens_N7, tables.runs_R6, tables.replayed_I3, tables.groups_U1,
            out_NO, layer,
            HEADS=heads,
            SHARED=shared,
            KEY=key_dim,
            VALUE=value_dim,
            KEYS=power_of_two(key_dim),
            COLUMNS=columns,
            num_warps=1,
        )  # fmt: skip
