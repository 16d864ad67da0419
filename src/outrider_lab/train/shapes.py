"""Sizes of a small Llama or hybrid from few numbers: what a user says, or what fits a target.

A hybrid's `config.json` names the family Qwen3.5. Of every four layers the third attends and the
others are recurrences: as many as in what is published, where it is the fourth. Of fewer than three
the last one attends.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from outrider.core.errors import ConfigError
from outrider.core.spec import DecoderConfig, StateShape
from outrider.models.configs import HybridConfig, LlamaConfig
from outrider.models.rope_config import Rope
from outrider_lab.models.inflate_files import llama_json, sizes_json

HEAD_DIM = 64
_DRAFT_LAYERS = 2
_MOST_HIDDEN = 1024
_LEAST_HIDDEN = 64
_SAME = (
    "vocab_size", "hidden_size", "ffn_size", "num_heads", "num_kv_heads", "head_dim", "max_tokens",
    "rms_norm_eps",
)  # fmt: skip


def plain_layers(sizes: LlamaConfig | HybridConfig, num_layers: int) -> LlamaConfig:
    """Layers of a Llama with these sizes, without biases, at positions that are not stretched."""
    same = {name: getattr(sizes, name) for name in _SAME}
    rope = Rope(theta=sizes.rope.theta)
    return LlamaConfig(family="llama", num_layers=num_layers, rope=rope, **same)


def small_llama(
    *,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    max_tokens: int,
    stop_ids: tuple[int, ...],
) -> LlamaConfig:
    """Heads of 64, half as many for keys where that is whole, an FFN of 2.75 times the hidden size.

    Raises ConfigError for a hidden size that heads do not divide.
    """
    if hidden_size % HEAD_DIM:
        raise ConfigError(
            f"a hidden size of {hidden_size} is no multiple of {HEAD_DIM}, the size of a head.",
            hint=f"use --hidden {max(1, round(hidden_size / HEAD_DIM)) * HEAD_DIM}",
        )
    num_heads = hidden_size // HEAD_DIM
    return LlamaConfig(
        family="llama",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        ffn_size=hidden_size * 11 // 4,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads if num_heads % 2 else num_heads // 2,
        head_dim=HEAD_DIM,
        max_tokens=max_tokens,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        stop_ids=stop_ids,
    )


def draft_of(target: DecoderConfig, *, hidden_size: int = 0, num_layers: int = 0) -> LlamaConfig:
    """A draft for `target`: where nothing else is said, two layers of half its hidden size."""
    half = target.hidden_size // 2 // HEAD_DIM * HEAD_DIM
    return small_llama(
        vocab_size=target.vocab_size,
        hidden_size=hidden_size or min(_MOST_HIDDEN, max(_LEAST_HIDDEN, half)),
        num_layers=num_layers or _DRAFT_LAYERS,
        max_tokens=target.max_tokens,
        stop_ids=target.stop_ids,
    )


_FIRST, _EVERY = 2, 4
_TAPS = 4
_FAMILY = "qwen3_5_text"


def small_hybrid(
    *,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    max_tokens: int,
    stop_ids: tuple[int, ...],
) -> HybridConfig:
    """As `small_llama`, in heads of recurrences too."""
    sizes = small_llama(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        max_tokens=max_tokens,
        stop_ids=stop_ids,
    )
    num_heads, num_key_heads = sizes.num_heads, sizes.num_kv_heads
    attending = tuple(range(_FIRST, num_layers, _EVERY)) or (num_layers - 1,)
    return HybridConfig(
        family=_FAMILY,
        num_layers=num_layers,
        attention_layers=attending,
        delta=StateShape(
            num_layers=num_layers - len(attending),
            num_taps=_TAPS,
            num_channels=(2 * num_key_heads + num_heads) * HEAD_DIM,
            num_key_heads=num_key_heads,
            num_heads=num_heads,
            key_dim=HEAD_DIM,
            value_dim=HEAD_DIM,
        ),
        tie_word_embeddings=True,
        stop_ids=stop_ids,
        **{name: getattr(sizes, name) for name in _SAME if name != "rms_norm_eps"},
    )


def attending_sizes(config: HybridConfig) -> LlamaConfig:
    """What an attending layer shares with one of a Llama: its FFN, its heads and its positions."""
    return replace(plain_layers(config, config.num_layers), rope=config.rope)


def config_json(config: LlamaConfig | HybridConfig, dtype: torch.dtype) -> dict[str, object]:
    """`config.json` of a plain Llama, or of a dense Qwen3.5 with one MTP block and positions that
    are not stretched."""
    stop, rope = list(config.stop_ids), config.rope
    shared: dict[str, object] = {
        "attention_bias": False,
        "bos_token_id": stop[0] if stop else None,
        "eos_token_id": stop if len(stop) > 1 else (stop[0] if stop else None),
    }
    if isinstance(config, LlamaConfig):
        return llama_json(config, dtype) | shared | {"mlp_bias": False, "rope_theta": rope.theta}
    delta, attends = config.delta, set(config.attention_layers)
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_tokens,
        "hidden_act": "silu",
        **sizes_json(config, dtype),
        **shared,
        "layer_types": [
            "full_attention" if index in attends else "linear_attention"
            for index in range(config.num_layers)
        ],
        "linear_conv_kernel_dim": delta.num_taps,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_num_key_heads": delta.num_key_heads,
        "linear_num_value_heads": delta.num_heads,
        "mtp_num_hidden_layers": 1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": rope.theta,
            "partial_rotary_factor": rope.partial_rotary_factor,
        },
    }
