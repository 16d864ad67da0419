"""From a checkpoint's tensors, under their Hugging Face names, to what the decoder multiplies by.

q, k and v become one matrix, and so do gate and up: fewer, larger products. A tied output head
shares the embedding's values but not its memory, since a head is packed for products and an
embedding is looked up by row.

Shapes:  D = hidden size, V = vocabulary, E = fused q, k and v, F = FFN size, O = outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.packed import PackedLinear
from outrider.kernels.registry import Kernels
from outrider.models.hf_config import LlamaConfig
from outrider.models.weights import Weights

EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Placement:
    """The precision of weights and KV, and where they live; `name` is the model's, for reports."""

    name: str
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class Tables:
    embedding_VD: Tensor
    norm_D: Tensor
    head: PackedLinear


@dataclass(frozen=True, slots=True)
class Layer:
    """Norms and biases are float32; a bias is None unless the family has it."""

    attention_norm_D: Tensor
    qkv: PackedLinear
    qkv_bias_E: Tensor | None
    out: PackedLinear
    out_bias_D: Tensor | None
    ffn_norm_D: Tensor
    gate_up: PackedLinear
    gate_up_bias_2F: Tensor | None
    down: PackedLinear
    down_bias_D: Tensor | None


class WeightReader:
    """Reads, converts and packs one matrix at a time, so the peak is one matrix over the model."""

    def __init__(self, weights: Weights, kernels: Kernels, place: Placement) -> None:
        self._weights, self._kernels, self._place = weights, kernels, place

    def tables(self, config: LlamaConfig) -> Tables:
        shape = (config.vocab_size, config.hidden_size)
        embedding_VD = self._copy(self._weights.take(EMBEDDING, *shape), self._place.dtype)
        # As in transformers, a head that is stored wins over tying.
        tied = config.tie_word_embeddings and _HEAD not in self._weights
        head_VD = embedding_VD
        if not tied:
            head_VD = self._copy(self._weights.take(_HEAD, *shape), self._place.dtype)
        return Tables(
            embedding_VD=embedding_VD,
            norm_D=self._copy(self._weights.take("model.norm.weight", shape[1]), torch.float32),
            head=self._kernels.pack(head_VD),
        )

    def layer(self, config: LlamaConfig, index: int) -> Layer:
        prefix = f"model.layers.{index}."
        hidden, ffn, attended = (
            config.hidden_size,
            config.ffn_size,
            config.num_heads * config.head_dim,
        )
        kv = config.num_kv_heads * config.head_dim
        qkv = {
            f"{prefix}self_attn.q_proj": attended,
            f"{prefix}self_attn.k_proj": kv,
            f"{prefix}self_attn.v_proj": kv,
        }
        out = {f"{prefix}self_attn.o_proj": hidden}
        gate_up = {f"{prefix}mlp.gate_proj": ffn, f"{prefix}mlp.up_proj": ffn}
        down = {f"{prefix}mlp.down_proj": hidden}
        return Layer(
            attention_norm_D=self._vector(f"{prefix}input_layernorm.weight", hidden),
            qkv=self._linear(qkv, hidden),
            qkv_bias_E=self._bias(qkv, present=config.attention_bias),
            out=self._linear(out, attended),
            out_bias_D=self._bias(out, present=config.attention_bias),
            ffn_norm_D=self._vector(f"{prefix}post_attention_layernorm.weight", hidden),
            gate_up=self._linear(gate_up, hidden),
            gate_up_bias_2F=self._bias(gate_up, present=config.mlp_bias),
            down=self._linear(down, ffn),
            down_bias_D=self._bias(down, present=config.mlp_bias),
        )

    def _linear(self, outputs: dict[str, int], num_in: int) -> PackedLinear:
        parts = [
            self._weights.take(f"{name}.weight", num_out, num_in)
            for name, num_out in outputs.items()
        ]
        fused_OI = torch.cat(parts).to(device=self._place.device, dtype=self._place.dtype)
        return self._kernels.pack(fused_OI)

    def _bias(self, outputs: dict[str, int], *, present: bool) -> Tensor | None:
        if not present:
            return None
        parts = [self._weights.take(f"{name}.bias", num_out) for name, num_out in outputs.items()]
        return torch.cat(parts).to(device=self._place.device, dtype=torch.float32)

    def _vector(self, name: str, size: int) -> Tensor:
        return self._copy(self._weights.take(name, size), torch.float32)

    def _copy(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory of our own: the file may change or vanish while the model runs."""
        return tensor.to(device=self._place.device, dtype=dtype, copy=True)
