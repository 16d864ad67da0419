"""A model of the Llama family as llama.cpp has it: its keys, its tensors' names and their rows.

llama.cpp turns neighbouring pairs (2i, 2i + 1) of a head for `llama`, where checkpoints pair
(i, i + H/2). So rows of queries and keys are interleaved for that architecture, and scores, sums
over a head, stay the same. For `qwen2` and `qwen3` it pairs as checkpoints do.

The stretching of Llama 3 is a tensor, by what each frequency is divided.

Shapes:  O = outputs, I = inputs, H = size of a head, R = H/2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.core.errors import CheckpointError
from outrider.models.gguf import Value
from outrider.models.llama_config import LlamaConfig
from outrider.models.llama_weights import EMBEDDING
from outrider.models.rope import frequencies
from outrider.models.weights import HEAD, Weights

_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_PAIRS_NEIGHBOURS = ("llama",)
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}


@dataclass(frozen=True, slots=True)
class Exportable:
    """A tensor of the file and how it is read; `is_matrix` ones take the file's number format."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) == 2


def architecture_of(config: LlamaConfig) -> str:
    """Raises CheckpointError for a model that llama.cpp would not run as it is meant."""
    found = _ARCHITECTURES.get(config.family)
    if found is None:
        raise CheckpointError(
            f"a {config.family} model cannot be exported to GGUF.",
            hint=f"it can be done for: {', '.join(_ARCHITECTURES)}",
        )
    stretched = config.rope.kind
    if stretched not in ("default", "linear", *(["llama3"] if found == "llama" else [])):
        raise CheckpointError(
            f"positions of type {stretched!r} cannot be exported to GGUF for a {found} model.",
            hint="choose a checkpoint whose config.json has no such rope_scaling",
        )
    if found != "llama" and (config.out_bias or config.mlp_bias):
        raise CheckpointError(
            f"a {config.family} model with biases after attention cannot be exported to GGUF.",
            hint="choose a checkpoint without attention_bias",
        )
    return found


def metadata_of(config: LlamaConfig, name: str) -> dict[str, Value]:
    """The keys that describe the model, without its tokenizer and number format."""
    arch = architecture_of(config)
    sizes: dict[str, Value] = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_tokens,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.ffn_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": config.rope.theta,
    }
    if config.rope.kind == "linear":
        sizes |= {"rope.scaling.type": "linear", "rope.scaling.factor": config.rope.factor}
    general: dict[str, Value] = {
        "general.architecture": arch,
        "general.type": "model",
        "general.name": name,
    }
    return general | {f"{arch}.{key}": value for key, value in sizes.items()}


def tensors_of(config: LlamaConfig, weights: Weights) -> list[Exportable]:
    """All of them in the order of a pass; nothing is read yet."""
    table = (config.vocab_size, config.hidden_size)
    found = [_plain(weights, "token_embd.weight", EMBEDDING, table)]
    if config.rope.kind == "llama3":
        found.append(
            Exportable("rope_freqs.weight", (config.head_dim // 2,), lambda: _factors(config))
        )
    for index in range(config.num_layers):
        found += _layer(config, weights, index)
    found.append(_plain(weights, "output_norm.weight", "model.norm.weight", table[1:]))
    # As in transformers, a head that is stored wins over tying; without one, the embedding serves.
    if HEAD in weights or not config.tie_word_embeddings:
        found.append(_plain(weights, "output.weight", HEAD, table))
    return found


def _layer(config: LlamaConfig, weights: Weights, index: int) -> Iterator[Exportable]:
    ours, theirs = f"model.layers.{index}.", f"blk.{index}."
    for name, source in _NORMS.items():
        shape = (config.hidden_size,)
        yield _plain(weights, f"{theirs}{name}.weight", f"{ours}{source}.weight", shape)
    if config.qk_norm:
        for side in ("q", "k"):
            source = f"{ours}self_attn.{side}_norm.weight"
            yield _plain(weights, f"{theirs}attn_{side}_norm.weight", source, (config.head_dim,))
    for name, source, sizes, bias in _products(config):
        weight = _plain(weights, f"{theirs}{name}.weight", f"{ours}{source}.weight", sizes)
        parts = [weight]
        if bias:
            parts.append(_plain(weights, f"{theirs}{name}.bias", f"{ours}{source}.bias", sizes[:1]))
        turns = name in ("attn_q", "attn_k")
        neighbours = architecture_of(config) in _PAIRS_NEIGHBOURS
        yield from (
            (_interleaved(part, config.head_dim) for part in parts)
            if (turns and neighbours)
            else parts
        )


def _products(config: LlamaConfig) -> list[tuple[str, str, tuple[int, int], bool]]:
    """Names, (outputs, inputs) and whether there is a bias, of the matrices of a layer."""
    hidden, ffn = config.hidden_size, config.ffn_size
    attended, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return [
        ("attn_q", "self_attn.q_proj", (attended, hidden), config.qkv_bias),
        ("attn_k", "self_attn.k_proj", (kv, hidden), config.qkv_bias),
        ("attn_v", "self_attn.v_proj", (kv, hidden), config.qkv_bias),
        ("attn_output", "self_attn.o_proj", (hidden, attended), config.out_bias),
        ("ffn_gate", "mlp.gate_proj", (ffn, hidden), config.mlp_bias),
        ("ffn_up", "mlp.up_proj", (ffn, hidden), config.mlp_bias),
        ("ffn_down", "mlp.down_proj", (hidden, ffn), config.mlp_bias),
    ]


def _plain(weights: Weights, name: str, source: str, shape: tuple[int, ...]) -> Exportable:
    return Exportable(name, shape, lambda: weights.take(source, *shape))


def _interleaved(tensor: Exportable, head_dim: int) -> Exportable:
    return replace(tensor, read=lambda: interleave(tensor.read(), head_dim))


def interleave(rows_O: Tensor, head_dim: int) -> Tensor:
    """Rows of each head in the order 0, R, 1, R + 1, ...; `rows_O` is a matrix or a bias."""
    order_H = torch.arange(head_dim).view(2, -1).T.flatten()
    order_O = torch.arange(rows_O.shape[0]).view(-1, head_dim)[:, order_H].flatten()
    return rows_O[order_O]


def _factors(config: LlamaConfig) -> Tensor:
    """factors_R: what llama.cpp divides each plain frequency by."""
    plain_R = frequencies(replace(config.rope, kind="default"), config.head_dim)
    return plain_R / frequencies(config.rope, config.head_dim)
