"""Passes and matrix products timed by themselves.

Seconds of passes are of all layers: those of the layers that are there, times the shape's factor.
The sequence is empty but for what a pass feeds, and is rolled back after each. All products of a
layer run in order, so that none finds its matrix in a cache that holds less than a layer.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from outrider.bench.gemm.pair import CostPair, Make, PairShape
from outrider.core.clock import HOST_CLOCK, Clock, host_floats
from outrider.core.protocols import CausalLM, DraftNeeds, StepRow
from outrider.core.tree import ROOT
from outrider.kernels.bandwidth import ceilings
from outrider.kernels.native.cpu import hardware_threads
from outrider.kernels.plan import PackedLinear
from outrider.kernels.registry import Kernels, choose
from outrider.lab.gemm import RandomWeights, products
from outrider.lab.gemm_shape import GemmShape
from outrider.models.decoder import Room
from outrider.models.loading import pick_device
from outrider.models.weights import Placement

PASS_ROOM_SLOTS = 512
_NO_NEEDS = DraftNeeds()
_NUM_TIMED = 3
_SEQ = 0
# Of the product that finds the ceiling of arithmetic: its matrix takes a megabyte or two.
_PEAK_SIZE, _PEAK_ROWS, _PEAK_TURNS = 768, 256, 8


def target_rows(num: int) -> str:
    """One pass of the target over so many tokens that all follow the text."""
    return f"target rows={num}"


def draft_rows(num: int) -> str:
    return f"draft rows={num}"


def draft_chain(k: int) -> str:
    """`k` passes of the draft model over a token each."""
    return f"draft chain={k}"


def pass_names(ks: Sequence[int], branches: Sequence[int]) -> list[str]:
    """What has to be timed for these K and numbers of branches."""
    rows = sorted({1, *(k + 1 for k in ks)})
    beside = sorted({*rows, *branches})
    return [*map(target_rows, rows), *map(draft_rows, beside), *map(draft_chain, ks)]


def pass_room(ks: Sequence[int], branches: Sequence[int]) -> Room:
    """For every timing."""
    rows = max(*(k + 1 for k in ks), *branches)
    return Room(num_slots=PASS_ROOM_SLOTS, max_rows=rows, max_logits=rows)


@dataclass(frozen=True, slots=True)
class PassTimer:
    """Times passes of a pair of some shape, by name."""

    shape: PairShape
    pair: CostPair
    clock: Clock = HOST_CLOCK

    def time(self, name: str) -> float:
        """Seconds of all layers: the median of some passes, after one that brings the model's
        weights to where they stay between its passes. Another model's may have pushed them out."""
        self._once(name)
        return statistics.median(self._once(name) for _ in range(_NUM_TIMED))

    def _once(self, name: str) -> float:
        kind, number = name.split("=")
        is_target = kind.startswith("target")
        shape = self.shape.target if is_target else self.shape.draft
        model = self.pair.target if is_target else self.pair.draft
        num = int(number)
        if kind.endswith("chain"):
            rows = [StepRow(_SEQ, (1,), (node - 1,)) for node in range(num)]
        else:
            rows = [StepRow(_SEQ, (1,) * num, (ROOT,) * num)]
        return shape.factor * self._timed(model, rows)

    def _timed(self, model: CausalLM, rows: Sequence[StepRow]) -> float:
        model.state.open(_SEQ, ())
        try:
            began = self.clock()
            for row in rows:
                # A device is waited for after each, as a chain's next token is.
                host_floats(model.step([row], _NO_NEEDS).logits_MV[-1, :1])
            return self.clock() - began
        finally:
            model.state.close(_SEQ)


@dataclass(slots=True)
class ProductTimer:
    """The kernels of a study, and the matrices of one layer of one shape at a time.

    Shapes:  N = rows, O = outputs, I = inputs."""

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
    def dtype(self) -> torch.dtype:
        return self.make.torch_dtype

    @property
    def num_threads(self) -> int:
        return int(self.kernels.threads.name) if self.kernels.threads else 1

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

    def ceilings(self) -> dict[str, float]:
        """The most that this machine reaches. Raises MachineError without a compiler."""
        return {
            "bytes_per_second": memory_bytes_per_second(self.make.threads),
            "flops_per_second": self.peak_flops(),
            "threads": self.num_threads,
        }

    def peak_flops(self) -> float:
        """Operations a second of a product that needs hardly any bytes: many rows by a matrix that
        stays in a cache."""
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
    """The faster of one thread and all."""
    wanted = sorted({1, threads or len(hardware_threads())})
    found = [one.gb_per_second for one in ceilings(wanted) if one.level == "memory"]
    return 1e9 * max(found)
