"""Decoder of matrix products alone (a GEMM model): a real model's cost without its text.

A layer is seven products of the right sizes: q, k, v and out of attention, gate, up and down of the
feed-forward net. Weights are random numbers that are held and multiplied by the kernels of real
models, so a pass reads the same bytes. `NonGemmCosts` adds attention over a real KV cache, norms
with residual and gate, and the output head; with attention or norms q, k and v are one product, and
so are gate and up. Outputs mean nothing: a script decides acceptance (synthetic.py). Without a head
all logits are 0.

Shapes:  N = packed tokens, M = packed logits rows, D = hidden size, V = vocabulary,
         A = heads x head size, E = fused q, k and v, F = FFN size, O = outputs, I = inputs,
         T = positions, H = half of a head, G = KV heads, S = slots.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from outrider.core.errors import ConfigError, ContractError, did_you_mean
from outrider.core.protocols import DraftNeeds, StepOutput, StepRow
from outrider.kernels.native.forward import Forward
from outrider.kernels.operators import DTYPES, Kernels, pick_device, tried
from outrider.kernels.plan import PackedLinear, PackedPlan
from outrider.kernels.registry import choose
from outrider.models.configs import LlamaConfig
from outrider.models.decoder import (
    LayerKV,
    LoadOptions,
    ModelCapacity,
    PassDecoder,
    Passes,
    Scratch,
)
from outrider.models.rope import turns_of
from outrider.models.weights import Placement

MAX_TOKENS = 1 << 16
# Without an output head a vocabulary is only what acceptance is decided over.
BARE_VOCABULARY = 4096
# Of Llama 3, where there is a head.
FULL_VOCABULARY = 128256

_CUSTOM = re.compile(r"(\d+)x(\d+)x(\d+)x(\d+)x(\d+)(x(\d+))?", re.ASCII)
_HINT = "write HIDDENxFFNxLAYERSxHEADSxKVHEADS[xHEADDIM], as in 1024x4096x24x16x8"


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmShape:
    """`whole_layers` is the number of layers of the model that this is a part of, `divisor` what
    its widths were divided by."""

    name: str
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int = BARE_VOCABULARY
    whole_layers: int
    divisor: int = 1

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"shape {self.name}: {self.num_heads} heads are no multiple of "
                f"{self.num_kv_heads} key heads.",
                hint=_HINT,
            )

    @property
    def factor(self) -> float:
        """Seconds of these layers times this are those of all."""
        return self.whole_layers / self.num_layers

    @property
    def is_whole(self) -> bool:
        return self.num_layers == self.whole_layers and self.divisor == 1

    @property
    def sampled(self) -> str:
        """What of the model is missing, in words; "" for a whole one."""
        parts: list[str] = []
        if self.num_layers != self.whole_layers:
            parts.append(f"layer-sampled: {self.num_layers} of {self.whole_layers} layers")
        if self.divisor > 1:
            parts.append(f"scaled: widths over {self.divisor}")
        return "; ".join(parts)

    def with_layers(self, num_layers: int) -> GemmShape:
        """The same with so many of its layers. Raises ConfigError if it has fewer."""
        if not 1 <= num_layers <= self.num_layers:
            raise ConfigError(
                f"shape {self.name} has {self.num_layers} layers, not {num_layers}.",
                hint=f"take 1 to {self.num_layers}",
            )
        return replace(self, num_layers=num_layers)

    def scaled(self, divisor: int) -> GemmShape:
        """Widths over `divisor`, heads as large and fewer. Raises ConfigError if that is no whole
        number of heads, of which query heads per key head may become fewer."""
        if divisor < 1 or self.num_heads % divisor or self.ffn_size % divisor:
            raise ConfigError(
                f"shape {self.name}: widths cannot be divided by {divisor}.",
                hint=f"take a divisor of its {self.num_heads} heads",
            )
        num_heads = self.num_heads // divisor
        return replace(
            self,
            hidden_size=self.hidden_size // divisor,
            ffn_size=self.ffn_size // divisor,
            num_heads=num_heads,
            num_kv_heads=_divided(self.num_kv_heads, divisor, num_heads),
            divisor=self.divisor * divisor,
        )

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            family="gemm",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            ffn_size=self.ffn_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_tokens=MAX_TOKENS,
            tie_word_embeddings=True,
        )


def _known(name: str, sizes: tuple[int, int, int, int, int, int]) -> GemmShape:
    hidden, ffn, layers, heads, kv_heads, head_dim = sizes
    return GemmShape(
        name=name,
        hidden_size=hidden,
        ffn_size=ffn,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        whole_layers=layers,
    )


GEMM_SHAPES: Mapping[str, GemmShape] = {
    "llama-1b": _known("llama-1b", (2048, 8192, 16, 32, 8, 64)),
    "llama-8b": _known("llama-8b", (4096, 14336, 32, 32, 8, 128)),
    "llama-70b": _known("llama-70b", (8192, 28672, 80, 64, 8, 128)),
}


def gemm_shape(name: str) -> GemmShape:
    """A known shape, or one written as HIDDENxFFNxLAYERSxHEADSxKVHEADS[xHEADDIM]. Raises
    ConfigError."""
    if name in GEMM_SHAPES:
        return GEMM_SHAPES[name]
    match = _CUSTOM.fullmatch(name)
    if match is None:
        if "x" in name and name[:1].isdigit():
            raise ConfigError(f"{name!r} is no shape.", hint=_HINT)
        raise ConfigError(f"no shape {name!r}.", hint=did_you_mean(name, GEMM_SHAPES))
    hidden, ffn, layers, heads, kv_heads = (int(match[i]) for i in range(1, 6))
    if not all((hidden, ffn, layers, heads, kv_heads)) or match[7] in ("0", "00"):
        raise ConfigError(f"{name!r} has a size of 0.", hint=_HINT)
    head_dim = int(match[7] or hidden // heads)
    if not head_dim or head_dim % 2:
        raise ConfigError(f"{name!r}: heads of {head_dim} numbers cannot turn.", hint=_HINT)
    return _known(name, (hidden, ffn, layers, heads, kv_heads, head_dim))


def _divided(num_kv_heads: int, divisor: int, num_heads: int) -> int:
    """As many key heads as divide the heads evenly, near a `divisor`-th of them."""
    wanted = max(num_kv_heads // divisor, 1)
    return next(count for count in range(wanted, 0, -1) if num_heads % count == 0)


# Random numbers are drawn once and repeated: drawing gigabytes takes longer than multiplying.
_NUM_DRAWN = (1 << 20) + 7


@dataclass(frozen=True, slots=True, kw_only=True)
class NonGemmCosts:
    """What a pass does besides its matrix products. `norms` are those of layers, with the
    residual's additions and the gate."""

    attention: bool = False
    norms: bool = False
    head: bool = False

    @classmethod
    def named(cls, names: Sequence[str]) -> NonGemmCosts:
        """Raises ConfigError for a name that is none."""
        known = [item.name for item in fields(cls)]
        for name in names:
            if name not in known:
                raise ConfigError(f"passes have no cost {name!r}.", hint=did_you_mean(name, known))
        return cls(**dict.fromkeys(names, True))

    @property
    def fused(self) -> bool:
        """Whether q, k and v, and gate and up, are one product each."""
        return self.attention or self.norms

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(item.name for item in fields(self) if getattr(self, item.name))


def products(shape: GemmShape, *, fused: bool = False) -> Mapping[str, tuple[int, int]]:
    """(outputs, inputs) of a layer's matrix products, by name, in the order in which they run."""
    attended, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    hidden, ffn = shape.hidden_size, shape.ffn_size
    last = {"out": (hidden, attended)}
    if fused:
        first = {"qkv": (attended + 2 * kv, hidden)}
        return {**first, **last, "gate_up": (2 * ffn, hidden), "down": (hidden, ffn)}
    first = {"q": (attended, hidden), "k": (kv, hidden), "v": (kv, hidden)}
    return {**first, **last, "gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn)}


class GemmModel(PassDecoder):
    """Decoder of `shape` over a PagedKV that it owns, which attention alone reads and writes."""

    def __init__(
        self,
        shape: GemmShape,
        costs: NonGemmCosts,
        *,
        kernels: Kernels,
        placement: Placement,
        capacity: ModelCapacity,
    ) -> None:
        self.shape, self.costs, self.kernels = shape, costs, kernels
        self.config: LlamaConfig = shape.config()
        random = RandomWeights(kernels, placement)
        sizes = products(shape, fused=costs.fused)
        self._layers = [
            {name: random.packed(*size) for name, size in sizes.items()}
            for _ in range(shape.num_layers)
        ]
        sizes_of_head = (shape.vocab_size, shape.hidden_size)
        self._head = random.packed_head(*sizes_of_head) if costs.head else None
        num_weights = sum(one.num_in * one.num_out for one in self._packed())
        self._spec = replace(placement.spec(self.config), num_parameters=num_weights)
        self._start_D = torch.linspace(-9.0, 9.0, shape.hidden_size, device=placement.device).sin_()
        self._norm_D = torch.ones(shape.hidden_size, device=placement.device)
        num_positions = capacity.num_positions(self.config.max_tokens) if costs.attention else 1
        self._turns = turns_of(self.config, num_positions, placement.device)
        self._passes = Passes(
            self._spec, up_size=2 * shape.ffn_size, placement=placement, capacity=capacity
        )

    @property
    def streamed(self) -> tuple[Tensor, ...]:
        """The weights that every pass reads whole."""
        return tuple(one.data for one in self._packed())

    @property
    def weight_bytes(self) -> int:
        """As held, scales of quantised weights included."""
        return sum(one.nbytes for one in self._packed())

    def step(self, rows: Sequence[StepRow], needs: DraftNeeds) -> StepOutput:
        """At most `max_rows` tokens, of which no hidden states are kept."""
        if needs.hidden_layers:
            raise ContractError("it has no hidden states")
        return super().step(rows, needs)

    def embed(self, plan: PackedPlan, scratch: Scratch) -> None:
        """The same for every token: what it is costs nothing here."""
        del plan
        scratch.x_ND.copy_(self._start_D)

    def layer(self, depth: int, plan: PackedPlan, scratch: Scratch, kv: LayerKV) -> None:
        weights = self._layers[depth]
        if self.costs.fused:
            self._attend(weights, plan, scratch, kv)
            self._feed(weights, scratch)
        else:
            self._multiply(weights, scratch)

    def head(self, x_MD: Tensor, norm_MD: Tensor, logits_MV: Tensor) -> None:
        if self._head is None:
            logits_MV.zero_()
            return
        self.kernels.rms_norm(x_MD, self._norm_D, self.config.rms_norm_eps, norm_MD)
        self.kernels.linear(norm_MD, self._head, logits_MV)

    def forward(self) -> Forward | None:
        return None

    def _packed(self) -> list[PackedLinear]:
        own = [one for weights in self._layers for one in weights.values()]
        return own if self._head is None else [*own, self._head]

    def _multiply(self, weights: Mapping[str, PackedLinear], scratch: Scratch) -> None:
        """Seven products. What nobody reads is written where the real pass would write it."""
        linear, x_ND = self.kernels.linear, scratch.x_ND
        kv = weights["k"].num_out
        ffn = weights["gate"].num_out
        linear(x_ND, weights["q"], scratch.attended_NA)
        for index, name in enumerate("kv"):
            linear(x_ND, weights[name], _part(scratch.qkv_NE, index, kv))
        linear(scratch.attended_NA, weights["out"], x_ND)
        linear(x_ND, weights["gate"], _part(scratch.up_NU, 0, ffn))
        linear(x_ND, weights["up"], scratch.activated_NF)
        linear(scratch.activated_NF, weights["down"], x_ND)

    def _attend(
        self,
        weights: Mapping[str, PackedLinear],
        plan: PackedPlan,
        scratch: Scratch,
        kv: LayerKV,
    ) -> None:
        kernels, qkv_NE, attended_NA = self.kernels, scratch.qkv_NE, scratch.attended_NA
        kernels.linear(self._normed(scratch), weights["qkv"], qkv_NE)
        if self.costs.attention:
            k_GSD, v_GSD = kv
            kernels.rope_append(qkv_NE, *self._turns, plan, k_GSD, v_GSD)
            scale = self.shape.head_dim**-0.5
            kernels.attention(qkv_NE, k_GSD, v_GSD, plan, scale, attended_NA)
        else:
            attended_NA.copy_(qkv_NE[:, : attended_NA.shape[1]])
        kernels.linear(attended_NA, weights["out"], scratch.x_ND, accumulate=self.costs.norms)

    def _feed(self, weights: Mapping[str, PackedLinear], scratch: Scratch) -> None:
        kernels, up_NU, activated_NF = self.kernels, scratch.up_NU, scratch.activated_NF
        kernels.linear(self._normed(scratch), weights["gate_up"], up_NU)
        if self.costs.norms:
            kernels.silu_mul(up_NU, activated_NF)
        else:
            activated_NF.copy_(up_NU[:, : activated_NF.shape[1]])
        kernels.linear(activated_NF, weights["down"], scratch.x_ND, accumulate=self.costs.norms)

    def _normed(self, scratch: Scratch) -> Tensor:
        if not self.costs.norms:
            return scratch.x_ND
        eps = self.config.rms_norm_eps
        self.kernels.rms_norm(scratch.x_ND, self._norm_D, eps, scratch.norm_ND)
        return scratch.norm_ND


class RandomWeights:
    """Makes matrices whose products are about as large as what is multiplied."""

    def __init__(self, kernels: Kernels, placement: Placement) -> None:
        self._kernels, self._placement = kernels, placement
        rng = torch.Generator().manual_seed(0)
        self._drawn = torch.randn(_NUM_DRAWN, generator=rng)

    def packed(self, num_out: int, num_in: int) -> PackedLinear:
        return self._kernels.pack(self._weight(num_out, num_in))

    def packed_head(self, num_out: int, num_in: int) -> PackedLinear:
        pack = self._kernels.pack_head or self._kernels.pack
        return pack(self._weight(num_out, num_in))

    def _weight(self, num_out: int, num_in: int) -> Tensor:
        """Written in full: memory that was only allocated is read faster than real memory."""
        dtype, count = self._placement.dtype, num_out * num_in
        drawn = (self._drawn[:count] * num_in**-0.5).to(dtype)
        weight_OI = drawn.repeat(-(-count // _NUM_DRAWN))[:count].view(num_out, num_in)
        return weight_OI.to(self._placement.device)


def make_gemm(shape: GemmShape, costs: NonGemmCosts, options: LoadOptions) -> GemmModel:
    """In bfloat16 where no dtype is asked for. Raises ConfigError or MachineError for a bad wish.

    The room's pages and rows are those of any model's.
    """
    wanted = "bfloat16" if options.dtype == "auto" else options.dtype
    if wanted not in DTYPES:
        raise ConfigError(f"dtype: unknown value {wanted!r}.", hint=did_you_mean(wanted, DTYPES))
    device, dtype = pick_device(options.device), DTYPES[wanted]
    kernels = choose(
        device=device,
        dtype=dtype,
        force_reference=options.force_reference,
        threads=options.threads,
        quantise=options.quantise,
    )
    placement = Placement(shape.name, dtype, device, options.quantise)
    model = GemmModel(shape, costs, kernels=kernels, placement=placement, capacity=options.capacity)
    model.kernels = tried(kernels, model.config)
    return model


def _part(buffer_NX: Tensor, index: int, width: int) -> Tensor:
    """The `index`-th contiguous piece, of shape [N, width], of a contiguous buffer's memory."""
    num_rows = buffer_NX.shape[0]
    start = index * num_rows * width
    return buffer_NX.view(-1)[start : start + num_rows * width].view(num_rows, width)
