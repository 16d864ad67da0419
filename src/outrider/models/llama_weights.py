"""The tensors of a Llama-shaped checkpoint, fused and packed as the decoder multiplies by them.

q, k and v become one matrix, and so do gate and up, unless the files hold them so already (Phi-3).
A rank of several reads its share of each (parallel/shard.py); a config is always the whole model's.

Shapes:  D = hidden size, V = vocabulary, E = fused q, k and v, F = FFN size, H = head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count, takewhile

import torch
from torch import Tensor

from outrider.core.errors import ContractError
from outrider.kernels.native.forward import LayerWeights
from outrider.kernels.plan import PackedLinear
from outrider.models.llama_config import LlamaConfig
from outrider.models.parallel.shard import WHOLE, Share
from outrider.models.rope import turning_order
from outrider.models.weight_reader import WeightReader
from outrider.models.weights import Weights

EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class Tables:
    embedding_VD: Tensor
    norm_D: Tensor
    head: PackedLinear


def read_tables(reader: WeightReader, config: LlamaConfig, share: Share = WHOLE) -> Tables:
    embedding_VD = reader.table(EMBEDDING, config.vocab_size, config.hidden_size)
    return Tables(
        embedding_VD=embedding_VD,
        norm_D=reader.vector("model.norm.weight", config.hidden_size),
        head=reader.head(
            embedding_VD, tied=config.tie_word_embeddings, rows=share.cut(config.vocab_size)
        ),
    )


def mtp_prefixes(weights: Weights, config: LlamaConfig) -> tuple[str, ...]:
    """Of blocks for multi-token prediction that lie behind the last layer; a drafter reads them."""
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

    def head_norm(name: str) -> Tensor | None:
        return reader.vector(f"{prefix}self_attn.{name}.weight", head) if config.qk_norm else None

    def summed_bias(outputs: dict[str, int], *, present: bool) -> Tensor | None:
        """Ranks add up what such a linear gives, so one of them has its bias."""
        bias_D = reader.bias(outputs, present=present)
        return bias_D if share.rank == 0 else None

    return LayerWeights(
        attention_norm_D=reader.vector(f"{prefix}input_layernorm.weight", hidden),
        qkv=reader.linear(qkv, hidden, order_E),
        qkv_bias_E=reader.bias(qkv, present=config.qkv_bias, order_O=order_E),
        q_norm_H=head_norm("q_norm"),
        k_norm_H=head_norm("k_norm"),
        out=reader.linear(out, attended, columns=share.cut(attended)),
        out_bias_D=summed_bias(out, present=config.out_bias),
        ffn_norm_D=reader.vector(f"{prefix}post_attention_layernorm.weight", hidden),
        gate_up=reader.linear(gate_up, hidden, order_2F),
        gate_up_bias_2F=reader.bias(gate_up, present=config.mlp_bias, order_O=order_2F),
        down=reader.linear(down, ffn, columns=share.cut(ffn)),
        down_bias_D=summed_bias(down, present=config.mlp_bias),
    )


def _fused_names(prefix: str, config: LlamaConfig) -> tuple[dict[str, int], dict[str, int]]:
    """Names and outputs of what becomes one matrix: q, k and v; gate and up."""
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
    """Where each row of the fused matrix lies in the checkpoint's; None if nothing moves."""
    order_H = turning_order(config.rope, config.head_dim)
    if order_H is None and share == WHOLE:
        return None
    heads = torch.arange(config.qkv_size).view(-1, config.head_dim)
    if order_H is not None:
        # Norms of heads would have to move as well; no family has both.
        if config.qk_norm:
            raise ContractError("norms of heads cannot be turned")
        turned = heads[: -config.num_kv_heads]
        turned.copy_(turned[:, order_H])
    kinds = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads])
    return torch.cat([kind[share.cut(len(kind))] for kind in kinds]).flatten()


def _gate_up_order(config: LlamaConfig, share: Share) -> Tensor | None:
    """The same of gate and up."""
    if share == WHOLE:
        return None
    rows = torch.arange(2 * config.ffn_size).view(2, config.ffn_size)
    return rows[:, share.cut(config.ffn_size)].flatten()
