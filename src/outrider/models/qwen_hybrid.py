"""Qwen3-Next and Qwen3.5 (hybrid): a few attention layers, the others gated delta recurrences.

A layer is x += mix(norm(x)) and then x += feed(norm(x)). An attention layer rotates only a part of
each head, and scales its heads' outputs by a sigmoid of a gate. A recurrent layer is a gated delta
rule (kernels/reference/delta.py) whose output is normed per head and scaled by silu(z):

    c, z, b, a = first(x);   o = delta(silu(conv(c)), b, a);   x += out(norm(o) * silu(z)).

The recurrence runs token by token in every pass, prompts included: another order of sums would
round differently, and a verification must give the bits of plain decoding.

Shapes:  N = packed tokens, M = packed logits rows, V = vocabulary or value size, D = hidden size,
         A = heads x head size, O and P = rows of a recurrent layer's first and second product, K =
         captured layers, H = head size or heads, E = fused q, k, v, J = taps, C = channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outrider.cache.hybrid import HybridPlan, HybridState
from outrider.cache.paged_kv import PagedKV
from outrider.cache.pages import ArenaSize
from outrider.core.errors import ContractError
from outrider.core.protocols import DraftNeeds, StepOutput, StepRow
from outrider.core.spec import ModelSpec
from outrider.kernels.native.forward import LayerWeights, Recurrence
from outrider.kernels.operators import Kernels
from outrider.kernels.plan import PackedPlan
from outrider.kernels.reference.delta import DeltaWeights
from outrider.models.decoder import ModelCapacity, Passes, Scratch, residuals
from outrider.models.families import QwenHybridConfig
from outrider.models.llama import LayerOperators
from outrider.models.llama_weights import Tables, read_layer, read_tables
from outrider.models.rope import turns_of
from outrider.models.weights import Placement, TextNames, WeightReader, Weights

# Prefixes of tensors for pictures or multi-token prediction, which are not read here.
UNREAD_PREFIXES = ("mtp.", "model.visual.")


def read_recurrence(
    reader: WeightReader, config: QwenHybridConfig, prefix: str
) -> Mapping[str, Any]:
    """Read the recurrence of a layer, as a MixerReader does. Qwen3-Next stores the first product
    key head by key head (query, key, values and gates), Qwen3.5 as one matrix for each purpose."""
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
    return {
        "qkv": first,
        "recurrence": Recurrence(weights, norm_V),
        "out": reader.linear({f"{name}out_proj": hidden}, values),
    }


def _by_purpose(config: QwenHybridConfig) -> Tensor:
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


class QwenHybridModel:
    """CausalLM over a HybridState that it owns. Reads every weight when built."""

    def __init__(
        self,
        config: QwenHybridConfig,
        weights: Weights,
        *,
        kernels: Kernels,
        placement: Placement,
        capacity: ModelCapacity,
    ) -> None:
        self.config, self.kernels = config, kernels
        self._placement, self._capacity = placement, capacity
        self._spec = placement.spec(config)
        # On a device, states are reserved before the weights fill its memory.
        self._state = HybridState(self._arena(), config.delta, capacity.states, placement.device)
        reader = WeightReader(weights, kernels, placement, text=TextNames.of(weights))
        self._tables = read_tables(reader, config)
        self._layers = [self._read_layer(reader, index) for index in range(config.num_layers)]
        kinds = [layer.recurrence is None for layer in self._layers]
        # The number of each layer among those of its kind.
        self._indices = [kinds[:depth].count(kind) for depth, kind in enumerate(kinds)]
        weights.check_all_taken(unread=UNREAD_PREFIXES)
        turns = turns_of(config, capacity.num_positions(config.max_tokens), placement.device)
        self._operators = LayerOperators(config, turns)
        self._passes = Passes(
            self._spec,
            up_size=2 * config.ffn_size,
            placement=placement,
            capacity=capacity,
            kv=self._state.kv,
        )
        delta, values = config.delta, config.value_size
        # Buffers of a recurrence: its first product, its output, and that next to the gate.
        self._recurred = [
            torch.empty(capacity.max_rows, width, device=placement.device)
            for width in (delta.num_channels + values + 2 * delta.num_heads, values, 2 * values)
        ]

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

    def twin(self) -> QwenHybridModel | None:
        if self.kernels.twin is None:
            return None
        other = copy(self)
        other.kernels = self.kernels.twin()
        other._passes = self._passes.twin()
        other._recurred = [torch.empty_like(buffer) for buffer in self._recurred]
        return other

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
                hidden_NKD = self._run(plan, returned or kept)
                if kept and not returned and hidden_NKD is not None:
                    self._state.kv.keep_hidden(plan.packed.slots_N, hidden_NKD)
                    hidden_NKD = None
                self._passes.logits(self, plan.packed, wanted_M, logits_MV)
        return StepOutput(logits_MV, hidden_NKD, num_passes)

    def _run(self, plan: HybridPlan, hidden_layers: tuple[int, ...]) -> Tensor | None:
        """Leave the last residual in `x_ND`; the captured layers in the order named."""
        scratch = self._passes.view(plan.packed.num_tokens)
        self.embed(plan.packed, scratch)
        layers = (partial(self._layer, depth, plan, scratch) for depth in range(len(self._layers)))
        return residuals(layers, scratch.x_ND, hidden_layers)

    def embed(self, plan: PackedPlan, scratch: Scratch) -> None:
        embedding = self._tables.embedding
        if isinstance(embedding, Tensor):
            torch.index_select(embedding, 0, plan.tokens_N, out=scratch.rows_ND)
            scratch.x_ND.copy_(scratch.rows_ND)
        else:
            embedding.read(plan.tokens_N, scratch.x_ND)

    def head(self, x_MD: Tensor, norm_MD: Tensor, logits_MV: Tensor) -> None:
        self._operators.norm(self.kernels, x_MD, self._tables.norm_D, norm_MD)
        self.kernels.linear(norm_MD, self._tables.head, logits_MV)

    def _layer(self, depth: int, plan: HybridPlan, scratch: Scratch) -> None:
        kernels, operators = self.kernels, self._operators
        layer, index = self._layers[depth], self._indices[depth]
        if layer.recurrence is None:
            operators.run(kernels, layer, plan.packed, scratch, self._state.kv.layers[index])
            return
        reads = operators.normed(kernels, layer, layer.attention_norm_D, scratch)
        self._recur(layer, layer.recurrence, reads, plan, scratch.x_ND, index)
        operators.feed(kernels, layer, reads, scratch)

    def _recur(
        self,
        layer: LayerWeights,
        recurrence: Recurrence,
        reads: Tensor,
        plan: HybridPlan,
        x_ND: Tensor,
        index: int,
    ) -> None:
        kernels, config, num_rows = self.kernels, self.config, len(x_ND)
        channels, values = config.delta.num_channels, config.value_size
        first_NP, out_NO, gated_N2O = (buffer[:num_rows] for buffer in self._recurred)
        kernels.linear(reads, layer.qkv, first_NP)
        kernels.delta(first_NP, recurrence.delta, plan.runs, self._state.cells, index, out_NO)
        flat = (num_rows * config.delta.num_heads, config.delta.value_dim)
        normed_NO = torch.empty_like(out_NO)
        kernels.rms_norm(
            out_NO.view(flat), recurrence.norm_V, config.rms_norm_eps, normed_NO.view(flat)
        )
        gated_N2O[:, :values] = first_NP[:, channels : channels + values]
        gated_N2O[:, values:] = self._as_stored(normed_NO)
        kernels.silu_mul(gated_N2O, out_NO)
        kernels.linear(out_NO, layer.out, x_ND, accumulate=True)

    def _as_stored(self, heads_NO: Tensor) -> Tensor:
        """Outputs of value heads in the order in which the last product reads them."""
        delta = self.config.delta
        if not self.config.tiled_values:
            return heads_NO
        heads = heads_NO.view(len(heads_NO), delta.num_key_heads, -1, delta.value_dim)
        return heads.transpose(1, 2).reshape(heads_NO.shape)

    def _read_layer(self, reader: WeightReader, index: int) -> LayerWeights:
        config = self.config
        if index in config.attention_layers:
            return read_layer(reader, config, index)
        return read_layer(reader, config, index, mixer=partial(read_recurrence, reader, config))

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
