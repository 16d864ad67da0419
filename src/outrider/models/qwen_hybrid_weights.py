"""Tensors of a Qwen3-Next or Qwen3.5 checkpoint, fused and packed, and operators of its layers.

Norms are stored minus 1, except the norm inside a recurrent layer. Qwen3-Next stores the input
projection of such a layer key head by key head (query, key, values and gates), Qwen3.5 as one
matrix for each purpose; experts are stored one by one or stacked. Tensors for pictures or
multi-token prediction are not read here.

Shapes:  D = hidden size, V = vocabulary or value size, H = head size or heads, E = fused q, k, v,
         J = taps, C = channels of the convolution, O and P = rows of a matrix, N = packed tokens,
         A = heads x head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.errors import given
from outrider.kernels.native.forward import DenseWeights, HeadGate, LayerWeights, MixtureWeights
from outrider.kernels.operators import Kernels
from outrider.kernels.plan import PackedLinear, PackedPlan
from outrider.kernels.reference.delta import DeltaWeights
from outrider.models.decoder import LayerKV, Scratch
from outrider.models.llama_weights import Tables
from outrider.models.mixture import mix, read_mixture
from outrider.models.qwen_hybrid_config import QwenHybridConfig
from outrider.models.rope import Turns, turning_order
from outrider.models.weights import WeightReader

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
    """The operators of layers, except the recurrence (qwen_hybrid.py)."""

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
    """Reads tensors under `prefix`, which is found if None; norms become factors."""

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
