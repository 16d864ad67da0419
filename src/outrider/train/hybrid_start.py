"""How a hybrid begins that has a teacher: with what of the teacher it can use.

With the teacher's hidden and FFN size it takes the last norm and the embedding, which stays as it
is where it is the teacher's output head too. Layers that are spread from the teacher's first to its
last give the FFN, the norms and, where the hybrid attends, the heads. The first one makes of the
embedding what all others read, so nothing can do without it. Recurrences begin at random, and
small. Of another hidden size there is the embedding alone, projected.

Shapes:  D = hidden size, E = heads x head size, G = heads, H = head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from outrider.models.families import LlamaConfig
from outrider.models.qwen_hybrid_config import QwenHybridConfig
from outrider.train.draft_model import begin_like
from outrider.train.hybrid_module import GatedAttention, Hybrid, HybridLayer
from outrider.train.llama_module import Attention, Layer, Llama


@torch.no_grad()
def begin_as(net: Hybrid, teacher: Llama) -> None:
    """Overwrite what `net` takes from `teacher`."""
    own, theirs = net.config, teacher.config
    if (own.hidden_size, own.ffn_size) != (theirs.hidden_size, theirs.ffn_size) or theirs.mlp_bias:
        begin_like(net.model.embed_tokens.weight, teacher.model.embed_tokens.weight)
        return
    net.model.embed_tokens.weight.copy_(teacher.model.embed_tokens.weight)
    net.model.embed_tokens.requires_grad_(requires_grad=not theirs.tie_word_embeddings)
    net.model.norm.weight.copy_(teacher.model.norm.weight - 1)
    layers = cast("Sequence[HybridLayer]", net.model.layers)
    taught = cast("Sequence[Layer]", teacher.model.layers)
    last = len(taught) - 1
    spread = [round(number * last / max(len(layers) - 1, 1)) for number in range(len(layers))]
    pairs = [(layer, taught[number]) for layer, number in zip(layers, spread, strict=True)]
    for layer, like in (*pairs, (cast("HybridLayer", net.mtp.layers[0]), taught[-1])):
        layer.input_layernorm.weight.copy_(like.input_layernorm.weight - 1)
        layer.post_attention_layernorm.weight.copy_(like.post_attention_layernorm.weight - 1)
        layer.mlp.load_state_dict(like.mlp.state_dict())
        if layer.attends and _same_heads(own, theirs):
            _begin_heads(layer.self_attn, like)


def _same_heads(own: QwenHybridConfig, theirs: LlamaConfig) -> bool:
    plain = not (theirs.qkv_bias or theirs.out_bias or theirs.qk_norm)
    sizes = [(one.num_heads, one.num_kv_heads, one.head_dim, one.rope) for one in (own, theirs)]
    return plain and sizes[0] == sizes[1]


def _begin_heads(heads: GatedAttention, taught: Layer) -> None:
    """Gates begin about a half, which `o_proj` makes up for; norms begin as long as the teacher's
    queries and keys are on the whole."""
    own: Attention = taught.self_attn
    head, hidden = heads.q_norm.weight.shape[0], own.q_proj.weight.shape[1]
    queries_GHD = own.q_proj.weight.view(-1, head, hidden)
    heads.q_proj.weight.view(-1, 2, head, hidden)[:, 0] = queries_GHD
    heads.k_proj.weight.copy_(own.k_proj.weight)
    heads.v_proj.weight.copy_(own.v_proj.weight)
    heads.o_proj.weight.copy_(2 * own.o_proj.weight)
    scale_D = taught.input_layernorm.weight
    heads.q_norm.weight.fill_(_length(own.q_proj.weight, scale_D) - 1)
    heads.k_norm.weight.fill_(_length(own.k_proj.weight, scale_D) - 1)


def _length(weight_ED: Tensor, scale_D: Tensor) -> float:
    """Root mean square of what a matrix makes of normed rows, were their parts independent."""
    return float((weight_ED * scale_D).pow(2).sum(1).mean().sqrt())
