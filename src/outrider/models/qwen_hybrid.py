"""Qwen3-Next and Qwen3.5 (hybrid): a few attention layers, the others gated delta recurrences.

A layer is x += mix(norm(x)) and then x += feed(norm(x)). An attention layer rotates only a part of
each head, and scales its heads' outputs by a sigmoid of a gate. A recurrent layer is a gated delta
rule (kernels/reference/delta.py) whose output is normed per head and scaled by silu(z):

    c, z, b, a = first(x);   o = delta(silu(conv(c)), b, a);   x += out(norm(o) * silu(z)).

The recurrence runs token by token in every pass, prompts included: another order of sums would
round differently, and a verification must give the bits of plain decoding.

Shapes:  N = packed tokens, M = packed logits rows, V = vocabulary, D = hidden size, A = heads x
         head size, P = outputs of a recurrent layer's first product, O = value heads x value size,
         K = captured layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from torch import Tensor

from outrider.cache.hybrid import HybridPlan, HybridState
from outrider.cache.paged_kv import PagedKV
from outrider.cache.pages import ArenaSize
from outrider.core.errors import ContractError
from outrider.core.protocols import DraftNeeds, StepOutput, StepRow
from outrider.core.spec import ModelSpec
from outrider.kernels.operators import Kernels
from outrider.models.decoder import ModelCapacity, Scratch, residuals, wanted_tokens
from outrider.models.llama_weights import Tables
from outrider.models.qwen_hybrid_config import QwenHybridConfig
from outrider.models.qwen_hybrid_weights import (
    UNREAD_PREFIXES,
    HybridLayer,
    HybridOperators,
    HybridReader,
    RecurrentWeights,
)
from outrider.models.rope import turns_of
from outrider.models.weights import Placement, WeightReader, Weights


@dataclass(frozen=True, slots=True)
class _Scratch(Scratch):
    gate_NA: Tensor
    first_NP: Tensor
    out_NO: Tensor
    gated_N2O: Tensor


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
        reader = HybridReader(WeightReader(weights, kernels, placement), config)
        self._tables = reader.tables()
        self._layers = [reader.layer(index) for index in range(config.num_layers)]
        kinds = [type(layer.mixer) for layer in self._layers]
        self._indices = [kinds[:depth].count(kind) for depth, kind in enumerate(kinds)]
        weights.check_all_taken(unread=UNREAD_PREFIXES)
        turns = turns_of(config, capacity.num_positions(config.max_tokens), placement.device)
        self._operators = HybridOperators(config, turns)
        self._make_buffers()

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
        other._make_buffers()
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
                    self._forward(plan, self._scratch.first(len(again[1])), ())
                num_passes += 1
            with self._state.planning(rows) as plan:
                scratch = self._scratch.first(plan.packed.num_tokens)
                hidden_NKD = self._forward(plan, scratch, returned or kept)
                if kept and not returned and hidden_NKD is not None:
                    self._state.kv.keep_hidden(plan.packed.slots_N, hidden_NKD)
                    hidden_NKD = None
                logits_MV = self._logits(scratch, rows)
        return StepOutput(logits_MV, hidden_NKD, num_passes)

    def _forward(
        self, plan: HybridPlan, scratch: _Scratch, hidden_layers: tuple[int, ...]
    ) -> Tensor | None:
        """Leave the last residual in `scratch.x_ND`; the captured layers in the order named."""
        tokens_N = plan.packed.tokens_N
        torch.index_select(self._tables.embeddings, 0, tokens_N, out=scratch.rows_ND)
        scratch.x_ND.copy_(scratch.rows_ND)
        layers = (
            partial(self._layer, layer, index, plan, scratch)
            for layer, index in zip(self._layers, self._indices, strict=True)
        )
        return residuals(layers, scratch.x_ND, hidden_layers)

    def _layer(self, layer: HybridLayer, index: int, plan: HybridPlan, scratch: _Scratch) -> None:
        """Run a layer. `index` is its number among all attention or all recurrent layers."""
        kernels, operators = self.kernels, self._operators
        operators.norm(kernels, layer.mixer_norm_D, scratch)
        if isinstance(layer.mixer, RecurrentWeights):
            self._recur(layer.mixer, plan, scratch, index)
        else:
            kv = self._state.kv.layers[index]
            operators.attend(kernels, layer.mixer, plan.packed, scratch, scratch.gate_NA, kv)
        operators.feed(kernels, layer, scratch)

    def _recur(
        self, weights: RecurrentWeights, plan: HybridPlan, scratch: _Scratch, index: int
    ) -> None:
        kernels, config, delta, cells = self.kernels, self.config, weights.delta, self._state.cells
        shape, num_rows = config.delta, scratch.x_ND.shape[0]
        channels, values = shape.num_channels, config.value_size
        kernels.linear(scratch.norm_ND, weights.first, scratch.first_NP)
        kernels.delta(scratch.first_NP, delta, plan.runs, cells, index, scratch.out_NO)
        flat = (num_rows * shape.num_heads, shape.value_dim)
        normed_NO = torch.empty_like(scratch.out_NO)
        kernels.rms_norm(
            scratch.out_NO.view(flat), weights.norm_V, config.rms_norm_eps, normed_NO.view(flat)
        )
        scratch.gated_N2O[:, :values] = scratch.first_NP[:, channels : channels + values]
        scratch.gated_N2O[:, values:] = normed_NO
        kernels.silu_mul(scratch.gated_N2O, scratch.out_NO)
        kernels.linear(scratch.out_NO, weights.out, scratch.x_ND, accumulate=True)

    def _logits(self, scratch: _Scratch, rows: Sequence[StepRow]) -> Tensor:
        """Logits of the rows that want them, in a buffer that the next step overwrites."""
        wanted = wanted_tokens(rows)
        if len(wanted) > self._capacity.max_logits:
            raise ContractError("more rows want logits than max_logits")
        logits_MV = self._logits_MV[: len(wanted)]
        if wanted:
            x_MD = scratch.x_ND[torch.tensor(wanted, device=scratch.x_ND.device)]
            norm_MD = torch.empty_like(x_MD)
            tables = self._tables
            self.kernels.rms_norm(x_MD, tables.norm_D, self.config.rms_norm_eps, norm_MD)
            self.kernels.linear(norm_MD, tables.head, logits_MV)
        return logits_MV

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

    def _make_buffers(self) -> None:
        config, placement, num_rows = self.config, self._placement, self._capacity.max_rows
        values, delta = config.value_size, config.delta
        sizes = {
            "gate_NA": config.num_heads * config.head_dim,
            "first_NP": delta.num_channels + values + 2 * delta.num_heads,
            "out_NO": values,
            "gated_N2O": 2 * values,
        }
        shared = Scratch.buffers(self._spec, 2 * config.ffn_size, placement, num_rows)
        own = {name: torch.empty(num_rows, n, device=placement.device) for name, n in sizes.items()}
        self._scratch = _Scratch(*(getattr(shared, each.name) for each in fields(shared)), **own)
        self._logits_MV = torch.empty(
            self._capacity.max_logits, config.vocab_size, device=placement.device
        )
