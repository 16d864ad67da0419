"""`config.json` of Qwen3-Next and Qwen3.5: most layers are recurrent, every few attend.

Files of Qwen3.5 describe a text model within a model for text and pictures; only the text model is
read. Defaults of absent keys are those of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from outrider.core.errors import CheckpointError
from outrider.core.spec import DecoderConfig, ModelSpec
from outrider.kernels.reference.delta import StateShape
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
from outrider.models.layer_kinds import Experts, check_experts, sparse_layers
from outrider.models.published.scheme import scheme_of
from outrider.models.rope_config import COMMON_ROPE, Rope, RopeRules, check_rotary, parse_rope

HYBRID_FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
_KINDS = ("linear_attention", "full_attention")
_ROPE = RopeRules(COMMON_ROPE.kinds, partial=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenHybridConfig(DecoderConfig):
    """Sizes and options of a hybrid decoder. `attention_layers` attend, the others are recurrent;
    `sparse_layers` are those whose feed-forward is a mixture of `experts`."""

    attention_layers: tuple[int, ...]
    delta: StateShape
    experts: Experts | None = None
    sparse_layers: tuple[int, ...] = ()
    rms_norm_eps: float = 1e-6
    rope: Rope = field(default_factory=Rope)

    @property
    def value_size(self) -> int:
        """Size of all value heads of a recurrent layer together."""
        return self.delta.num_heads * self.delta.value_dim

    @property
    def num_parameters(self) -> int:
        hidden, delta, attended = self.hidden_size, self.delta, self.num_heads * self.head_dim
        attention = hidden * (self.qkv_size + 2 * attended) + 2 * self.head_dim
        recurrent = hidden * (delta.num_channels + 2 * self.value_size + 2 * delta.num_heads)
        recurrent += delta.num_channels * delta.num_taps + 2 * delta.num_heads + delta.value_dim
        tables = (1 if self.tie_word_embeddings else 2) * self.vocab_size * hidden
        dense = (self.num_layers - len(self.sparse_layers)) * 3 * hidden * self.ffn_size
        return (
            len(self.attention_layers) * attention
            + delta.num_layers * recurrent
            + dense
            + len(self.sparse_layers) * (self.experts.num_parameters(hidden) if self.experts else 0)
            + (2 * self.num_layers + 1) * hidden
            + tables
        )

    def spec(self, name: str, *, bytes_per_weight: int, bytes_per_kv: int) -> ModelSpec:
        sizes = {"bytes_per_weight": bytes_per_weight, "bytes_per_kv": bytes_per_kv}
        plain = DecoderConfig.spec(self, name, **sizes)
        experts = self.experts
        of_layer = experts.expert_parameters(self.hidden_size) if experts else 0
        return replace(
            plain,
            num_kv_layers=len(self.attention_layers),
            state_bytes=self.delta.state_bytes,
            input_bytes=self.delta.input_bytes,
            num_experts=experts.num_experts if experts else 0,
            num_active_experts=experts.num_chosen if experts else 0,
            expert_parameters=len(self.sparse_layers) * of_layer,
        )


_DEFAULTS: Mapping[str, object] = {
    "partial_rotary_factor": 0.25,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_FAMILY_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "qwen3_next": {
        "intermediate_size": 5632,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "decoder_sparse_step": 1,
    },
    "qwen3_5_text": {"num_key_value_heads": 4},
    "qwen3_5_moe_text": {"num_experts": 256, "num_experts_per_tok": 8},
}


def parse_qwen_hybrid(raw: JsonObject, generation: JsonObject | None = None) -> QwenHybridConfig:
    """Parse a config. Raises CheckpointError, naming file and key, for a bad or unknown value."""
    family = raw.text("model_type")
    text = raw.child("text_config") or raw
    name = text.text("model_type", family)
    if name in ("qwen3_5", "qwen3_5_moe"):
        name += "_text"
    given = {key: value for key, value in text.values.items() if value is not None}
    text = JsonObject(text.where, {**_DEFAULTS, **_FAMILY_DEFAULTS.get(name, {}), **given})
    refuse_activation(text, "hidden_act", ("silu", "swish"))
    scheme_of(raw)
    if text.flag("attention_bias", default=False):
        raise CheckpointError(
            f"{text.where}: attention_bias is not supported for model_type {family!r}.",
            hint=OTHER_CHECKPOINT,
        )
    num_layers = text.integer("num_hidden_layers", most=MAX_LAYERS)
    attending = _attention_layers(text, num_layers)
    experts = _experts(text)
    num_heads = text.integer("num_attention_heads")
    max_tokens, cut = bounded_window(text.integer("max_position_embeddings", 32768))
    vocab_size = text.integer("vocab_size")
    config = QwenHybridConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=text.integer("hidden_size"),
        ffn_size=text.integer("intermediate_size", experts.shared_ffn_size if experts else None),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=text.integer("num_key_value_heads"),
        head_dim=text.integer("head_dim"),
        max_tokens=max_tokens,
        attention_layers=attending,
        delta=_delta(text, num_layers - len(attending)),
        experts=experts,
        sparse_layers=sparse_layers(text, num_layers) if experts else (),
        rms_norm_eps=text.number("rms_norm_eps", 1e-6),
        rope=parse_rope(text, _ROPE),
        tie_word_embeddings=_tied(raw, text),
        stop_ids=stop_ids(vocab_size, raw, text, generation),
        dtype=stored_dtype(raw) or stored_dtype(text),
        notes=(*_notes(raw), *cut),
    )
    _check(text.where, config)
    return config


def _attention_layers(text: JsonObject, num_layers: int) -> tuple[int, ...]:
    kinds = text.texts("layer_types")
    if not kinds:
        every = text.integer("full_attention_interval", 4)
        kinds = tuple(_KINDS[(index + 1) % every == 0] for index in range(num_layers))
    unknown = sorted(set(kinds) - set(_KINDS))
    if unknown:
        raise CheckpointError(
            f"{text.where}: layer_types has {unknown[0]!r}, which is not supported.",
            hint=OTHER_CHECKPOINT,
        )
    if len(kinds) != num_layers:
        raise CheckpointError(
            f"{text.where}: layer_types has {len(kinds)} entries for {num_layers} layers.",
            hint=CONTRADICTION,
        )
    if "full_attention" not in kinds:
        raise CheckpointError(
            f"{text.where}: no layer attends, which is not supported.", hint=OTHER_CHECKPOINT
        )
    return tuple(index for index, kind in enumerate(kinds) if kind == "full_attention")


def _delta(text: JsonObject, num_layers: int) -> StateShape:
    key_heads, heads = text.integer("linear_num_key_heads"), text.integer("linear_num_value_heads")
    key_dim, value_dim = text.integer("linear_key_head_dim"), text.integer("linear_value_head_dim")
    return StateShape(
        num_layers=num_layers,
        num_taps=text.integer("linear_conv_kernel_dim", least=2),
        num_channels=2 * key_heads * key_dim + heads * value_dim,
        num_key_heads=key_heads,
        num_heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
    )


def _experts(text: JsonObject) -> Experts | None:
    if not text.has("num_experts") or not text.integer("num_experts", least=0):
        return None
    return Experts(
        num_experts=text.integer("num_experts"),
        num_chosen=text.integer("num_experts_per_tok"),
        ffn_size=text.integer("moe_intermediate_size"),
        shared_ffn_size=text.integer("shared_expert_intermediate_size"),
        normalise=text.flag("norm_topk_prob", default=True),
    )


def _tied(raw: JsonObject, text: JsonObject) -> bool:
    return raw.flag("tie_word_embeddings", default=text.flag("tie_word_embeddings", default=False))


def _notes(raw: JsonObject) -> tuple[str, ...]:
    if not raw.has("vision_config"):
        return ()
    return ("the model also takes pictures; Outrider runs its text part",)


def _check(where: str, config: QwenHybridConfig) -> None:
    delta, experts = config.delta, config.experts
    pairs = [
        ("num_attention_heads", config.num_heads, "num_key_value_heads", config.num_kv_heads),
        ("linear_num_value_heads", delta.num_heads, "linear_num_key_heads", delta.num_key_heads),
    ]
    for many, number, few, divisor in pairs:
        if number % divisor:
            raise CheckpointError(
                f"{where}: {many} {number} is not a multiple of {few} {divisor}.",
                hint=CONTRADICTION,
            )
    if experts is not None:
        check_experts(where, experts)
    check_rotary(where, config.rope, config.head_dim)
