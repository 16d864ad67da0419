"""Matrix products against the roofline: what each reaches of what bytes and arithmetic allow.

A product of N rows by a matrix of O outputs and I inputs takes 2 N O I operations and reads at
least the matrix, the rows and the results. With B bytes and C operations a second at most,

    operations a second <= min(C, B x operations / bytes)            (Williams et al. 2009)

B is memory read by all threads (kernels/bandwidth.py). C is what the same kernel reaches where it
needs hardly any bytes: many rows by a matrix that stays in a cache. All products of a layer run in
order, so that none finds its matrix in a cache that holds less than a layer.

Shapes:  N = rows, O = outputs, I = inputs.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from outrider.bench.gemm.pair import Make
from outrider.bench.gemm.record import Ceilings, ProductRow
from outrider.core.clock import HOST_CLOCK, Clock, host_floats
from outrider.kernels.bandwidth import ceilings
from outrider.kernels.native.cpu import hardware_threads
from outrider.kernels.plan import PackedLinear
from outrider.kernels.registry import Kernels, choose
from outrider.lab.gemm import RandomWeights, products
from outrider.lab.gemm_shape import GemmShape
from outrider.models.loading import pick_device
from outrider.models.weights import Placement

ROWS = (1, 2, 4, 8, 16, 32, 64)
# Of the product that finds the ceiling of arithmetic: its matrix takes a megabyte or two.
_PEAK_SIZE, _PEAK_ROWS, _PEAK_TURNS = 768, 256, 8
_FLOAT_BYTES = 4


@dataclass(slots=True)
class ProductTimer:
    """The kernels of a study, and the matrices of one layer of one shape at a time."""

    make: Make
    clock: Clock = HOST_CLOCK
    _kernels: Kernels | None = None
    _layer: tuple[str, Mapping[str, PackedLinear]] | None = None

    @property
    def kernels(self) -> Kernels:
        if self._kernels is None:
            self._kernels = choose(
                device=pick_device(self.make.device),
                dtype=self.dtype,
                threads=self.make.threads,
                quantise=self.make.quantise,
            )
        return self._kernels

    @property
    def num_threads(self) -> int:
        return int(self.kernels.threads.name) if self.kernels.threads else 1

    @property
    def dtype(self) -> torch.dtype:
        return self.make.torch_dtype

    def weights(self) -> RandomWeights:
        place = Placement("", self.dtype, pick_device(self.make.device), self.make.quantise)
        return RandomWeights(self.kernels, place)

    def layer(self, shape: GemmShape) -> Mapping[str, PackedLinear]:
        if self._layer is None or self._layer[0] != shape.name:
            self._layer = None
            made = self.weights()
            sizes = products(shape)
            self._layer = shape.name, {name: made.packed(*size) for name, size in sizes.items()}
        return self._layer[1]

    def seconds(self, shape: GemmShape, num_rows: int) -> dict[str, float]:
        """Of each product of a layer, once."""
        layer = self.layer(shape)
        return {name: self._time(packed, num_rows, turns=1) for name, packed in layer.items()}

    def peak_flops(self) -> float:
        """Operations a second of the product that needs hardly any bytes."""
        packed = self.weights().packed(_PEAK_SIZE, _PEAK_SIZE)
        seconds = self._time(packed, _PEAK_ROWS, turns=_PEAK_TURNS)
        return 2 * _PEAK_ROWS * _PEAK_SIZE**2 * _PEAK_TURNS / seconds

    def _time(self, packed: PackedLinear, num_rows: int, *, turns: int) -> float:
        device = pick_device(self.make.device)
        x_NI = torch.ones(num_rows, packed.num_in, device=device)
        out_NO = torch.empty(num_rows, packed.num_out, device=device)
        began = self.clock()
        for _ in range(turns):
            self.kernels.linear(x_NI, packed, out_NO)
        host_floats(out_NO[-1, -1:])
        return self.clock() - began


def memory_bytes_per_second(threads: int) -> float:
    """The faster of one thread and all. Raises MachineError without a compiler."""
    wanted = sorted({1, threads or len(hardware_threads())})
    found = [one.gb_per_second for one in ceilings(wanted) if one.level == "memory"]
    return 1e9 * max(found)


def product_rows(
    shape: GemmShape,
    num_rows: int,
    repeats: Sequence[Mapping[str, float]],
    roof: Ceilings | None,
    bytes_per_weight: float,
) -> list[ProductRow]:
    """Of one shape and number of rows, from all repeats by product."""
    found: list[ProductRow] = []
    for name, (num_out, num_in) in products(shape).items():
        seconds = statistics.median(one[name] for one in repeats)
        num_bytes = int(bytes_per_weight * num_out * num_in)
        num_bytes += _FLOAT_BYTES * num_rows * (num_in + num_out)
        num_flops = 2 * num_rows * num_out * num_in
        intensity = num_flops / num_bytes
        reached = num_flops / seconds / 1e9
        limit = 0.0
        if roof is not None:
            limit = min(roof.gigaflops_per_second, roof.gigabytes_per_second * intensity)
        found.append(
            ProductRow(
                shape=shape.name,
                product=name,
                num_rows=num_rows,
                num_in=num_in,
                num_out=num_out,
                num_bytes=num_bytes,
                num_flops=num_flops,
                seconds=seconds,
                gigabytes_per_second=num_bytes / seconds / 1e9,
                gigaflops_per_second=reached,
                intensity=intensity,
                roof=limit,
                share=reached / limit if limit else 0.0,
            )
        )
    return found
