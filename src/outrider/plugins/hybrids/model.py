"""Hybrids as one decoder: layers that attend, and layers with a recurrence, or both at once.

A layer is x += mix(norm(x)) and then x += feed(norm(x)), where a mix is attention
(models/llama.py), a gated delta rule (Qwen3-Next, Qwen3.5), Mamba-2 (Granite 4, Nemotron H), a
gated short convolution (LFM2), or attention plus Mamba-2 (Falcon H1). Layers of Nemotron H are only
one of these, or only an FFN. Each kind of recurrence has a reader and its products, around the
operator `delta` (kernels/reference/delta.py):

    u, z, b, a = first(y);        o = delta(silu(conv(u)), b, a);         out(norm(o) * silu(z))
    z, x, B, C, dt = first(y);    o = scan(silu(conv(x, B, C)), dt);      out(norm(o * silu(z)))
    b, c, x = first(y);           o = conv(b * x);                        out(c * o)

The recurrence runs token by token in every pass, prompts included: another order of sums would
round differently, and a verification must give the bits of plain decoding.

Shapes:  N = packed tokens, M = packed logits rows, V = vocabulary or values, D and I = hidden
         size, D also a group of heads, K = captured layers, P and O = outputs of a recurrent
         layer's first product and of its recurrence, H = heads, J = taps, C = channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outrider.cache.paged_kv import PagedKV
from outrider.cache.pages import ArenaSize
from outrider.core.errors import ContractError, given
from outrider.core.protocols import DraftNeeds, StepOutput, StepRow
from outrider.core.spec import ModelSpec
from outrider.kernels.native.forward import (
    ForwardParts,
    LayerWeights,
    NativeForward,
    Recurrence,
    RuleBuffers,
)
from outrider.kernels.native.layers import NativeDelta
from outrider.kernels.operators import Kernels, for_scans
from outrider.kernels.plan import PackedPlan
from outrider.kernels.reference.delta import DeltaWeights
from outrider.models.configs import HybridConfig, Mechanism
from outrider.models.decoder import ModelCapacity, Passes, Scratch, decoder_traits, residuals
from outrider.models.llama import LayerOperators
from outrider.models.llama_weights import (
    WHOLE,
    Tables,
    family_names,
    read_attention,
    read_layer,
    read_tables,
)
from outrider.models.rope import still_turns, turns_of
from outrider.models.weights import (
    VISION_PREFIXES,
    Placement,
    WeightReader,
    Weights,
)
from outrider.plugins.hybrids.memory import HybridPlan, HybridState

# Prefixes of tensors for pictures or multi-token prediction, which are not read here.
UNREAD_PREFIXES = ("mtp.", *VISION_PREFIXES)


def read_rule(reader: WeightReader, config: HybridConfig, prefix: str) -> Recurrence:
    """Read the recurrence of the layer `prefix`. Qwen3-Next stores the first product key head by
    key head (query, key, values and gates), Qwen3.5 as one matrix for each purpose. Raises
    CheckpointError for a tensor that is missing or has another shape."""
    delta, hidden, name = config.delta, config.hidden_size, f"{prefix}linear_attn."
    heads, channels, values = delta.num_heads, delta.num_channels, config.value_size
    if f"{name}in_proj_qkvz.weight" in reader:
        stored = {f"{name}in_proj_qkvz": channels + values, f"{name}in_proj_ba": 2 * heads}
        first = reader.linear(stored, hidden, _by_purpose(config))
    else:
        purposes = {"qkv": channels, "z": values, "b": heads, "a": heads}
        named = {f"{name}in_proj_{key}": num_out for key, num_out in purposes.items()}
        first = reader.linear(named, hidden)
    conv_C1J = reader.vector(f"{name}conv1d.weight", channels, 1, delta.num_taps)
    weights = DeltaWeights(
        conv_JC=conv_C1J[:, 0].T.contiguous(),
        rate_H=reader.vector(f"{name}A_log", heads).exp_(),
        dt_bias_H=reader.vector(f"{name}dt_bias", heads),
        num_key_heads=delta.num_key_heads,
        key_dim=delta.key_dim,
    )
    # Alone among the norms, this one is not stored minus 1.
    norm_V = reader.vector(f"{name}norm.weight", delta.value_dim)
    out = reader.linear({f"{name}out_proj": hidden}, values)
    return Recurrence(first, weights, out, norm_V)


def _by_purpose(config: HybridConfig) -> Tensor:
    """order_P: the rows, stored key head by key head, in the order of q, k, v, z, b and a."""
    delta = config.delta
    shared = delta.num_heads // delta.num_key_heads
    values = shared * delta.value_dim
    num_qkvz = delta.num_channels + config.value_size
    qkvz = torch.arange(num_qkvz).view(delta.num_key_heads, -1)
    gates = num_qkvz + torch.arange(2 * delta.num_heads).view(delta.num_key_heads, -1)
    parts = torch.split(qkvz, [delta.key_dim, delta.key_dim, values, values], dim=1)
    halves = torch.split(gates, [shared, shared], dim=1)
    return torch.cat([part.flatten() for part in (*parts, *halves)])


def mix_rule(
    kernels: Kernels,
    config: HybridConfig,
    recurrence: Recurrence,
    reads_NI: Tensor,
    buffers: Sequence[Tensor],
    recur: Callable[[Tensor, Tensor], None],
) -> Tensor:
    """The input of the last product, [N, O]. `recur` is the operator on a first product; `buffers`
    are a first product, an output, and an output next to its gate."""
    channels, values = config.delta.num_channels, config.value_size
    first_NP, out_NO, gated_N2O = buffers
    kernels.linear(reads_NI, recurrence.first, first_NP)
    recur(first_NP, out_NO)
    flat = (len(out_NO) * config.delta.num_heads, config.delta.value_dim)
    normed_NO = torch.empty_like(out_NO)
    norm_V = given(recurrence.norm_V, "norm of a delta rule")
    kernels.rms_norm(out_NO.view(flat), norm_V, config.rms_norm_eps, normed_NO.view(flat))
    gated_N2O[:, :values] = first_NP[:, channels : channels + values]
    gated_N2O[:, values:] = _as_stored(config, normed_NO)
    kernels.silu_mul(gated_N2O, out_NO)
    return out_NO


def _as_stored(config: HybridConfig, heads_NO: Tensor) -> Tensor:
    """Outputs of value heads in the order in which the last product reads them."""
    delta = config.delta
    if not config.tiled_values:
        return heads_NO
    heads = heads_NO.view(len(heads_NO), delta.num_key_heads, -1, delta.value_dim)
    return heads.transpose(1, 2).reshape(heads_NO.shape)


def read_gated(reader: WeightReader, config: HybridConfig, prefix: str) -> Recurrence:
    """Read the convolution of the layer `prefix`. Raises CheckpointError for a tensor that is
    missing or has another shape."""
    channels, taps, mixers = config.delta.num_channels, config.delta.num_taps, config.mixers
    name, hidden = f"{prefix}conv.", config.hidden_size
    first, last = {f"{name}in_proj": config.first_size}, {f"{name}out_proj": hidden}
    conv_C1J = reader.vector(f"{name}conv.weight", channels, 1, taps)
    conv_JC = conv_C1J[:, 0].T.contiguous()
    weights = DeltaWeights(
        conv_JC=conv_JC,
        rate_H=conv_JC.new_empty(0),
        dt_bias_H=conv_JC.new_empty(0),
        num_key_heads=0,
        key_dim=0,
        conv_bias_C=reader.bias({f"{name}conv": channels}, present=mixers.conv_bias),
    )
    return Recurrence(
        reader.linear(first, hidden),
        weights,
        reader.linear(last, channels),
        first_bias_P=reader.bias(first, present=mixers.in_bias),
        out_bias_D=reader.bias(last, present=mixers.out_bias),
    )


def mix_gated(
    kernels: Kernels,
    config: HybridConfig,
    recurrence: Recurrence,
    reads_NI: Tensor,
    buffers: Sequence[Tensor],
    recur: Callable[[Tensor, Tensor], None],
) -> Tensor:
    """The input of the last product, [N, C], as `mix_rule` returns it."""
    channels = config.delta.num_channels
    first_NP, out_NC, gated_N2C = buffers
    kernels.linear(reads_NI, recurrence.first, first_NP)
    if recurrence.first_bias_P is not None:
        first_NP.add_(recurrence.first_bias_P)
    b_NC, c_NC, x_NC = torch.split(first_NP, channels, dim=1)
    inputs_NC = torch.mul(b_NC, x_NC, out=gated_N2C[:, :channels])
    recur(inputs_NC, out_NC)
    return out_NC.mul_(c_NC)


def read_mamba(reader: WeightReader, config: HybridConfig, prefix: str) -> Recurrence:
    """Read the recurrence of the layer `prefix`. Raises CheckpointError for a tensor that is
    missing or has another shape."""
    delta, mixers, values = config.delta, config.mixers, config.value_size
    name, hidden, heads = f"{prefix}mamba.", config.hidden_size, delta.num_heads
    first, last = {f"{name}in_proj": config.first_size}, {f"{name}out_proj": hidden}
    convolved = {f"{name}conv1d": delta.num_channels}
    conv_C1J = reader.vector(f"{name}conv1d.weight", delta.num_channels, 1, delta.num_taps)
    weights = DeltaWeights(
        conv_JC=conv_C1J[:, 0].T.contiguous(),
        rate_H=reader.vector(f"{name}A_log", heads).exp_(),
        dt_bias_H=reader.vector(f"{name}dt_bias", heads),
        num_key_heads=delta.num_key_heads,
        key_dim=delta.key_dim,
        conv_bias_C=reader.bias(convolved, present=mixers.conv_bias),
        skip_H=reader.vector(f"{name}D", heads),
    )
    out_bias_D = reader.bias(last, present=mixers.out_bias)
    return Recurrence(
        reader.linear(first, hidden),
        weights,
        reader.linear(last, values),
        norm_V=reader.vector(f"{name}norm.weight", values) if mixers.has_norm else None,
        first_bias_P=reader.bias(first, present=mixers.in_bias),
        scale_P=_scales(config, weights.skip_H),
        out_bias_D=None if out_bias_D is None else out_bias_D * mixers.out_scale,
    )


def _scales(config: HybridConfig, like: Tensor | None) -> Tensor | None:
    """The factors of the columns of the first product; None if it has none."""
    scales, delta = config.mixers.part_scales, config.delta
    if not scales or like is None:
        return None
    keys = delta.num_key_heads * delta.key_dim
    sizes = (config.value_size, config.value_size, keys, keys, delta.num_heads)
    parts = zip(sizes, scales, strict=True)
    return torch.cat([like.new_full((size,), scale) for size, scale in parts])


def mix_mamba(
    kernels: Kernels,
    config: HybridConfig,
    recurrence: Recurrence,
    reads_NI: Tensor,
    buffers: Sequence[Tensor],
    recur: Callable[[Tensor, Tensor], None],
) -> Tensor:
    """The input of the last product, [N, O], as `mix_rule` returns it."""
    mixers, values = config.mixers, config.value_size
    first_NP, out_NO, gated_N2O = buffers
    reads_NI = reads_NI if mixers.in_scale == 1 else reads_NI * mixers.in_scale
    kernels.linear(reads_NI, recurrence.first, first_NP)
    if recurrence.first_bias_P is not None:
        first_NP.add_(recurrence.first_bias_P)
    if recurrence.scale_P is not None:
        first_NP.mul_(recurrence.scale_P)
    recur(first_NP[:, values:], out_NO)
    if mixers.norm_first:
        _norm(kernels, config, recurrence, out_NO)
    gated_N2O[:, :values] = first_NP[:, :values]
    gated_N2O[:, values:] = out_NO
    kernels.silu_mul(gated_N2O, out_NO)
    if not mixers.norm_first:
        _norm(kernels, config, recurrence, out_NO)
    return out_NO if mixers.out_scale == 1 else out_NO.mul_(mixers.out_scale)


def _norm(kernels: Kernels, config: HybridConfig, recurrence: Recurrence, out_NO: Tensor) -> None:
    """Norm each group of heads by itself, in place, if the layer has a norm."""
    if recurrence.norm_V is None:
        return
    groups_ND = out_NO.view(len(out_NO) * config.delta.num_key_heads, -1)
    ones_D = torch.ones_like(recurrence.norm_V[: groups_ND.shape[1]])
    kernels.rms_norm(groups_ND, ones_D, config.rms_norm_eps, groups_ND)
    out_NO.mul_(recurrence.norm_V)


# The reader of each kind of recurrence, and its computation.
_MIXERS = {
    Mechanism.DELTA: (read_rule, mix_rule),
    Mechanism.MAMBA: (read_mamba, mix_mamba),
    Mechanism.CONVOLUTION: (read_gated, mix_gated),
}


class HybridModel:
    """CausalLM over a HybridState that it owns. Reads every weight when built."""

    def __init__(
        self,
        config: HybridConfig,
        weights: Weights,
        *,
        kernels: Kernels,
        placement: Placement,
        capacity: ModelCapacity,
    ) -> None:
        kernels = kernels if config.mechanism is Mechanism.DELTA else for_scans(kernels)
        self.config, self.kernels = config, kernels
        self._placement, self._capacity = placement, capacity
        self._spec = placement.spec(config)
        # On a device, states are reserved before the weights fill its memory.
        self._state = HybridState(self._arena(), config.delta, capacity.states, placement.device)
        names = family_names(weights, config.family)
        reader = WeightReader(weights, kernels, placement, text=names)
        self._tables = read_tables(reader, config)
        self._layers = [self._read_layer(reader, index) for index in range(config.num_layers)]
        # The number of each layer among those that attend, and among those that recur.
        self._attending = {depth: number for number, depth in enumerate(config.attention_layers)}
        recurrent = filter(config.recurs, range(config.num_layers))
        self._recurrent = {depth: number for number, depth in enumerate(recurrent)}
        weights.check_all_taken(unread=UNREAD_PREFIXES)
        turns = turns_of(config, capacity.num_positions(config.max_tokens), placement.device)
        still = config.layer_kind(config.attention_layers[0]).rope is None
        self._operators = LayerOperators(config, still_turns(turns) if still else turns)
        self._passes = Passes(
            self._spec,
            up_size=config.traits.gate.num_up * config.ffn_size,
            placement=placement,
            capacity=capacity,
            kv=self._state.kv,
        )
        values = config.value_size
        # Buffers of a recurrence: its first product, its output, and that next to the gate.
        self._recurred = [
            torch.empty(capacity.max_rows, width, device=placement.device)
            for width in (config.first_size, values, 2 * values)
        ]
        self._made_by, self._forward = kernels, self._make_forward()

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def state(self) -> HybridState:
        return self._state

    @property
    def tables(self) -> Tables:
        """Embedding, last norm and output head, for drafters that share them."""
        return self._tables

    def twin(self) -> HybridModel | None:
        if self.kernels.twin is None:
            return None
        other = copy(self)
        other.kernels = self.kernels.twin()
        other._passes = self._passes.twin()
        other._recurred = [torch.empty_like(buffer) for buffer in self._recurred]
        other._made_by, other._forward = other.kernels, other._make_forward()
        return other

    def _make_forward(self) -> NativeForward | None:
        """The native call for a whole pass; None if kernels or layers have none."""
        config, tables, kernels = self.config, self._tables, self.kernels
        if kernels.forward is None or config.by_operator:
            return None
        kv, scratch = self._state.kv, self._passes.scratch
        first_NP, out_NO, gated_N2O = self._recurred
        forward = kernels.forward(
            ForwardParts(
                embedding_VD=tables.embedding,
                final_norm_D=tables.norm_D,
                head=tables.head,
                head_bias_V=tables.head_bias_V,
                turns=[self._operators.turns] * len(self._layers),
                layers=self._layers,
                # Layers without attention read none.
                kv=[kv.layers[self._attending.get(n, 0)] for n in range(len(self._layers))],
                buffers=scratch.for_native,
                eps=config.rms_norm_eps,
                scale=config.scale,
                ffn_size=config.ffn_size,
                hidden_SKD=kv.hidden_SKD,
                hidden_layers=self._capacity.hidden_layers,
                traits=decoder_traits(config),
                gated_NA=torch.empty_like(scratch.attended_NA),
                rules=RuleBuffers(
                    first_NP, out_NO, gated_N2O, config.mechanism.value, config.tiled_values
                ),
            )
        )
        return forward if isinstance(forward, NativeForward) else None

    def step(self, rows: Sequence[StepRow], needs: DraftNeeds) -> StepOutput:
        """Run at most `max_rows` tokens. Hidden layer i is the residual after i layers, 0 to L.
        Hidden states of the capacity's layers are stored in the arena, others are returned.

        Texts without a stored state at their length are read again first; these passes count too.
        """
        if not 0 < sum(len(row.tokens) for row in rows) <= self._capacity.max_rows:
            raise ContractError("a step has 1 to max_rows tokens")
        kept = self._capacity.hidden_layers
        returned = () if needs.hidden_layers == kept else needs.hidden_layers
        num_passes = 1
        with torch.inference_mode():
            while (again := self._state.overdue(rows, self._capacity.max_rows)) is not None:
                with self._state.reading_again(*again) as plan:
                    self._run(plan, ())
                num_passes += 1
            with self._state.planning(rows) as plan:
                wanted_M, logits_MV = self._passes.wanted_rows(rows)
                if not returned and (forward := self.native_pass()) is not None:
                    self._in_one_call(forward, plan, wanted_M, logits_MV)
                    return StepOutput(logits_MV, None, num_passes)
                hidden_NKD = self._run(plan, returned or kept)
                if kept and not returned and hidden_NKD is not None:
                    self._state.kv.keep_hidden(plan.packed.slots_N, hidden_NKD)
                    hidden_NKD = None
                self._passes.logits(self, plan.packed, wanted_M, logits_MV)
        return StepOutput(logits_MV, hidden_NKD, num_passes)

    def native_pass(self) -> NativeForward | None:
        """The native call for a whole pass; None if there is none, or other kernels replace those
        that it was made with."""
        return self._forward if self.kernels is self._made_by else None

    def _in_one_call(
        self, forward: NativeForward, plan: HybridPlan, wanted_M: Tensor, logits_MV: Tensor
    ) -> None:
        delta = self.kernels.delta
        if not isinstance(delta, NativeDelta):
            raise ContractError("delta is no NativeDelta")
        forward.follow(delta, plan.runs, self._state.cells)
        forward(plan.packed, wanted_M, logits_MV)

    def _run(self, plan: HybridPlan, hidden_layers: tuple[int, ...]) -> Tensor | None:
        """Leave the last residual in `x_ND`; the captured layers in the order named."""
        scratch = self._passes.view(plan.packed.num_tokens)
        self.embed(plan.packed, scratch)
        layers = (partial(self._layer, depth, plan, scratch) for depth in range(len(self._layers)))
        return residuals(layers, scratch.x_ND, hidden_layers)

    def embed(self, plan: PackedPlan, scratch: Scratch) -> None:
        self._operators.embed(self.kernels, self._tables, plan, scratch)

    def head(self, x_MD: Tensor, norm_MD: Tensor, logits_MV: Tensor) -> None:
        self._operators.head(self.kernels, self._tables, x_MD, norm_MD, logits_MV)

    def _layer(self, depth: int, plan: HybridPlan, scratch: Scratch) -> None:
        kernels, operators, layer = self.kernels, self._operators, self._layers[depth]
        reads = operators.normed(kernels, layer, layer.attention_norm_D, scratch)
        if layer.recurrence is not None:
            self._recur(layer.recurrence, depth, reads, plan, scratch)
        if layer.qkv is not None:
            kv = self._state.kv.layers[self._attending[depth]]
            operators.attend(kernels, layer, reads, plan.packed, scratch, kv)
        if self.config.feeds(depth):
            operators.feed(kernels, layer, reads, scratch)

    def _recur(
        self,
        recurrence: Recurrence,
        depth: int,
        reads_ND: Tensor,
        plan: HybridPlan,
        scratch: Scratch,
    ) -> None:
        kernels, config, index = self.kernels, self.config, self._recurrent[depth]

        def recur(first_NP: Tensor, out_NO: Tensor) -> None:
            kernels.delta(first_NP, recurrence.delta, plan.runs, self._state.cells, index, out_NO)

        buffers = [buffer[: len(reads_ND)] for buffer in self._recurred]
        _, mix = _MIXERS[config.mechanism]
        mixed_NO = mix(kernels, config, recurrence, reads_ND, buffers, recur)
        product = (mixed_NO, recurrence.out, recurrence.out_bias_D)
        self._operators.add(kernels, scratch, product, None)

    def _read_layer(self, reader: WeightReader, index: int) -> LayerWeights:
        config = self.config

        def read_mixers(prefix: str) -> Mapping[str, Any]:
            read, _ = _MIXERS[config.mechanism]
            attends, recurs = index in config.attention_layers, config.recurs(index)
            found = dict(read_attention(reader, config, prefix, index, WHOLE)) if attends else {}
            return found | ({"recurrence": read(reader, config, prefix)} if recurs else {})

        return read_layer(reader, config, index, mixer=read_mixers)

    def _arena(self) -> PagedKV:
        """The arena of the attention layers, with one page that belongs to no sequence."""
        placement, capacity = self._placement, self._capacity
        return PagedKV(
            replace(self._spec, num_layers=len(self.config.attention_layers)),
            dtype=placement.dtype,
            device=placement.device,
            size=ArenaSize(capacity.num_slots + capacity.page_size, capacity.page_size),
            num_hidden=len(capacity.hidden_layers),
        )
