"""GPT-2's `config.json`, whose keys have names of their own. No tensors.

Defaults of absent keys are those of transformers. A setting that would change the logits and is
not implemented is refused by name, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outrider.core.errors import CheckpointError
from outrider.core.spec import ModelSpec, spec_of
from outrider.models.config_keys import (
    CONTRADICTION,
    MAX_LAYERS,
    OTHER_CHECKPOINT,
    refuse_activation,
    refuse_quantised,
    stop_ids,
    stored_dtype,
)
from outrider.models.json_object import JsonObject

_DEFAULTS: Mapping[str, object] = {"eos_token_id": 50256}
# The only value of each switch that this decoder has, which is also the default.
_SWITCHES: Mapping[str, bool] = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
}


@dataclass(frozen=True, slots=True)
class GPT2Config:
    """Sizes and options of GPT-2 and DistilGPT2.

    `max_tokens` is the number of positions that have an embedding. `dtype` is the checkpoint's
    own, "" if unsaid; `notes` are sentences for the user on what the loader decided.
    """

    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    max_tokens: int
    layer_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    stop_ids: tuple[int, ...] = ()
    dtype: str = ""
    notes: tuple[str, ...] = ()
    family: str = "gpt2"

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def num_parameters(self) -> int:
        hidden, ffn = self.hidden_size, self.ffn_size
        attention = 4 * hidden * hidden + 4 * hidden
        layer = attention + 2 * hidden * ffn + ffn + hidden + 4 * hidden
        tables = 1 if self.tie_word_embeddings else 2
        embeddings = (tables * self.vocab_size + self.max_tokens) * hidden
        return self.num_layers * layer + embeddings + 2 * hidden

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    def spec(self, name: str, *, bytes_per_weight: int, bytes_per_kv: int) -> ModelSpec:
        return spec_of(self, name, bytes_per_weight=bytes_per_weight, bytes_per_kv=bytes_per_kv)


def parse_gpt2(raw: JsonObject, generation: JsonObject | None = None) -> GPT2Config:
    """Raises CheckpointError, naming file and key, for anything missing, ill-typed or unknown."""
    raw = JsonObject(raw.where, {**_DEFAULTS, **raw.values})
    refuse_activation(raw, "activation_function", ("gelu_new",))
    refuse_quantised(raw)
    for key, only in _SWITCHES.items():
        if raw.flag(key, default=only) is not only:
            raise CheckpointError(
                f"{raw.where}: {key} {str(not only).lower()} is not supported; this decoder has "
                f"{str(only).lower()}.",
                hint=OTHER_CHECKPOINT,
            )
    vocab_size, hidden_size = raw.integer("vocab_size"), raw.integer("n_embd")
    config = GPT2Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        ffn_size=raw.integer("n_inner", 4 * hidden_size),
        num_layers=raw.integer("n_layer", most=MAX_LAYERS),
        num_heads=raw.integer("n_head"),
        max_tokens=raw.integer("n_positions"),
        layer_norm_eps=raw.number("layer_norm_epsilon", 1e-5),
        tie_word_embeddings=raw.flag("tie_word_embeddings", default=True),
        stop_ids=stop_ids(vocab_size, raw, generation),
        dtype=stored_dtype(raw),
    )
    _check_heads(raw.where, config)
    return config


def _check_heads(where: str, config: GPT2Config) -> None:
    if config.hidden_size % (2 * config.num_heads):
        raise CheckpointError(
            f"{where}: n_embd {config.hidden_size} does not divide into {config.num_heads} heads "
            "(n_head) of an even size.",
            hint=CONTRADICTION,
        )
