"""The definition of a linear: out_NO (+)= round(x_NI) W_OI^T, accumulated in float32.

Activations are rounded to the weight's dtype; products and sums are float32. BLAS picks its loops
by the number of rows, so on a CPU every call gets exactly TILE rows, short tiles padded with
zeros; `pack` then checks on the real weight that all rows of a tile are computed alike, and falls
back to one row a call where they are not. Other devices take one ordinary call.

Shapes:  N = rows, I = inputs, O = outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from outrider.kernels.packed import PackedLinear

TILE = 8


def pack_tiled(weight_OI: Tensor) -> PackedLinear:
    """For CPUs: values of the weight's dtype, held as float32 since BLAS is fastest there."""
    num_out, num_in = weight_OI.shape
    data_OI = weight_OI.detach().to(torch.float32, copy=True).contiguous()
    tile = TILE if _rows_alike(data_OI) else 1
    return PackedLinear(num_out, num_in, data_OI, tile=tile)


def _rows_alike(weight_OI: Tensor) -> bool:
    probe_I = torch.linspace(-1.0, 1.0, weight_OI.shape[1]).sin_()
    out_TO = functional.linear(probe_I.repeat(TILE, 1), weight_OI)
    return bool((out_TO == out_TO[0]).all())


def pack_plain(weight_OI: Tensor) -> PackedLinear:
    num_out, num_in = weight_OI.shape
    return PackedLinear(num_out, num_in, weight_OI.detach().contiguous())


class TorchLinear:
    """`dtype` is what activations are rounded to: the dtype of the weights before packing."""

    __slots__ = ("_dtype",)

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(
        self, x_NI: Tensor, packed: PackedLinear, out_NO: Tensor, accumulate: bool = False
    ) -> None:
        x_NI = x_NI.to(self._dtype).to(packed.data.dtype)
        if packed.tile is None:
            result_NO = functional.linear(x_NI, packed.data).float()
        else:
            result_NO = _linear_tiled(x_NI, packed.data, packed.tile)
        if accumulate:
            out_NO.add_(result_NO)
        else:
            out_NO.copy_(result_NO)


def _linear_tiled(x_NI: Tensor, weight_OI: Tensor, tile: int) -> Tensor:
    num_rows, num_in = x_NI.shape
    num_tiles = -(-num_rows // tile)
    padded_NI = x_NI.new_zeros(num_tiles * tile, num_in)
    padded_NI[:num_rows] = x_NI
    results = [functional.linear(x_TI, weight_OI) for x_TI in torch.split(padded_NI, tile)]
    return torch.cat(results)[:num_rows]
