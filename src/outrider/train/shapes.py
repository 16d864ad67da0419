"""Sizes of a small Llama from few numbers: what a user says, or what fits a target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from outrider.core.errors import ConfigError
from outrider.core.spec import Sizes
from outrider.models.families import LlamaConfig
from outrider.models.rope import Rope

HEAD_DIM = 64
_DRAFT_LAYERS = 2
_MOST_HIDDEN = 1024
_LEAST_HIDDEN = 64


class LayerSizes(Sizes, Protocol):
    """What configurations of all families that teach have in common."""

    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def rope(self) -> Rope: ...


@dataclass(frozen=True, slots=True)
class Widths:
    """Heads of 64, half as many for keys where that is whole, an FFN of 2.75 times the hidden
    size."""

    num_heads: int
    num_key_heads: int
    ffn_size: int


def widths_of(hidden_size: int) -> Widths:
    """Raises ConfigError for a hidden size that heads do not divide."""
    if hidden_size % HEAD_DIM:
        raise ConfigError(
            f"a hidden size of {hidden_size} is no multiple of {HEAD_DIM}, the size of a head.",
            hint=f"use --hidden {max(1, round(hidden_size / HEAD_DIM)) * HEAD_DIM}",
        )
    num_heads = hidden_size // HEAD_DIM
    return Widths(
        num_heads=num_heads,
        num_key_heads=num_heads if num_heads % 2 else num_heads // 2,
        ffn_size=hidden_size * 11 // 4,
    )


def plain_layers(sizes: LayerSizes, num_layers: int) -> LlamaConfig:
    """Layers of a Llama with these sizes, without biases, at positions that are not stretched."""
    return LlamaConfig(
        family="llama",
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        ffn_size=sizes.ffn_size,
        num_layers=num_layers,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        max_tokens=sizes.max_tokens,
        rms_norm_eps=sizes.rms_norm_eps,
        rope=Rope(theta=sizes.rope.theta),
    )


def small_llama(
    *,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    max_tokens: int,
    stop_ids: tuple[int, ...],
) -> LlamaConfig:
    """With the `widths_of` the hidden size, whose ConfigError it raises."""
    widths = widths_of(hidden_size)
    return LlamaConfig(
        family="llama",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        ffn_size=widths.ffn_size,
        num_layers=num_layers,
        num_heads=widths.num_heads,
        num_kv_heads=widths.num_key_heads,
        head_dim=HEAD_DIM,
        max_tokens=max_tokens,
        rms_norm_eps=1e-5,
        rope=Rope(),
        tie_word_embeddings=True,
        stop_ids=stop_ids,
    )


def draft_of(target: LlamaConfig, *, hidden_size: int = 0, num_layers: int = 0) -> LlamaConfig:
    """A draft for `target`: where nothing else is said, two layers of half its hidden size."""
    half = target.hidden_size // 2 // HEAD_DIM * HEAD_DIM
    return small_llama(
        vocab_size=target.vocab_size,
        hidden_size=hidden_size or min(_MOST_HIDDEN, max(_LEAST_HIDDEN, half)),
        num_layers=num_layers or _DRAFT_LAYERS,
        max_tokens=target.max_tokens,
        stop_ids=target.stop_ids,
    )
