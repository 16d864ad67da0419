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
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from torch import Tensor

from outrider.cache.hybrid import HybridPlan, HybridState
from outrider.cache.paged_kv import PagedKV
from outrider.cache.pages import ArenaSize
from outrider.core.errors import ContractError, given
from outrider.core.protocols import DraftNeeds, StepOutput, StepRow
from outrider.core.spec import ModelSpec
from outrider.kernels.native.forward import DenseWeights, HeadGate, LayerWeights, MixtureWeights
from outrider.kernels.operators import Kernels
from outrider.kernels.plan import PackedLinear, PackedPlan
from outrider.kernels.reference.delta import DeltaWeights
from outrider.models.decoder import LayerKV, ModelCapacity, Scratch, residuals, wanted_tokens
from outrider.models.llama_weights import Tables
from outrider.models.mixture import mix, read_mixture
from outrider.models.qwen_hybrid_config import QwenHybridConfig
from outrider.models.rope import Turns, turning_order, turns_of
from outrider.models.weights import Placement, WeightReader, Weights

# Tensors of a Qwen3-Next or Qwen3.5 checkpoint, fused and packed, and operators of its layers.
#
# Norms are stored minus 1, except the norm inside a recurrent layer. Qwen3-Next stores the input
# projection of such a layer key head by key head (query, key, values and gates), Qwen3.5 as one
# matrix for each purpose; experts are stored one by one or stacked. Tensors for pictures or multi-
# token prediction are not read here.
#
# Shapes:  D = hidden size, V = vocabulary or value size, H = head size or heads, E = fused q, k, v,
#          J = taps, C = channels of the convolution, O and P = rows of a matrix, N = packed tokens,
#          A = heads x head size.
# Prefixes of a text model within a model for text and pictures, and of a text model by itself.
_PREFIXES = ("model.language_model.", "model.")
UNREAD_PREFIXES = ("mtp.", "model.visual.")


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Weights of an attention layer. The sigmoid of `gate` scales the output of each head."""

    qkv: PackedLinear
    gate: PackedLinear
    q_norm_H: Tensor
    k_norm_H: Tensor
    out: PackedLinear


@dataclass(frozen=True, slots=True)
class RecurrentWeights:
    """Weights of a recurrent layer: `first` computes channels, the gate z, and b and a of heads."""

    first: PackedLinear
    delta: DeltaWeights
    norm_V: Tensor
    out: PackedLinear


@dataclass(frozen=True, slots=True)
class HybridLayer:
    mixer_norm_D: Tensor
    mixer: AttentionWeights | RecurrentWeights
    ffn_norm_D: Tensor
    ffn: DenseWeights | MixtureWeights


def native_layer(layer: HybridLayer, gated_NA: Tensor) -> LayerWeights | None:
    """Attention weights for a native pass, with a buffer for the gate; None for other layers."""
    mixer, ffn = layer.mixer, layer.ffn
    if not isinstance(mixer, AttentionWeights) or not isinstance(ffn, DenseWeights):
        return None
    return LayerWeights(
        attention_norm_D=layer.mixer_norm_D,
        qkv=mixer.qkv,
        qkv_bias_E=None,
        q_norm_H=mixer.q_norm_H,
        k_norm_H=mixer.k_norm_H,
        out=mixer.out,
        out_bias_D=None,
        ffn_norm_D=layer.ffn_norm_D,
        gate_up=ffn.gate_up,
        gate_up_bias_2F=None,
        down=ffn.down,
        down_bias_D=None,
        gate=HeadGate(mixer.gate, gated_NA),
    )


@dataclass(frozen=True, slots=True)
class HybridOperators:
    """The operators of layers, except the recurrence."""

    config: QwenHybridConfig
    turns: Turns

    def norm(self, kernels: Kernels, weight_D: Tensor, scratch: Scratch) -> None:
        kernels.rms_norm(scratch.x_ND, weight_D, self.config.rms_norm_eps, scratch.norm_ND)

    def attend(
        self,
        kernels: Kernels,
        weights: AttentionWeights,
        plan: PackedPlan,
        scratch: Scratch,
        gate_NA: Tensor,
        kv: LayerKV,
    ) -> None:
        """Add attention of the normed residual to `x_ND`; `gate_NA` is the gate's buffer."""
        config, qkv_NE = self.config, scratch.qkv_NE
        kernels.linear(scratch.norm_ND, weights.qkv, qkv_NE)
        kernels.linear(scratch.norm_ND, weights.gate, gate_NA)
        kernels.head_norm(
            qkv_NE, weights.q_norm_H, weights.k_norm_H, config.num_kv_heads, config.rms_norm_eps
        )
        kernels.rope_append(qkv_NE, *self.turns, plan, *kv)
        kernels.attention(qkv_NE, *kv, plan, config.head_dim**-0.5, scratch.attended_NA)
        kernels.sigmoid_mul(gate_NA, scratch.attended_NA)
        kernels.linear(scratch.attended_NA, weights.out, scratch.x_ND, accumulate=True)

    def feed(self, kernels: Kernels, layer: HybridLayer, scratch: Scratch) -> None:
        self.norm(kernels, layer.ffn_norm_D, scratch)
        if isinstance(layer.ffn, MixtureWeights):
            sizes = given(self.config.experts, "mixture's sizes")
            scratch.x_ND.add_(mix(kernels, sizes, layer.ffn, scratch.norm_ND))
            return
        kernels.linear(scratch.norm_ND, layer.ffn.gate_up, scratch.up_NU)
        kernels.silu_mul(scratch.up_NU, scratch.activated_NF)
        kernels.linear(scratch.activated_NF, layer.ffn.down, scratch.x_ND, accumulate=True)


class HybridReader:
    """Reads tensors under `prefix`, which is found if None; they are fused and packed.

    Norms are stored minus 1, except the norm inside a recurrent layer, and become factors.
    Qwen3-Next stores the input projection of such a layer key head by key head (query, key, values
    and gates), Qwen3.5 as one matrix for each purpose; experts are stored one by one or stacked.
    Tensors for pictures or multi-token prediction are not read here."""

    def __init__(
        self, reader: WeightReader, config: QwenHybridConfig, prefix: str | None = None
    ) -> None:
        self._reader, self._config = reader, config
        found = (prefix for prefix in _PREFIXES if f"{prefix}embed_tokens.weight" in reader)
        self._prefix = next(found, _PREFIXES[-1]) if prefix is None else prefix

    def tables(self) -> Tables:
        config = self._config
        embedding_VD = self._reader.table(
            f"{self._prefix}embed_tokens.weight", config.vocab_size, config.hidden_size
        )
        return Tables(
            embedding=embedding_VD,
            norm_D=self.norm("norm", config.hidden_size),
            head=self._reader.head(embedding_VD, tied=config.tie_word_embeddings),
        )

    def layer(self, index: int) -> HybridLayer:
        config, name = self._config, f"layers.{index}."
        attends = index in config.attention_layers
        sparse = config.experts if index in config.sparse_layers else None
        return HybridLayer(
            mixer_norm_D=self.norm(f"{name}input_layernorm", config.hidden_size),
            mixer=self._attention(f"{name}self_attn.")
            if attends
            else self._recurrent(f"{name}linear_attn."),
            ffn_norm_D=self.norm(f"{name}post_attention_layernorm", config.hidden_size),
            ffn=self._dense(f"{name}mlp.", config.ffn_size)
            if sparse is None
            else read_mixture(self._reader, sparse, f"{self._prefix}{name}", config.hidden_size),
        )

    def _attention(self, name: str) -> AttentionWeights:
        config = self._config
        head, attended = config.head_dim, config.num_heads * config.head_dim
        kv = config.num_kv_heads * head
        order_H = turning_order(config.rope, head)
        turned = torch.arange(head) if order_H is None else order_H
        queries = torch.arange(2 * attended).view(-1, 2, head)
        keys = 2 * attended + torch.arange(kv).view(-1, head)
        values = 2 * attended + kv + torch.arange(kv)
        order_E = torch.cat([queries[:, 0, turned].flatten(), keys[:, turned].flatten(), values])
        return AttentionWeights(
            qkv=self._linear(
                {f"{name}q_proj": 2 * attended, f"{name}k_proj": kv, f"{name}v_proj": kv}, order_E
            ),
            gate=self._linear({f"{name}q_proj": 2 * attended}, queries[:, 1].flatten()),
            q_norm_H=self.norm(f"{name}q_norm", head)[turned],
            k_norm_H=self.norm(f"{name}k_norm", head)[turned],
            out=self._linear({f"{name}o_proj": config.hidden_size}, num_in=attended),
        )

    def _recurrent(self, name: str) -> RecurrentWeights:
        config, delta = self._config, self._config.delta
        conv_C1J = self._vector(f"{name}conv1d.weight", delta.num_channels, 1, delta.num_taps)
        return RecurrentWeights(
            first=self._first(name),
            delta=DeltaWeights(
                conv_JC=conv_C1J[:, 0].T.contiguous(),
                rate_H=self._vector(f"{name}A_log", delta.num_heads).exp_(),
                dt_bias_H=self._vector(f"{name}dt_bias", delta.num_heads),
                num_key_heads=delta.num_key_heads,
                key_dim=delta.key_dim,
            ),
            norm_V=self._vector(f"{name}norm.weight", delta.value_dim),
            out=self._linear({f"{name}out_proj": config.hidden_size}, num_in=config.value_size),
        )

    def _first(self, name: str) -> PackedLinear:
        config, delta = self._config, self._config.delta
        heads, channels, values = delta.num_heads, delta.num_channels, config.value_size
        if f"{self._prefix}{name}in_proj_qkvz.weight" not in self._reader:
            purposes = {"qkv": channels, "z": values, "b": heads, "a": heads}
            return self._linear({f"{name}in_proj_{key}": num for key, num in purposes.items()})
        stored = {f"{name}in_proj_qkvz": channels + values, f"{name}in_proj_ba": 2 * heads}
        return self._linear(stored, _by_purpose(config))

    def _dense(self, name: str, ffn_size: int) -> DenseWeights:
        hidden = self._config.hidden_size
        gate_up = {f"{name}gate_proj": ffn_size, f"{name}up_proj": ffn_size}
        return DenseWeights(
            self._linear(gate_up), self._linear({f"{name}down_proj": hidden}, num_in=ffn_size)
        )

    def _linear(
        self, outputs: Mapping[str, int], order_O: Tensor | None = None, num_in: int | None = None
    ) -> PackedLinear:
        named = {f"{self._prefix}{name}": num_out for name, num_out in outputs.items()}
        return self._reader.linear(named, num_in or self._config.hidden_size, order_O)

    def _vector(self, name: str, *shape: int) -> Tensor:
        return self._reader.vector(f"{self._prefix}{name}", *shape)

    def norm(self, name: str, size: int) -> Tensor:
        return self._vector(f"{name}.weight", size).add_(1)


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
