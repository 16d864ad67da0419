"""The Llama family as one lean decoder: Llama 2 and 3, Mistral, TinyLlama, SmolLM.

A layer is  x += out(attention(rope(qkv(norm(x)))))  and then  x += down(silu(gate(y)) * up(y))  for
y = norm(x), where norm scales by the root mean square. Prefill, decode and verification are one
call over packed tokens of several sequences; where each reads and writes is the plan's affair. The
residual x and all activations are float32; weights and KV have their own dtype. Scratch memory is
allocated once, for `max_rows` packed tokens.

Shapes:  N = packed tokens, M = packed logits rows, D = hidden size, V = vocabulary,
         E = fused q, k and v, A = heads x head size, F = FFN size, K = captured layers,
         G = KV heads, S = slots, T = positions, H = half of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from outrider.core.protocols import DraftNeeds, StepOutput, StepRow
from outrider.core.spec import ModelSpec
from outrider.kernels.plan import PackedPlan
from outrider.kernels.registry import Kernels
from outrider.models.hf_config import LlamaConfig
from outrider.models.llama_weights import Layer, Placement, WeightReader
from outrider.models.rope import rope_tables
from outrider.models.weights import Weights
from outrider.state.paged_kv import PagedKV


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How much one model may hold: `num_slots` KV positions in all; in one step, `max_rows`
    packed tokens and `max_logits` rows of logits."""

    num_slots: int
    page_size: int = 32
    max_rows: int = 256
    max_logits: int = 256


@dataclass(frozen=True, slots=True)
class _Scratch:
    """The buffers of one step, float32 but for `rows_ND`. The next step overwrites them."""

    rows_ND: Tensor
    x_ND: Tensor
    norm_ND: Tensor
    qkv_NE: Tensor
    attended_NA: Tensor
    gate_up_N2F: Tensor
    gated_NF: Tensor

    def first(self, num_rows: int) -> _Scratch:
        return _Scratch(*(getattr(self, buffer.name)[:num_rows] for buffer in fields(self)))


class LlamaModel:
    """CausalLM over a PagedKV that it owns. Reads every weight when built."""

    def __init__(
        self,
        config: LlamaConfig,
        weights: Weights,
        *,
        kernels: Kernels,
        place: Placement,
        room: Room,
    ) -> None:
        self.config, self.kernels, self.room = config, kernels, room
        self._spec = config.spec(
            place.name,
            bytes_per_weight=place.dtype.itemsize,
            bytes_per_kv=place.dtype.itemsize,
        )
        reader = WeightReader(weights, kernels, place)
        self._tables = reader.tables(config)
        self._layers = [reader.layer(config, index) for index in range(config.num_layers)]
        weights.check_all_taken()
        self._kv = PagedKV(
            self._spec,
            dtype=place.dtype,
            device=place.device,
            num_slots=room.num_slots,
            page_size=room.page_size,
        )
        # Siblings of a tree may lie past the window although no path does.
        self._num_positions = min(config.max_tokens, room.num_slots) + room.max_rows
        tables = rope_tables(
            config.rope, head_dim=config.head_dim, num_positions=self._num_positions
        )
        self._cos_TH, self._sin_TH = (table_TH.to(place.device) for table_TH in tables)
        self._scale = config.head_dim**-0.5
        self._scratch = _allocate(config, place, room.max_rows)
        self._views: dict[int, _Scratch] = {}
        self._logits_MV = torch.empty(room.max_logits, config.vocab_size, device=place.device)

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def state(self) -> PagedKV:
        return self._kv

    def step(self, rows: Sequence[StepRow], needs: DraftNeeds) -> StepOutput:
        """At most `max_rows` tokens. Hidden layer i is the residual after i layers, 0 to L."""
        assert 0 < sum(len(row.tokens) for row in rows) <= self.room.max_rows
        with torch.inference_mode():
            plan = self._kv.plan(rows)
            scratch = self._view(plan.num_tokens)
            hidden_NKD = self._forward(plan, scratch, needs.hidden_layers)
            return StepOutput(self._head(scratch, rows), hidden_NKD)

    def _forward(
        self, plan: PackedPlan, scratch: _Scratch, hidden_layers: tuple[int, ...]
    ) -> Tensor | None:
        """Leave the last residual in `scratch.x_ND`; the captured layers in the order named."""
        torch.index_select(self._tables.embedding_VD, 0, plan.tokens_N, out=scratch.rows_ND)
        scratch.x_ND.copy_(scratch.rows_ND)
        captured: dict[int, Tensor] = {}
        for depth, layer in enumerate(self._layers):
            if depth in hidden_layers:
                captured[depth] = scratch.x_ND.clone()
            k_GSD, v_GSD = self._kv.layers[depth]
            self._attend(layer, plan, scratch, k_GSD, v_GSD)
            self._feed(layer, scratch)
        if not hidden_layers:
            return None
        captured[len(self._layers)] = scratch.x_ND
        return torch.stack([captured[depth] for depth in hidden_layers], dim=1)

    def _attend(
        self, layer: Layer, plan: PackedPlan, scratch: _Scratch, k_GSD: Tensor, v_GSD: Tensor
    ) -> None:
        kernels, qkv_NE = self.kernels, scratch.qkv_NE
        kernels.rms_norm(
            scratch.x_ND, layer.attention_norm_D, self.config.rms_norm_eps, scratch.norm_ND
        )
        kernels.linear(scratch.norm_ND, layer.qkv, qkv_NE)
        if layer.qkv_bias_E is not None:
            qkv_NE.add_(layer.qkv_bias_E)
        kernels.rope_append(qkv_NE, self._cos_TH, self._sin_TH, plan, k_GSD, v_GSD)
        kernels.attention(qkv_NE, k_GSD, v_GSD, plan, self._scale, scratch.attended_NA)
        kernels.linear(scratch.attended_NA, layer.out, scratch.x_ND, accumulate=True)
        if layer.out_bias_D is not None:
            scratch.x_ND.add_(layer.out_bias_D)

    def _feed(self, layer: Layer, scratch: _Scratch) -> None:
        kernels = self.kernels
        kernels.rms_norm(scratch.x_ND, layer.ffn_norm_D, self.config.rms_norm_eps, scratch.norm_ND)
        kernels.linear(scratch.norm_ND, layer.gate_up, scratch.gate_up_N2F)
        if layer.gate_up_bias_2F is not None:
            scratch.gate_up_N2F.add_(layer.gate_up_bias_2F)
        kernels.silu_mul(scratch.gate_up_N2F, scratch.gated_NF)
        kernels.linear(scratch.gated_NF, layer.down, scratch.x_ND, accumulate=True)
        if layer.down_bias_D is not None:
            scratch.x_ND.add_(layer.down_bias_D)

    def _head(self, scratch: _Scratch, rows: Sequence[StepRow]) -> Tensor:
        """Logits of the rows that want them. Overwrites the residual unless all do."""
        wanted = _wanted(rows)
        assert len(wanted) <= self.room.max_logits
        logits_MV = self._logits_MV[: len(wanted)]
        if not wanted:
            return logits_MV
        x_MD, norm_MD = scratch.x_ND, scratch.norm_ND
        if len(wanted) < x_MD.shape[0]:
            part = self._view(len(wanted))
            index_M = torch.tensor(wanted, dtype=torch.int32, device=x_MD.device)
            torch.index_select(x_MD, 0, index_M, out=part.norm_ND)
            x_MD, norm_MD = part.norm_ND, part.x_ND
        self.kernels.rms_norm(x_MD, self._tables.norm_D, self.config.rms_norm_eps, norm_MD)
        self.kernels.linear(norm_MD, self._tables.head, logits_MV)
        return logits_MV

    def _view(self, num_rows: int) -> _Scratch:
        view = self._views.get(num_rows)
        if view is None:
            view = self._views[num_rows] = self._scratch.first(num_rows)
        return view


def _wanted(rows: Sequence[StepRow]) -> list[int]:
    """Packed indices of the tokens whose logits are asked for."""
    wanted: list[int] = []
    start = 0
    for row in rows:
        end = start + len(row.tokens)
        wanted += range(start + row.logits_from, end)
        start = end
    return wanted


def _allocate(config: LlamaConfig, place: Placement, num_rows: int) -> _Scratch:
    def buffer(width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(num_rows, width, dtype=dtype, device=place.device)

    return _Scratch(
        rows_ND=buffer(config.hidden_size, place.dtype),
        x_ND=buffer(config.hidden_size),
        norm_ND=buffer(config.hidden_size),
        qkv_NE=buffer(config.qkv_size),
        attended_NA=buffer(config.num_heads * config.head_dim),
        gate_up_N2F=buffer(2 * config.ffn_size),
        gated_NF=buffer(config.ffn_size),
    )
