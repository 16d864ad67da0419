"""A target and a draft that are costs alone, at a size that a machine can hold, and their times.

For engines both are sampled by the same share of their layers and divided alike, so that a draft
pass takes the share of a target pass that it takes in whole models, as far as bytes decide that.

Seconds of passes are of all layers: those of the layers that are there, times the shape's factor.
The sequence is empty but for what a pass feeds, and is rolled back after each. All products of a
layer run in order, so that none finds its matrix in a cache that holds less than a layer.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch

from outrider.core.clock import HOST_CLOCK, Clock, host_floats
from outrider.core.errors import ConfigError, MachineError, did_you_mean
from outrider.core.protocols import CausalLM, DraftNeeds, StepRow
from outrider.core.spec import HEAD_BYTES, QUANTISED_BYTES
from outrider.core.tree import ROOT
from outrider.kernels.native.cpu import hardware_threads
from outrider.kernels.operators import DTYPES, Kernels, pick_device
from outrider.kernels.plan import PackedLinear
from outrider.kernels.registry import choose
from outrider.models.decoder import Decoder, LoadOptions, ModelCapacity
from outrider.models.weights import Placement
from outrider.plugins.doctor.ceilings import ceilings
from outrider.plugins.parallel.sharded import check_split
from outrider_lab.models.gemm import (
    FULL_VOCABULARY,
    GEMM_SHAPES,
    MAX_TOKENS,
    GemmModel,
    GemmShape,
    NonGemmCosts,
    RandomWeights,
    gemm_shape,
    make_gemm,
    products,
)
from outrider_lab.models.synthetic import write_random

Role = Literal["target", "draft"]
# Names that pairs of known shapes have in the reference tables.
PAIRS = {"8b/1b": ("llama-8b", "llama-1b"), "70b/1b": ("llama-70b", "llama-1b")}
# While a matrix is packed its source is there as well.
_MARGIN = 1.5
_FACTS = ("hidden_size", "ffn_size", "num_heads", "num_kv_heads", "head_dim", "num_layers")
_MORE_FACTS = ("whole_layers", "factor", "divisor", "sampled")


@dataclass(frozen=True, slots=True, kw_only=True)
class PairShape:
    """What a pair is; `name` is target/draft."""

    name: str
    target: GemmShape
    draft: GemmShape

    def sampled(self, share: Fraction, divisor: int) -> PairShape:
        """With that share of the layers of each, one at least, and widths over `divisor`."""

        def some(shape: GemmShape) -> GemmShape:
            layers = max(round(shape.num_layers * share), 1)
            return shape.with_layers(layers).scaled(divisor)

        return PairShape(name=self.name, target=some(self.target), draft=some(self.draft))


@dataclass(frozen=True, slots=True, kw_only=True)
class CostPair:
    """Both models in memory, on `device`. They may be any that are run for their cost."""

    target: Decoder
    draft: Decoder
    device: torch.device


@dataclass(frozen=True, slots=True, kw_only=True)
class Make:
    """How models are made. A target among several `ranks` is a Llama of random weights, which has
    all costs; the draft model should then have them too."""

    costs: NonGemmCosts
    dtype: str = "auto"
    quantise: str = "none"
    device: str = "auto"
    threads: int = 0
    ranks: int = 1

    @property
    def dtype_name(self) -> str:
        return "bfloat16" if self.dtype == "auto" else self.dtype

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype_name]

    def options(self, capacity: ModelCapacity) -> LoadOptions:
        return LoadOptions(
            capacity=capacity,
            dtype=self.dtype,
            device=self.device,
            threads=self.threads,
            quantise=self.quantise,
        )

    def model(self, shape: GemmShape, capacity: ModelCapacity) -> GemmModel:
        return make_gemm(self._sized(shape), self.costs, self.options(capacity))

    def shared(self, shape: GemmShape, capacity: ModelCapacity) -> Decoder:
        """Among ranks, each of which reads its share of a folder that is not kept."""
        # Imported here: few use it, and it brings PyTorch's communication along.
        from outrider.plugins.parallel.sharded import load_sharded

        with TemporaryDirectory(prefix="outrider-shared-") as placement:
            folder = Path(placement) / "target"
            write_random(folder, self._sized(shape), self.torch_dtype, max_tokens=MAX_TOKENS)
            return load_sharded(folder, self.options(capacity), size=self.ranks, name=shape.name)

    def _sized(self, shape: GemmShape) -> GemmShape:
        return replace(shape, vocab_size=FULL_VOCABULARY) if self.costs.head else shape

    def bytes_per_weight(self, role: Role) -> float:
        """The draft is not quantised, as in engines."""
        plain = 4.0 if self.dtype == "float32" else 2.0
        return QUANTISED_BYTES.get(self.quantise, plain) if role == "target" else plain

    def weight_bytes(self, role: Role, shape: GemmShape) -> int:
        width, num = self.bytes_per_weight(role), num_weights(shape, self.costs)
        head = FULL_VOCABULARY * shape.hidden_size if self.costs.head else 0
        of_head = HEAD_BYTES.get(self.quantise, width) if role == "target" else width
        return int((num - head) * width + head * of_head)

    def pair(self, shape: PairShape, target: ModelCapacity, draft: ModelCapacity) -> CostPair:
        """Both models in memory."""
        plain = replace(self, quantise="none")
        make = self.model if self.ranks == 1 else self.shared
        return CostPair(
            target=make(shape.target, target),
            draft=plain.model(shape.draft, draft),
            device=pick_device(self.device),
        )


def pair_shape(name: str) -> PairShape:
    """A known pair, or TARGET/DRAFT of shapes. Raises ConfigError."""
    target, slash, draft = name.partition("/")
    if name in PAIRS:
        target, draft = PAIRS[name]
    elif not slash or not target or not draft:
        raise ConfigError(
            f"no pair {name!r}.",
            hint=f"{did_you_mean(name, PAIRS)} Or write TARGET/DRAFT with shapes such as "
            f"{', '.join(GEMM_SHAPES)}.",
        )
    return PairShape(name=name, target=gemm_shape(target), draft=gemm_shape(draft))


def num_weights(shape: GemmShape, costs: NonGemmCosts) -> int:
    sizes = products(shape, fused=costs.fused).values()
    head = FULL_VOCABULARY * shape.hidden_size if costs.head else 0
    return shape.num_layers * sum(num_out * num_in for num_out, num_in in sizes) + head


def facts(shape: PairShape, make: Make, used_for: str) -> list[dict[str, object]]:
    """What is said of both models of a pair; `used_for` is passes or engines."""
    roles: tuple[tuple[Role, GemmShape], ...] = (("target", shape.target), ("draft", shape.draft))
    return [
        {
            "pair": shape.name,
            "used_for": used_for,
            "role": role,
            "shape": one.name,
            **{name: getattr(one, name) for name in (*_FACTS, *_MORE_FACTS)},
            "num_parameters": num_weights(one, make.costs),
            "weight_bytes": make.weight_bytes(role, one),
        }
        for role, one in roles
    ]


def check_fits(shape: PairShape, make: Make, free_bytes: int) -> None:
    """Raise MachineError if the pair's weights need more than `free_bytes`, ConfigError if ranks
    cannot share the target."""
    if make.ranks > 1 and make.quantise != "none":
        raise ConfigError(
            f"tensor_parallel={make.ranks}: quantised weights cannot be split.",
            hint="leave --quantise at none, or --tensor-parallel at 1",
        )
    if make.ranks > 1:
        check_split(shape.target.config(), make.ranks)
    num = num_weights(shape.target, make.costs) + num_weights(shape.draft, make.costs)
    # Packing needs the plain form, quantised or not.
    needed = _MARGIN * num * make.bytes_per_weight("draft")
    if needed > free_bytes:
        raise MachineError(
            f"pair {shape.name} takes {needed / 1e9:.1f} GB while it is made, and "
            f"{free_bytes / 1e9:.1f} GB are free.",
            hint="sample fewer layers (--layer-share) or divide widths (--scale, --pass-scale)",
        )


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


def pass_room(ks: Sequence[int], branches: Sequence[int]) -> ModelCapacity:
    """For every timing."""
    rows = max(*(k + 1 for k in ks), *branches)
    return ModelCapacity(num_slots=PASS_ROOM_SLOTS, max_rows=rows, max_logits=rows)


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
        placement = Placement("", self.dtype, pick_device(self.make.device), self.make.quantise)
        return RandomWeights(self.kernels, placement)

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
