"""Tensors of a checkpoint of the Llama line, fused and packed: tables and layers.

q, k and v become one matrix, and so do gate and up, unless the files already hold them so (Phi-3).
A rank reads its share of each (share.py).

Shapes:  V = vocabulary, D = hidden size, E = fused q, k and v, F = FFN size, H = a head or heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count, takewhile

import torch
from torch import Tensor

from outrider.core.errors import ContractError
from outrider.kernels.native.forward import LayerWeights
from outrider.kernels.plan import AttentionKind, PackedLinear, PackedTable
from outrider.models.families import LlamaConfig
from outrider.models.layer_kinds import Norms
from outrider.models.mixture import read_mixture
from outrider.models.rope import turning_order
from outrider.models.share import WHOLE, Share
from outrider.models.weights import WeightReader, Weights

EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class Tables:
    embedding: Tensor | PackedTable
    norm_D: Tensor
    head: PackedLinear

    @property
    def embeddings(self) -> Tensor:
        """The embeddings of all tokens as numbers, [V, D]."""
        return self.embedding if isinstance(self.embedding, Tensor) else self.embedding.kept


def read_tables(reader: WeightReader, config: LlamaConfig, share: Share = WHOLE) -> Tables:
    embedding = reader.tokens(
        EMBEDDING, config.vocab_size, config.hidden_size, tied=config.tie_word_embeddings
    )
    return Tables(
        embedding=embedding,
        norm_D=_norm(reader, config, "model.norm", config.hidden_size),
        head=reader.head(
            embedding, tied=config.tie_word_embeddings, rows=share.cut(config.vocab_size)
        ),
    )


def _norm(reader: WeightReader, config: LlamaConfig, name: str, size: int) -> Tensor:
    """The factors that a norm multiplies by."""
    weight_D = reader.vector(f"{name}.weight", size)
    return weight_D.add_(1) if config.traits.from_one else weight_D


def mtp_prefixes(weights: Weights, config: LlamaConfig) -> tuple[str, ...]:
    """Prefixes of MTP blocks, which are numbered on after the last layer; a drafter reads them."""
    behind = (f"model.layers.{index}." for index in count(config.num_layers))
    return tuple(takewhile(lambda prefix: f"{prefix}enorm.weight" in weights, behind))


def read_layer(
    reader: WeightReader, config: LlamaConfig, index: int, share: Share = WHOLE
) -> LayerWeights:
    prefix = f"model.layers.{index}."
    hidden, ffn, head = config.hidden_size, config.ffn_size, config.head_dim
    attended = config.num_heads * head
    qkv, gate_up = _fused_names(prefix, config)
    out = {f"{prefix}self_attn.o_proj": hidden}
    down = {f"{prefix}mlp.down_proj": hidden}
    order_E, order_2F = _qkv_order(config, share), _gate_up_order(config, share)

    def head_norm(name: str, num_heads: int) -> Tensor | None:
        if not config.qk_norm:
            return None
        size = num_heads * head if config.traits.whole_heads else head
        weight_H = _norm(reader, config, f"{prefix}self_attn.{name}", size)
        order_H = _turning_order(config)
        return weight_H if order_H is None else weight_H[order_H]

    norms = {
        role: _norm(reader, config, f"{prefix}{name}", hidden)
        for role, name in _NORM_NAMES[config.traits.norms].items()
    }
    sparse = config.experts if index in config.sparse_layers else None

    def summed_bias(outputs: dict[str, int], *, present: bool) -> Tensor | None:
        """The bias of a linear whose outputs the ranks sum, so only rank 0 adds it."""
        bias_D = reader.bias(outputs, present=present)
        return bias_D if share.rank == 0 else None

    return LayerWeights(
        attention_norm_D=norms.get("attention"),
        qkv=reader.linear(qkv, hidden, order_E),
        qkv_bias_E=reader.bias(qkv, present=config.qkv_bias, order_O=order_E),
        q_norm_H=head_norm("q_norm", config.num_heads),
        k_norm_H=head_norm("k_norm", config.num_kv_heads),
        out=reader.linear(out, attended, columns=share.cut(attended)),
        out_bias_D=summed_bias(out, present=config.out_bias),
        ffn_norm_D=norms.get("ffn"),
        gate_up=None if sparse else reader.linear(gate_up, hidden, order_2F),
        gate_up_bias_2F=reader.bias(
            gate_up, present=config.mlp_bias and not sparse, order_O=order_2F
        ),
        down=None if sparse else reader.linear(down, ffn, columns=share.cut(ffn)),
        down_bias_D=summed_bias(down, present=config.mlp_bias and not sparse),
        attended_norm_D=norms.get("attended"),
        fed_norm_D=norms.get("fed"),
        attention=_attention_kind(reader, config, prefix, index),
        mixture=read_mixture(reader, sparse, prefix, hidden) if sparse else None,
    )


# Names of the norms of a layer, by where they are.
_NORM_NAMES = {
    Norms.BEFORE: {"attention": "input_layernorm", "ffn": "post_attention_layernorm"},
    Norms.AFTER: {"attended": "post_attention_layernorm", "fed": "post_feedforward_layernorm"},
    Norms.AROUND: {
        "attention": "input_layernorm",
        "attended": "post_attention_layernorm",
        "ffn": "pre_feedforward_layernorm",
        "fed": "post_feedforward_layernorm",
    },
    Norms.PARALLEL: {"attention": "input_layernorm"},
}


def _attention_kind(
    reader: WeightReader, config: LlamaConfig, prefix: str, index: int
) -> AttentionKind | None:
    sinks_H = None
    if config.traits.sinks:
        sinks_H = reader.vector(f"{prefix}self_attn.sinks", config.num_heads)
    window = config.layer_kind(index).window
    if not window and not config.traits.attention_cap and sinks_H is None:
        return None
    return AttentionKind(config.scale, window, config.traits.attention_cap, sinks_H)


def _turning_order(config: LlamaConfig) -> Tensor | None:
    return turning_order(config.rope, config.head_dim, interleaved=config.traits.interleaved)


def _fused_names(prefix: str, config: LlamaConfig) -> tuple[dict[str, int], dict[str, int]]:
    """Names and numbers of outputs of the parts of a fused matrix: q, k and v; gate and up."""
    ffn, kv = config.ffn_size, config.num_kv_heads * config.head_dim
    if config.fused_tensors:
        return {f"{prefix}self_attn.qkv_proj": config.qkv_size}, {
            f"{prefix}mlp.gate_up_proj": 2 * ffn
        }
    qkv = {
        f"{prefix}self_attn.q_proj": config.num_heads * config.head_dim,
        f"{prefix}self_attn.k_proj": kv,
        f"{prefix}self_attn.v_proj": kv,
    }
    return qkv, {f"{prefix}mlp.gate_proj": ffn, f"{prefix}mlp.up_proj": ffn}


def _qkv_order(config: LlamaConfig, share: Share) -> Tensor | None:
    """order_E: the checkpoint's row of each row of the fused q, k and v; None if no row moves."""
    order_H = _turning_order(config)
    if order_H is None and share == WHOLE:
        return None
    heads = torch.arange(config.qkv_size).view(-1, config.head_dim)
    if order_H is not None:
        # Norms of all heads as one would have to move as well; no family has both.
        if config.qk_norm and config.traits.whole_heads:
            raise ContractError("norms of all heads as one vector cannot be reordered")
        turned = heads[: -config.num_kv_heads]
        turned.copy_(turned[:, order_H])
    kinds = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads])
    return torch.cat([kind[share.cut(len(kind))] for kind in kinds]).flatten()


def _gate_up_order(config: LlamaConfig, share: Share) -> Tensor | None:
    """order_2F: the checkpoint's row of each row of gate and up; None if no row moves."""
    if share == WHOLE:
        return None
    rows = torch.arange(2 * config.ffn_size).view(2, config.ffn_size)
    return rows[:, share.cut(config.ffn_size)].flatten()
