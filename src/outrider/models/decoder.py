"""The decoder that all families share: one packed forward pass over a stack of layers.

Prefill, decode and verification are one call over packed tokens of several sequences; the plan says
where each token reads and writes. A family is a `Stack`: it embeds tokens, runs layers and computes
logits. The residual x and all activations are float32; weights and KV have their own dtype. Scratch
memory is allocated once, for `max_rows` packed tokens.

Shapes:  N = packed tokens or W = tokens of the window, M = packed logits rows or retained tokens,
         D = hidden size or head size, V = vocabulary, E = fused q, k and v, A = heads x head size,
         F = FFN size, U = outputs of the FFN's first product (2F where it has a gate), K = captured
         layers, G = KV heads, S = slots, T = tokens, H = query heads, C = slots of whole pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Protocol, Self, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from outrider.cache.paged_kv import PagedKV
from outrider.cache.pages import ArenaSize
from outrider.cache.pool import Keep, kept_keys
from outrider.core.errors import ContractError
from outrider.core.protocols import CausalLM, DraftNeeds, StepOutput, StepRow
from outrider.core.spec import DecoderConfig, ModelSpec, RecurrentCapacity, RopeScaling
from outrider.kernels.native.forward import DecoderTraits, Forward, ForwardBuffers
from outrider.kernels.operators import Kernels
from outrider.kernels.plan import PackedPlan, floats, head_dim_of, sent
from outrider.models.configs import LayeredConfig
from outrider.models.layer_kinds import Norms
from outrider.models.weights import Placement


class Decoder(CausalLM, Protocol):
    """A CausalLM from a checkpoint. `kernels` are read at every call, so they can be replaced."""

    @property
    def kernels(self) -> Kernels: ...
    @kernels.setter
    def kernels(self, kernels: Kernels, /) -> None: ...
    @property
    def config(self) -> DecoderConfig: ...
    def twin(self) -> Decoder | None:
        """The same model for another lane. It shares weights and memory and has buffers of its own,
        so both may run at once for different sequences. None if the kernels do not allow that."""
        ...


@runtime_checkable
class SharedWeights(Protocol):
    """A Decoder whose weights other engines may use, with memory of their own."""

    def with_capacity(self, capacity: ModelCapacity, /) -> Decoder | None:
        """A Decoder with these weights and its own memory of `capacity`; None if unsupported."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCapacity:
    """Sizes of one model's memory and buffers: `num_slots` KV positions in all, with the states of
    `hidden_layers`; in a step, `max_rows` packed tokens and `max_logits` rows of logits. A hybrid
    also holds recurrent `states`. No sequence is longer than `window` (0: no such limit).

    With `frees_pages`, pages that no later token sees are freed, so no text is forked at an earlier
    length. Local layers then have memory of their own: for the windows of `num_texts` texts, each
    with at most `num_staged` more tokens. If `num_texts` is 0, they have as much as the others."""

    num_slots: int
    page_size: int = 32
    max_rows: int = 256
    max_logits: int = 256
    hidden_layers: tuple[int, ...] = ()
    states: RecurrentCapacity = field(default_factory=RecurrentCapacity)
    window: int = 0
    frees_pages: bool = False
    num_texts: int = 0
    num_staged: int = 0

    def num_positions(self, max_tokens: int, *, reach: int = 0) -> int:
        """Positions in the tables of a model with a window of `max_tokens` whose tokens see the
        last `reach` (0: all). Siblings of a tree may lie past the window, though no path does."""
        most = max_tokens if self.frees_pages and reach else min(max_tokens, self.num_slots)
        return min(most, self.window or most) + self.max_rows

    def num_local_slots(self, spec: ModelSpec) -> int:
        """KV positions of local layers, in whole pages; 0 if all layers have the same memory."""
        num_pages = -(-(spec.window + self.num_staged) // self.page_size) + 1
        num_slots = self.num_texts * num_pages * self.page_size
        apart = spec.local_layers and self.frees_pages and num_slots < self.num_slots
        return num_slots if apart else 0


@dataclass(frozen=True, slots=True)
class Scratch:
    """The buffers of one step, which the next step overwrites. They are float32, except `rows_ND`
    and buffers that only linears read, which have the weights' dtype."""

    rows_ND: Tensor
    x_ND: Tensor
    norm_ND: Tensor
    qkv_NE: Tensor
    attended_NA: Tensor
    up_NU: Tensor
    activated_NF: Tensor

    @classmethod
    def buffers(cls, spec: ModelSpec, up_size: int, placement: Placement, num_rows: int) -> Scratch:
        def buffer(width: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(num_rows, width, dtype=dtype, device=placement.device)

        return Scratch(
            rows_ND=buffer(spec.hidden_size, placement.dtype),
            x_ND=buffer(spec.hidden_size),
            norm_ND=buffer(spec.hidden_size),
            qkv_NE=buffer((spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim),
            attended_NA=buffer(spec.num_heads * spec.head_dim, placement.activations),
            up_NU=buffer(up_size),
            activated_NF=buffer(spec.ffn_size, placement.activations),
        )

    @property
    def normed(self) -> Tensor:
        """Buffer for the output of a norm that only linears read."""
        return self.rows_ND if self.activated_NF.dtype == self.rows_ND.dtype else self.norm_ND

    def first(self, num_rows: int) -> Self:
        return type(self)(*(getattr(self, buffer.name)[:num_rows] for buffer in fields(self)))

    @property
    def for_native(self) -> ForwardBuffers:
        """The buffers that a native pass writes to."""
        return ForwardBuffers(*(getattr(self, buffer.name) for buffer in fields(ForwardBuffers)))


# A layer's part of the arena: (k_GSD, v_GSD), the same tensor twice if values are keys.
LayerKV: TypeAlias = tuple[Tensor, Tensor]


class Head(Protocol):
    def head(self, x_MD: Tensor, norm_MD: Tensor, logits_MV: Tensor) -> None:
        """Compute logits from the last residuals; `norm_MD` is a buffer for the last norm."""
        ...


class Stack(Head, Protocol):
    """A family's arithmetic. Every call reads and writes `scratch`."""

    def embed(self, plan: PackedPlan, scratch: Scratch) -> None:
        """Leave the first residual in `x_ND`."""
        ...

    def layer(self, depth: int, plan: PackedPlan, scratch: Scratch, kv: LayerKV) -> None:
        """Add layer `depth` to `x_ND`; `kv` is its part of the arena, (k_GSD, v_GSD)."""
        ...

    def forward(self) -> Forward | None:
        """One native call for all of the above; None if the kernels have no such call."""
        ...


class Passes:
    """Runs the passes of a model's stack over a PagedKV that it owns, or over the given `kv`.

    `logits_MV` is the buffer for the logits of one step, which returns its first rows. `announce`
    is called before a pass that is no native call, with the plan and the rows that want logits.
    """

    announce: Callable[[PackedPlan, Tensor], None] | None = None

    def __init__(
        self,
        spec: ModelSpec,
        *,
        up_size: int,
        placement: Placement,
        capacity: ModelCapacity,
        kv: PagedKV | None = None,
    ) -> None:
        self._capacity = capacity
        self.kv = kv or PagedKV(
            spec if capacity.frees_pages else replace(spec, reach=0),
            dtype=placement.dtype,
            device=placement.device,
            size=ArenaSize(capacity.num_slots, capacity.page_size, capacity.num_local_slots(spec)),
            num_hidden=len(capacity.hidden_layers),
        )
        self._views: dict[int, Scratch] = {}
        self._make_buffers = lambda: (
            Scratch.buffers(spec, up_size, placement, capacity.max_rows),
            torch.empty(capacity.max_logits, spec.vocab_size, device=placement.device),
        )
        self.scratch, self.logits_MV = self._make_buffers()

    def twin(self) -> Passes:
        """Passes over the same arena, with buffers of their own, for other sequences at once."""
        other = copy(self)
        other._views = {}
        other.scratch, other.logits_MV = self._make_buffers()
        return other

    def for_drafts(self) -> Passes:
        """A `twin` for a model that drafts in this one's memory; it stores no hidden states."""
        other = self.twin()
        other._capacity = replace(self._capacity, hidden_layers=())
        return other

    def view(self, num_rows: int) -> Scratch:
        """The first `num_rows` rows of the buffers, at most `max_rows` of them."""
        if num_rows > self._capacity.max_rows:
            raise ContractError("more rows than max_rows")
        return self._view(num_rows)

    def step(self, stack: Stack, rows: Sequence[StepRow], needs: DraftNeeds) -> StepOutput:
        """Run at most `max_rows` tokens. Hidden states of the capacity's layers are stored in the
        arena. If `needs` names other layers, their states are returned with the logits instead."""
        if not 0 < sum(len(row.tokens) for row in rows) <= self._capacity.max_rows:
            raise ContractError("a step has 1 to max_rows tokens")
        kept = self._capacity.hidden_layers
        returned = () if needs.hidden_layers == kept else needs.hidden_layers
        with torch.inference_mode():
            plan, forward = self.kv.plan(rows), stack.forward()
            wanted_M, logits_MV = self.wanted_rows(rows)
            if forward is not None and not returned:
                forward(plan, wanted_M, logits_MV)
                return StepOutput(logits_MV, None)
            if self.announce is not None:
                self.announce(plan, wanted_M)
            hidden_NKD = self._forward(stack, plan, returned or kept)
            if kept and not returned and hidden_NKD is not None:
                self.kv.keep_hidden(plan.slots_N, hidden_NKD)
                hidden_NKD = None
            self.logits(stack, plan, wanted_M, logits_MV)
            return StepOutput(logits_MV, hidden_NKD)

    def follow(self, stack: Stack, plan: PackedPlan, wanted_M: Tensor) -> None:
        """Run a pass that another rank planned, over the same slots."""
        logits_MV, forward = self.logits_MV[: len(wanted_M)], stack.forward()
        with torch.inference_mode():
            if forward is not None:
                forward(plan, wanted_M, logits_MV)
                return
            self._forward(stack, plan, ())
            self.logits(stack, plan, wanted_M, logits_MV)

    def _forward(
        self, stack: Stack, plan: PackedPlan, hidden_layers: tuple[int, ...]
    ) -> Tensor | None:
        """Leave the last residual in `x_ND`; the captured layers in the order named."""
        scratch = self._view(plan.num_tokens)
        stack.embed(plan, scratch)
        plans = zip(self.kv.by_layer(plan), self.kv.layers, strict=True)
        layers = (
            partial(stack.layer, depth, own, scratch, kv) for depth, (own, kv) in enumerate(plans)
        )
        return residuals(layers, scratch.x_ND, hidden_layers)

    def logits(self, stack: Head, plan: PackedPlan, wanted_M: Tensor, logits_MV: Tensor) -> None:
        """Compute the logits of the rows that want them. Overwrites the residual unless all do."""
        scratch, num_wanted = self._view(plan.num_tokens), wanted_M.shape[0]
        if not num_wanted:
            return
        x_MD, norm_MD = scratch.x_ND, scratch.norm_ND
        if num_wanted < x_MD.shape[0]:
            part = self._view(num_wanted)
            torch.index_select(x_MD, 0, wanted_M, out=part.norm_ND)
            x_MD, norm_MD = part.norm_ND, part.x_ND
        stack.head(x_MD, norm_MD, logits_MV)

    def wanted_rows(self, rows: Sequence[StepRow]) -> tuple[Tensor, Tensor]:
        """Packed indices of the rows that want logits, int32, and the buffer for these logits."""
        wanted = wanted_tokens(rows)
        if len(wanted) > self._capacity.max_logits:
            raise ContractError("more rows want logits than max_logits")
        wanted_M = sent(torch.tensor(wanted, dtype=torch.int32), self.logits_MV.device)
        return wanted_M, self.logits_MV[: len(wanted)]

    def _view(self, num_rows: int) -> Scratch:
        view = self._views[num_rows] = self._views.get(num_rows) or self.scratch.first(num_rows)
        return view


def decoder_traits(config: LayeredConfig) -> DecoderTraits:
    """The traits of a family that the native call for all layers reads."""
    traits = config.traits
    return DecoderTraits(
        embedding_scale=traits.embedding_scale,
        residual_scale=traits.residual_scale,
        logit_scale=traits.logit_scale,
        logit_cap=traits.logit_cap,
        centred=traits.centred,
        parallel=traits.norms is Norms.PARALLEL,
        whole_heads=traits.whole_heads,
        gate=traits.gate.value,
        norm_bias=traits.norm_bias,
        after_eps=traits.after_eps,
        qkv_clip=traits.qkv_clip,
        normed_embedding=traits.normed_embedding,
    )


def residuals(
    layers: Iterable[Callable[[], None]], x_ND: Tensor, hidden_layers: tuple[int, ...]
) -> Tensor | None:
    """Run all `layers`, which add to `x_ND`; return hidden_NKD of `hidden_layers`, if any."""
    captured: dict[int, Tensor] = {}
    depth = -1
    for depth, run in enumerate(layers):
        if depth in hidden_layers:
            captured[depth] = x_ND.clone()
        run()
    if not hidden_layers:
        return None
    captured[depth + 1] = x_ND
    return torch.stack([captured[depth] for depth in hidden_layers], dim=1)


class PassDecoder(Stack):
    """A CausalLM that is the stack of its own passes."""

    kernels: Kernels
    _spec: ModelSpec
    _score_scale: float
    _passes: Passes

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def state(self) -> PagedKV:
        return self._passes.kv

    @property
    def scratch(self) -> Scratch:
        """The buffers of a step; native rounds make buffers of their own in the same sizes."""
        return self._passes.scratch

    def twin(self) -> Self | None:
        if self.kernels.twin is None:
            return None
        other = copy(self)
        other.kernels, other._passes = self.kernels.twin(), self._passes.twin()
        return other

    def compact(self, seq_id: int, keep: Keep) -> None:
        """Drop keys of the text that `seq_id` has committed (`decoder.compact`)."""
        scratch = self._passes.view(keep.window)
        compact(self, self.state, scratch, seq_id, keep, scale=self._score_scale)

    def step(self, rows: Sequence[StepRow], needs: DraftNeeds) -> StepOutput:
        """Run at most `max_rows` tokens. Hidden layer i is the residual after i layers, 0 to L."""
        return self._passes.step(self, rows, needs)


def wanted_tokens(rows: Sequence[StepRow]) -> list[int]:
    """Packed indices of the tokens whose logits are requested."""
    wanted: list[int] = []
    start = 0
    for row in rows:
        end = start + len(row.tokens)
        wanted += range(start + row.logits_from, end)
        start = end
    return wanted


def compact(
    stack: Stack, kv: PagedKV, scratch: Scratch, seq_id: int, keep: Keep, *, scale: float
) -> None:
    """Retain only those of the committed keys and values of `seq_id` that `keep` chooses.

    `scratch` has a row for each token of the window. Attention scores are multiplied by `scale`.
    Raises CapacityError, with nothing changed, if the sequence shares its pages and too few are
    free for a copy.

    The choice needs the queries of the prompt's end, and no cache holds queries. So the last tokens
    go through the layers again, over a copy of the sequence's keys and values, layer by layer; each
    layer's queries and keys then decide (cache/pool.py). Nothing is written to the KV cache
    before all layers have decided. The cost is a pass of as many rows as the window has, and one
    copy of a layer's memory at a time.
    """
    tokens, slots_T = kv.tokens(seq_id), kv.slots(seq_id)
    first = len(tokens) - keep.window
    with torch.inference_mode():
        plan = _again(tokens[first:], first, kv.page_size, slots_T.device)
        stack.embed(plan, scratch)
        kept: list[Tensor] = []
        for depth, (k_GSD, v_GSD) in enumerate(kv.layers):
            k_GCD = v_GCD = _copied(k_GSD, slots_T, kv.page_size)
            if v_GSD is not k_GSD:
                v_GCD = _copied(v_GSD, slots_T, kv.page_size)
            stack.layer(depth, plan, scratch, (k_GCD, v_GCD))
            positions_GM = _chosen(scratch, k_GCD[:, : len(tokens)], keep, scale)
            kept.append(_gathered(k_GSD, v_GSD, slots_T[positions_GM]))
        kv.replace(seq_id, torch.stack(kept))


def _again(tokens: Sequence[int], first: int, page_size: int, device: torch.device) -> PackedPlan:
    """A plan for `tokens`, from position `first` on, over a copy whose slots are in order."""
    end = first + len(tokens)
    positions_N = torch.arange(first, end, dtype=torch.int32, device=device)
    pages_P = torch.arange(-(-end // page_size), dtype=torch.int32, device=device)
    return PackedPlan(
        page_size=page_size,
        tokens_N=torch.tensor(tokens, dtype=torch.int32, device=device),
        positions_N=positions_N,
        slots_N=positions_N,
        seq_N=torch.zeros_like(positions_N),
        visible_N=positions_N + 1,
        pages_BP=pages_P[None],
    )


def _copied(all_GSD: Tensor, slots_T: Tensor, page_size: int) -> Tensor:
    num_slots = -(-len(slots_T) // page_size) * page_size
    copy_GCD = all_GSD.new_zeros(all_GSD.shape[0], num_slots, all_GSD.shape[2])
    copy_GCD[:, : len(slots_T)] = all_GSD[:, slots_T]
    return copy_GCD


def _chosen(scratch: Scratch, k_GTD: Tensor, keep: Keep, scale: float) -> Tensor:
    """Positions that each KV head retains, chosen by the rotated queries in `scratch`."""
    num_kv_heads, head_dim = k_GTD.shape[0], head_dim_of(k_GTD)
    heads_WED = scratch.qkv_NE.view(keep.window, -1, head_dim)
    return kept_keys(heads_WED[:, : -2 * num_kv_heads], floats(k_GTD), keep, scale)


def _gathered(k_GSD: Tensor, v_GSD: Tensor, slots_GM: Tensor) -> Tensor:
    """The rows of each head, of shape [2, G, M, D], or [1, G, M, D] if values are keys."""
    heads_G1 = torch.arange(k_GSD.shape[0], device=k_GSD.device)[:, None]
    kinds = (k_GSD,) if v_GSD is k_GSD else (k_GSD, v_GSD)
    return torch.stack([rows_GSD[heads_G1, slots_GM] for rows_GSD in kinds])


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options of a load. `auto` means the checkpoint's own dtype, and the first available device of
    cuda, mps and cpu. `quantise` is none, int8 or int4 and applies to the matrices of linears;
    other weights keep their dtype. `kv_dtype`, of keys and values, is auto (as `dtype`) or int8.
    `rope` stretches rotary positions."""

    capacity: ModelCapacity
    dtype: str = "auto"
    device: str = "auto"
    force_reference: bool = False
    threads: int = 0
    quantise: str = "none"
    kv_dtype: str = "auto"
    rope: RopeScaling = field(default_factory=RopeScaling)
