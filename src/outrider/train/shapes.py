"""Sizes of a small Llama from few numbers: what a user says, or what fits a target."""

from __future__ import annotations

from outrider.core.errors import ConfigError
from outrider.models.llama_config import LlamaConfig
from outrider.models.rope_config import Rope

_HEAD_DIM = 64
_DRAFT_LAYERS = 2
_MOST_HIDDEN = 1024
_LEAST_HIDDEN = 64


def small_llama(
    *,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    max_tokens: int,
    stop_ids: tuple[int, ...],
) -> LlamaConfig:
    """Heads of 64, half as many for keys and values, an FFN of 2.75 times the hidden size.

    Raises ConfigError for a hidden size that heads do not divide.
    """
    if hidden_size % _HEAD_DIM:
        raise ConfigError(
            f"a hidden size of {hidden_size} is no multiple of {_HEAD_DIM}, the size of a head.",
            hint=f"use --hidden {max(1, round(hidden_size / _HEAD_DIM)) * _HEAD_DIM}",
        )
    num_heads = hidden_size // _HEAD_DIM
    return LlamaConfig(
        family="llama",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        ffn_size=hidden_size * 11 // 4,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads // 2 if num_heads % 2 == 0 else num_heads,
        head_dim=_HEAD_DIM,
        max_tokens=max_tokens,
        rms_norm_eps=1e-5,
        rope=Rope(),
        tie_word_embeddings=True,
        stop_ids=stop_ids,
    )


def draft_of(target: LlamaConfig, *, hidden_size: int = 0, num_layers: int = 0) -> LlamaConfig:
    """A draft for `target`: where nothing else is said, two layers of half its hidden size."""
    half = target.hidden_size // 2 // _HEAD_DIM * _HEAD_DIM
    return small_llama(
        vocab_size=target.vocab_size,
        hidden_size=hidden_size or min(_MOST_HIDDEN, max(_LEAST_HIDDEN, half)),
        num_layers=num_layers or _DRAFT_LAYERS,
        max_tokens=target.max_tokens,
        stop_ids=target.stop_ids,
    )
