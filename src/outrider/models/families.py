"""Model configs: `config.json` of GPT-2, Llama, Mistral, Qwen2, Qwen3 and Phi-3.

Defaults of absent keys are those of transformers. A setting that would change the logits and is not
implemented is refused by name, never ignored; a sliding window beyond which this decoder would
differ is cut, and a note says so. No tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from outrider.core.errors import CheckpointError
from outrider.core.spec import DecoderConfig
from outrider.models.json_object import (
    CONTRADICTION,
    MAX_LAYERS,
    OTHER_CHECKPOINT,
    JsonObject,
    bounded_window,
    refuse_activation,
    stop_ids,
    stored_dtype,
)
from outrider.models.published.scheme import scheme_of
from outrider.models.rope_config import (
    COMMON_ROPE,
    PHI3_ROPE,
    Rope,
    RopeRules,
    check_rotary,
    parse_rope,
)

_DEFAULTS: Mapping[str, object] = {"eos_token_id": 50256}
# The only value of each switch that this decoder has, which is also the default.
_SWITCHES: Mapping[str, bool] = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GPT2Config(DecoderConfig):
    """Sizes and options of GPT-2 and DistilGPT2. `max_tokens` is the number of positions that have
    an embedding."""

    family: str = "gpt2"
    layer_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True

    @property
    def num_parameters(self) -> int:
        hidden, ffn = self.hidden_size, self.ffn_size
        attention = 4 * hidden * hidden + 4 * hidden
        layer = attention + 2 * hidden * ffn + ffn + hidden + 4 * hidden
        tables = 1 if self.tie_word_embeddings else 2
        embeddings = (tables * self.vocab_size + self.max_tokens) * hidden
        return self.num_layers * layer + embeddings + 2 * hidden


def parse_gpt2(raw: JsonObject, generation: JsonObject | None = None) -> GPT2Config:
    """Raises CheckpointError, naming file and key, for anything missing, ill-typed or unknown."""
    raw = JsonObject(raw.where, {**_DEFAULTS, **raw.values})
    refuse_activation(raw, "activation_function", ("gelu_new",))
    scheme_of(raw)
    for key, only in _SWITCHES.items():
        if raw.flag(key, default=only) is not only:
            raise CheckpointError(
                f"{raw.where}: {key} {str(not only).lower()} is not supported; this decoder has "
                f"{str(only).lower()}.",
                hint=OTHER_CHECKPOINT,
            )
    vocab_size, hidden_size = raw.integer("vocab_size"), raw.integer("n_embd")
    num_heads = raw.integer("n_head")
    config = GPT2Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        ffn_size=raw.integer("n_inner", 4 * hidden_size),
        num_layers=raw.integer("n_layer", most=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """Sizes and options of a decoder of the Llama family.

    `qk_norm` normalises every query and key head before it turns. `fused_tensors` says that the
    files hold q, k and v as one matrix, and gate and up as one.
    """

    rms_norm_eps: float = 1e-6
    rope: Rope = field(default_factory=Rope)
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    fused_tensors: bool = False

    @property
    def num_parameters(self) -> int:
        attention = self.hidden_size * (self.qkv_size + self.num_heads * self.head_dim)
        attention += self.qkv_bias * self.qkv_size + self.out_bias * self.hidden_size
        attention += self.qk_norm * 2 * self.head_dim
        ffn = 3 * self.hidden_size * self.ffn_size
        ffn += self.mlp_bias * (2 * self.ffn_size + self.hidden_size)
        layer = attention + ffn + 2 * self.hidden_size
        tables = 1 if self.tie_word_embeddings else 2
        embeddings = tables * self.vocab_size * self.hidden_size
        return self.num_layers * layer + embeddings + self.hidden_size


def _no_window(raw: JsonObject) -> int | None:
    del raw
    return None


def _window_of_all_layers(raw: JsonObject) -> int | None:
    return raw.integer("sliding_window") if raw.has("sliding_window") else None


def _window_of_some_layers(raw: JsonObject) -> int | None:
    """Qwen: `layer_types` says which layers slide; without it, those from a certain one on may."""
    kinds = raw.texts("layer_types")
    if unknown := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        raise CheckpointError(
            f"{raw.where}: layer_types has {unknown[0]!r}, which is not supported.",
            hint=OTHER_CHECKPOINT,
        )
    if kinds:
        return raw.integer("sliding_window") if "sliding_attention" in kinds else None
    first = raw.integer("max_window_layers", least=0)
    if raw.flag("use_sliding_window", default=False) and first < raw.integer("num_hidden_layers"):
        return _window_of_all_layers(raw)
    return None


@dataclass(frozen=True, slots=True)
class _Family:
    """What sets a family apart: `defaults` of keys that are absent, `fixed` ones that it never
    reads, and how its layers slide."""

    defaults: Mapping[str, object] = field(default_factory=dict[str, object])
    fixed: Mapping[str, object] = field(default_factory=dict[str, object])
    window: Callable[[JsonObject], int | None] = _no_window
    rope: RopeRules = COMMON_ROPE
    qkv_bias: bool = False
    qk_norm: bool = False
    fused_tensors: bool = False


_NO_BIAS = {"attention_bias": False, "mlp_bias": False}
_QWEN = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(),
    "mistral": _Family(
        {"num_key_value_heads": 8, "sliding_window": 4096}, _NO_BIAS, _window_of_all_layers
    ),
    "qwen2": _Family(_QWEN, _NO_BIAS, _window_of_some_layers, qkv_bias=True),
    "qwen3": _Family(
        {**_QWEN, "head_dim": 128}, {"mlp_bias": False}, _window_of_some_layers, qk_norm=True
    ),
    "phi3": _Family(
        {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096, "eos_token_id": 32000},
        _NO_BIAS,
        _window_of_all_layers,
        PHI3_ROPE,
        fused_tensors=True,
    ),
}
LLAMA_FAMILIES = tuple(_FAMILIES)


def parse_llama(raw: JsonObject, generation: JsonObject | None = None) -> LlamaConfig:
    """Raises CheckpointError, naming file and key, for anything missing, ill-typed or unknown."""
    name = raw.text("model_type")
    family = _FAMILIES[name]
    raw = JsonObject(raw.where, {**family.defaults, **raw.values, **family.fixed})
    refuse_activation(raw, "hidden_act", ("silu", "swish"))
    scheme_of(raw)
    num_heads = raw.integer("num_attention_heads")
    hidden_size = raw.integer("hidden_size")
    vocab_size = raw.integer("vocab_size")
    rope = parse_rope(raw, family.rope)
    max_tokens, notes = _window(raw, rope, family.window(raw))
    attention_bias = raw.flag("attention_bias", default=False)
    config = LlamaConfig(
        family=name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        ffn_size=raw.integer("intermediate_size"),
        num_layers=raw.integer("num_hidden_layers", most=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=raw.integer("num_key_value_heads", num_heads),
        head_dim=raw.integer("head_dim", max(1, hidden_size // num_heads)),
        max_tokens=max_tokens,
        rms_norm_eps=raw.number("rms_norm_eps", 1e-6),
        rope=rope,
        tie_word_embeddings=raw.flag("tie_word_embeddings", default=False),
        qkv_bias=family.qkv_bias or attention_bias,
        out_bias=attention_bias,
        mlp_bias=raw.flag("mlp_bias", default=False),
        qk_norm=family.qk_norm,
        fused_tensors=family.fused_tensors,
        stop_ids=stop_ids(vocab_size, raw, generation),
        dtype=stored_dtype(raw),
        notes=notes,
    )
    _check_llama_heads(raw.where, config)
    return config


def _check_llama_heads(where: str, config: LlamaConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{where}: num_attention_heads {config.num_heads} is not a multiple of "
            f"num_key_value_heads {config.num_kv_heads}.",
            hint=CONTRADICTION,
        )
    check_rotary(where, config.rope, config.head_dim)


def _window(raw: JsonObject, rope: Rope, sliding: int | None) -> tuple[int, tuple[str, ...]]:
    """Within its sliding window such a model attends to everything, as this decoder does."""
    max_tokens = raw.integer("max_position_embeddings")
    limits: list[tuple[int, str]] = []
    if sliding is not None:
        limits.append((sliding, "sliding-window attention is not supported"))
    if rope.kind == "longrope":
        limits.append((rope.original_tokens, "the long factors of longrope are not supported"))
    window, reason = min(limits, default=(max_tokens, ""))
    if window >= max_tokens:
        return bounded_window(max_tokens)
    return window, (f"{reason}: the window is {window} tokens, not {max_tokens}",)
